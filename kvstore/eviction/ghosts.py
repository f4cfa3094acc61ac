"""What was evicted lately, by hash: the past of blocks that come back, and the measure of a policy's mistakes."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.eviction.policy import Regrets

Past = TypeVar("Past")


@dataclass(frozen=True, slots=True)
class _Ghost(Generic[Past]):
    past: Past
    evicted_at: int  # in evictions


class GhostList(Generic[Past]):
    """The last evictions, oldest dropped first. About 250 bytes a block.

    Args:
        on_drop: told the past of each block that fell off the end without having come back.
    """

    def __init__(self, on_drop: Callable[[Past], None] | None = None) -> None:
        self._hash_to_ghost: dict[bytes, _Ghost[Past]] = {}
        self._on_drop = on_drop
        self._num_evicted = 0
        self._num_regretted = 0
        self._age_to_num: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._hash_to_ghost)

    def __contains__(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._hash_to_ghost

    def num_known(self, hashes: list[bytes]) -> int:
        """How many of the first of these are here."""
        for index, prefix_hash in enumerate(hashes):
            if prefix_hash not in self._hash_to_ghost:
                return index
        return len(hashes)

    def add(self, hashes: list[bytes], past: Past) -> None:
        """These blocks, which share a past, were evicted in this order."""
        for prefix_hash in hashes:
            self._num_evicted += 1
            assert prefix_hash not in self._hash_to_ghost, "evicted twice, never computed between"
            self._hash_to_ghost[prefix_hash] = _Ghost(past, self._num_evicted)

    def take(self, prefix_hash: bytes) -> Past | None:
        """The block is computed again; its past, if it is remembered, is a regret."""
        ghost = self._hash_to_ghost.pop(prefix_hash, None)
        if ghost is None:
            return None
        self._num_regretted += 1
        self._age_to_num[(self._num_evicted - ghost.evicted_at).bit_length()] += 1
        return ghost.past

    def trim(self, capacity: int) -> None:
        """Drop the oldest beyond `capacity`."""
        while len(self._hash_to_ghost) > capacity:
            ghost = self._hash_to_ghost.pop(next(iter(self._hash_to_ghost)))
            if self._on_drop is not None:
                self._on_drop(ghost.past)

    def pasts(self) -> Iterator[Past]:
        """Of every block remembered, the one evicted first at first."""
        return (ghost.past for ghost in self._hash_to_ghost.values())

    def regrets(self) -> Regrets:
        ages = {(1 << bits) >> 1: num for bits, num in sorted(self._age_to_num.items())}
        return Regrets(len(self), self._num_evicted, self._num_regretted, ages)
