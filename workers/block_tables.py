"""The running sequences' block tables as one array, kept up to date instead of made anew each step."""

import numpy as np
from numpy.typing import NDArray

from kvstore.block_table import BlockTable

Ints = NDArray[np.int64]


class BlockTables:
    """Row `place` holds the block ids of the sequence that runs there.

        place 0    b7 b2 b19 b4 0 0 0 …
        place 1    b7 b2 b3  0  0 0 0 …

    What stands behind a table's end is left over from before and means nothing.

    Args:
        num_places: sequences that run at once.
        max_blocks: of one sequence.

    Attributes:
        rows: int32 [num_places, max_blocks].
    """

    def __init__(self, num_places: int, max_blocks: int) -> None:
        self.rows: NDArray[np.int32] = np.zeros((num_places, max_blocks), dtype=np.int32)
        self._seen: list[BlockTable | None] = [None] * num_places
        self._versions = [0] * num_places
        self._num_seen = [0] * num_places

    def follow(self, place: int, table: BlockTable) -> int:
        """Take in what changed of the table that now has this place.

        Returns:
            The first column that was written; the table's length when nothing changed.
        """
        is_known = self._seen[place] is table and self._versions[place] == table.version
        start = self._num_seen[place] if is_known else 0
        end = len(table.block_ids)
        if start != end:
            self.rows[place, start:end] = table.block_ids[start:]
            self._num_seen[place] = end
        if not is_known:
            self._seen[place] = table
            self._versions[place] = table.version
        return start

    def slots(self, places: Ints, positions: Ints, block_size: int) -> Ints:
        """Pool slots of token positions, each of the sequence at its place; all int64 [n]."""
        block_ids = self.rows[places, positions // block_size].astype(np.int64)
        slots: Ints = block_ids * block_size + positions % block_size
        return slots
