"""Whether the head of a known block is worth copying: seconds to copy a block, and to compute its tokens again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bench.kv_memory.report import Chart, Column, Table
from kernels.batch import AttentionBatch
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from workers.models.decoder import CausalLM
from workers.weights import load_model

BLOCK_SIZES = (16, 64)
NUM_SAVED_TOKENS = (1, 4, 15)
CHUNK_TOKENS = 512
_NUM_CHUNKS = 5
_NUM_COPIES = 50
_NUM_POOL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Seconds to copy one block in all layers, and to compute a token more in a chunk of CHUNK_TOKENS."""

    kv_dtype: KvDtype
    block_size: int
    block_bytes: int
    copy_s: float
    token_s: float

    @property
    def break_even_tokens(self) -> float:
        """A copy pays from so many saved tokens on."""
        return self.copy_s / self.token_s


def layout_of(model: CausalLM, kv_dtype: KvDtype, block_size: int) -> KvLayout:
    """The pool's layout for a model that computes in float32."""
    spec = model.spec
    return KvLayout(
        spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, kv_dtype, torch.float32
    )


@torch.inference_mode()
def measure(
    model: CausalLM,
    kv_dtype: KvDtype,
    block_size: int,
    chunk_tokens: int = CHUNK_TOKENS,
    num_chunks: int = _NUM_CHUNKS,
) -> CopyCost:
    """Medians. A token's seconds are the slope between a chunk a quarter shorter and one a quarter longer."""
    layout = layout_of(model, kv_dtype, block_size)
    pool = KvPool(layout, _NUM_POOL_TOKENS // block_size, torch.device("cpu"))
    for layer in pool.layers:
        for tensor in layer.tensors():
            tensor.view(
                torch.uint8
            ).zero_()  # so that no page of memory is first touched while the clock runs
    short, long = chunk_tokens * 3 // 4, chunk_tokens * 5 // 4
    slopes = []
    for _ in range(num_chunks):
        # In turns, so that whatever else the machine does falls on both alike.
        short_s, long_s = (_seconds(partial(_compute, model, pool, n)) for n in (short, long))
        slopes.append((long_s - short_s) / (long - short))
    pairs = _distant_pairs(pool.num_blocks)
    copies = [_seconds(partial(pool.copy_blocks, [pair])) for pair in pairs]
    return CopyCost(kv_dtype, block_size, layout.block_bytes, median(copies), median(slopes))


def _distant_pairs(num_blocks: int) -> Iterator[tuple[int, int]]:
    """Sources and targets that no cache still holds from the copy before."""
    for i in range(_NUM_COPIES):
        yield (i * 7) % (num_blocks // 2), num_blocks // 2 + (i * 11) % (num_blocks // 2)


def _compute(model: CausalLM, pool: KvPool, num_tokens: int) -> None:
    block_size = pool.layout.block_size
    batch = AttentionBatch(
        slots=torch.arange(num_tokens),
        block_tables=torch.arange(-(-num_tokens // block_size), dtype=torch.int32)[None],
        query_starts=(0, num_tokens),
        context_lens=(num_tokens,),
        block_size=block_size,
    )
    model.forward(torch.arange(num_tokens), torch.arange(num_tokens), batch, pool)


def _seconds(action: Callable[[], None]) -> float:
    begun_s = perf_counter()
    action()
    return perf_counter() - begun_s


def table(model_dir: Path) -> Table:
    """fp32 and fp8 pools of one model, on this machine's CPU."""
    model = load_model(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    costs = [
        measure(model, kv_dtype, block_size)
        for kv_dtype in (KvDtype.AUTO, KvDtype.FP8_E4M3)
        for block_size in BLOCK_SIZES
    ]
    return as_table(costs)


def as_table(costs: Sequence[CopyCost]) -> Table:
    return Table(
        name="partial_copy",
        title=f"Copying a block against computing its head again, in a chunk of {CHUNK_TOKENS} tokens",
        columns=(
            Column("kv_dtype", "pool"),
            Column("block_size", "block", "count"),
            Column("block_bytes", "bytes", "count"),
            Column("copy_s", "one copy", "seconds"),
            *(
                Column(f"compute_{count}_s", f"{count} token{'s' * (count > 1)}", "seconds")
                for count in NUM_SAVED_TOKENS
            ),
            Column("break_even_tokens", "pays from … tokens", "ratio"),
        ),
        rows=tuple(
            (
                "fp32" if cost.kv_dtype is KvDtype.AUTO else cost.kv_dtype.value,
                cost.block_size,
                cost.block_bytes,
                cost.copy_s,
                *(count * cost.token_s for count in NUM_SAVED_TOKENS),
                cost.break_even_tokens,
            )
            for cost in costs
        ),
        notes=("Tokens are the slope of a chunk's time over its length, times their number.",),
        chart=Chart("block_size", ("break_even_tokens",), ("kv_dtype",), kind="bars"),
    )
