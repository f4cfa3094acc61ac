"""One step's work as the device code sees it: a ragged batch of sequences."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step's ragged batch; sequence i owns token rows `query_starts[i]:query_starts[i + 1]`.

        rows           0 1 2 3 4 | 5 | 6 | 7 8 …
        query_starts   0           5   6   7        a chunk of 5, two decodes, a chunk …

    Attributes:
        slots: int64 [num_tokens]; where each new token is written, block_id * block_size + offset. No slot
            occurs twice.
        block_tables: int32 [num_seqs, max_blocks]; block ids of each sequence in order; what
            stands behind its context means nothing.
        query_starts: num_seqs + 1 row numbers.
        context_lens: num_seqs; how many tokens the last query row sees, this step's included.
        block_size: slots in a block.
        memo: index tensors a backend derives from the batch, once a step instead of once a layer. Not
            for callers.

    Raises:
        ValueError: lengths that contradict each other. Contents of tensors are not read.
    """

    slots: Tensor
    block_tables: Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_size: int
    memo: dict[object, object] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        num_seqs = len(self.context_lens)
        if len(self.query_starts) != num_seqs + 1 or self.block_tables.shape[0] != num_seqs:
            raise ValueError(
                f"{num_seqs} context_lens need {num_seqs + 1} query_starts and {num_seqs} block tables; "
                f"got {len(self.query_starts)} and {self.block_tables.shape[0]}"
            )
        if self.query_starts[0] != 0 or self.query_starts[-1] != self.slots.shape[0]:
            raise ValueError(
                f"query_starts must run from 0 to the {self.slots.shape[0]} slots; got {self.query_starts}"
            )
        capacity = self.block_tables.shape[1] * self.block_size
        for i, context_len in enumerate(self.context_lens):
            if not 0 < self.query_len(i) <= context_len <= capacity:
                raise ValueError(
                    f"sequence {i}: need 0 < query rows ({self.query_len(i)}) <= context_len "
                    f"({context_len}) <= block table capacity ({capacity})"
                )

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    def query_len(self, index: int) -> int:
        """How many query rows sequence `index` has in this step."""
        return self.query_starts[index + 1] - self.query_starts[index]
