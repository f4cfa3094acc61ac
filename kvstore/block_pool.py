"""Block ids and reference counts; no tensors.

A block is in exactly one of three states:

    free        nobody references it and its content means nothing     (stack)
    idle        nobody references it, but the radix tree can still offer its content
    used        one reference or more; a sequence reads or writes it

    num_free + num_idle + num_used == num_blocks, always.

The pool never decides what to forget: when `allocate` finds too few free blocks, its caller evicts idle ones
from the radix tree first. All operations are O(1) a block.
"""

from collections.abc import Iterable, Sequence


class OutOfBlocks(RuntimeError):
    """`allocate` was asked for more than is free. A caller that checked first cannot see this."""


class BlockPool:
    """Owns the ids 0 … num_blocks−1.

    Args:
        num_blocks: how many blocks the KV pool's tensors hold; at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._is_cached = bytearray(num_blocks)
        # A stack: the block freed last is the one whose memory is still warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self._num_idle

    @property
    def num_available(self) -> int:
        """What a sequence could get once every idle block had been evicted."""
        return len(self._free) + self._num_idle

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        return bool(self._is_cached[block_id])

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, each with one reference owned by the caller.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {len(self._free)} free")
        if num_blocks == 0:
            return []
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each; an idle block becomes used. None of them may be free."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                assert self._is_cached[block_id], f"block {block_id} is free"
                self._num_idle -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give one reference back for each. At zero a cached block turns idle, any other turns free."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than acquired"
            self._ref_counts[block_id] = count
            if count == 0:
                if self._is_cached[block_id]:
                    self._num_idle += 1
                else:
                    self._free.append(block_id)

    def cache(self, block_id: int) -> None:
        """The radix tree now offers this block's content; it must be in use at this moment."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
        self._is_cached[block_id] = 1

    def uncache(self, block_id: int) -> None:
        """The radix tree gave this block up; if idle, it becomes free."""
        assert self._is_cached[block_id], f"block {block_id} is not cached"
        self._is_cached[block_id] = 0
        if self._ref_counts[block_id] == 0:
            self._num_idle -= 1
            self._free.append(block_id)

    def check_invariants(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        num_idle = 0
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0
            if block_id in free:
                assert count == 0 and not self._is_cached[block_id], (
                    f"block {block_id} is free and held"
                )
            elif count == 0:
                assert self._is_cached[block_id], f"block {block_id} is lost"
                num_idle += 1
        assert num_idle == self._num_idle
        assert self.num_used >= 0
