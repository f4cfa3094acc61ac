"""A step's batch as kernels read it: every number they need lies on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import AttentionBatch


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """What a kernel launch takes of an `AttentionBatch`.

    A captured graph is replayed over the same tensors with other contents. Its batch is padded: a row that
    stands for no sequence has slot -1 (nothing is written for it) and context length 0 (its output is zeros).

    Attributes:
        slots: int64 [num_tokens].
        block_tables: int32 [num_seqs, max_blocks].
        query_starts: int32 [num_seqs + 1].
        context_lens: int32 [num_seqs].
        max_query_len, max_context_len: bounds known on the host; launches are sized by them.
        block_size: slots in a block.
    """

    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    max_query_len: int
    max_context_len: int
    block_size: int

    @property
    def num_seqs(self) -> int:
        return self.block_tables.shape[0]

    @classmethod
    def of(cls, batch: AttentionBatch) -> "DeviceBatch":
        """The batch's own, made at the first call; a runner with persistent buffers puts its own into
        `batch.memo[DeviceBatch]` beforehand."""
        known = batch.memo.get(cls)
        if isinstance(known, cls):
            return known
        device = batch.slots.device
        made = cls(
            slots=batch.slots,
            block_tables=batch.block_tables,
            query_starts=torch.tensor(batch.query_starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(batch.context_lens, dtype=torch.int32, device=device),
            max_query_len=max(batch.query_len(i) for i in range(batch.num_seqs)),
            max_context_len=max(batch.context_lens),
            block_size=batch.block_size,
        )
        batch.memo[cls] = made
        return made
