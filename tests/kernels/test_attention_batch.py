"""A batch that contradicts itself is refused by name."""

import pytest
import torch

from kernels.batch import AttentionBatch


@pytest.mark.parametrize(
    ("num_slots", "num_tables", "query_starts", "context_lens", "message"),
    [
        (3, 2, (0, 3), (3, 3), "2 context_lens need 3 query_starts"),
        (3, 1, (0, 2, 3), (3, 3), "2 block tables"),
        (3, 1, (0, 2), (3,), "from 0 to the 3 slots"),
        (3, 1, (1, 3), (3,), "from 0 to the 3 slots"),
        (3, 1, (0, 3), (2,), "sequence 0: need 0 < query rows"),
        (3, 1, (0, 3), (17,), "capacity .16."),
        (3, 2, (0, 0, 3), (3, 3), "sequence 0: need 0 < query rows"),
    ],
)
def test_contradictions(
    num_slots: int,
    num_tables: int,
    query_starts: tuple[int, ...],
    context_lens: tuple[int, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBatch(
            torch.arange(num_slots),
            torch.zeros(num_tables, 2, dtype=torch.int32),
            query_starts,
            context_lens,
            8,
        )
