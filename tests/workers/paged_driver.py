"""The least engine that can run a model: it hands out blocks in a scrambled order and keeps no cache."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from workers.models.decoder import CausalLM


@dataclass
class Sequence:
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedDriver:
    """A pool full of NaN, and steps over any mix of chunks."""

    def __init__(
        self,
        model: CausalLM,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        kv_dtype: KvDtype = KvDtype.AUTO,
        seed: int = 0,
    ) -> None:
        spec = model.spec
        layout = KvLayout(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, kv_dtype, model.dtype
        )
        self.model = model
        self.pool = KvPool(layout, num_blocks, model.device)
        fill_with_nan(self.pool)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def start(self, token_ids: list[int], shared: tuple[int, ...] = ()) -> Sequence:
        """A new sequence; `shared` blocks already hold its first tokens."""
        block_size = self.pool.layout.block_size
        return Sequence(list(token_ids), list(shared), len(shared) * block_size)

    @torch.inference_mode()
    def step(self, work: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Runs the next `n` tokens of each sequence in one batch; float32 logits [n, vocab_size] of each."""
        block_size = self.pool.layout.block_size
        token_ids, positions, slots, starts = [], [], [], [0]
        for sequence, num_tokens in work:
            end = sequence.num_computed + num_tokens
            while len(sequence.block_table) * block_size < end:
                sequence.block_table.append(self._free.pop())
            for position in range(sequence.num_computed, end):
                token_ids.append(sequence.token_ids[position])
                positions.append(position)
                block = sequence.block_table[position // block_size]
                slots.append(block * block_size + position % block_size)
            sequence.num_computed = end
            starts.append(len(token_ids))
        width = max(len(sequence.block_table) for sequence, _ in work)
        tables = [s.block_table + [0] * (width - len(s.block_table)) for s, _ in work]
        batch = AttentionBatch(
            slots=torch.tensor(slots),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_starts=tuple(starts),
            context_lens=tuple(sequence.num_computed for sequence, _ in work),
            block_size=block_size,
        )
        hidden = self.model.forward(
            torch.tensor(token_ids), torch.tensor(positions), batch, self.pool
        )
        logits = self.model.logits(hidden)
        return list(logits.split([n for _, n in work]))

    def run(self, sequence: Sequence, chunk: int) -> Tensor:
        """The rest of the sequence in chunks; logits of all its rows."""
        rows = []
        while sequence.num_computed < len(sequence.token_ids):
            left = len(sequence.token_ids) - sequence.num_computed
            rows += self.step([(sequence, min(chunk, left))])
        return torch.cat(rows)


def fill_with_nan(pool: KvPool) -> None:
    for cache in pool.layers:
        for tensor in cache.tensors():
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).fill_(0x7F)
            else:
                tensor.fill_(float("nan"))
