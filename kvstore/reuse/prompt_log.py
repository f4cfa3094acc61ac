"""The last prompts, thinned out to their sampled blocks, to be replayed under other policies and pool sizes.

A chained hash stands for its whole prefix, so leaving blocks out of every prompt by their hash leaves a tree: the
same shape with fewer blocks, which a pool scaled by the same rate serves as the real one serves the whole
("miniature simulation", Waldspurger et al., ATC 2017).
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.reuse.recency_stack import RecencyStack


@dataclass(frozen=True, slots=True)
class LoggedPath:
    """One use of a path, first block first.

    Attributes:
        blocks: numbers that stand for blocks, the same for the same block; no hashes.
        is_lookup: False for a path that was only stored: a prompt with its answer.
    """

    blocks: tuple[int, ...]
    is_lookup: bool


@dataclass(frozen=True, slots=True)
class SampledLog:
    """The last `covered_s` seconds, oldest first; one of the paths' blocks stands for `weight` real ones.

    Attributes:
        num_lookups, num_hits: of all blocks in that time, exactly.
        num_sampled_hits: of the looked-up blocks in `paths`, those that the pool really answered.
    """

    paths: tuple[LoggedPath, ...]
    weight: int
    covered_s: float
    num_lookups: int
    num_hits: int
    num_sampled_hits: int


@dataclass(slots=True)
class _Entry:
    """`num_lookups` and `num_hits` are exact, and include those of prompts before it without a sampled block."""

    at_s: float
    keys: "array[int]"
    is_lookup: bool
    num_hit_keys: int
    num_lookups: int
    num_hits: int


class PromptLog:
    """A bounded queue of sampled paths.

    Args:
        max_keys: sampled blocks in all entries together, 8 bytes each; the oldest entries make room.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._entries: deque[_Entry] = deque()
        self._num_keys = 0
        self._num_lookups_before = 0
        self._num_hits_before = 0

    def append_lookup(
        self,
        at_s: float,
        hit_keys: Sequence[int],
        miss_keys: Sequence[int],
        num_lookups: int,
        num_hits: int,
    ) -> None:
        """A prompt's lookups: the keys are those sampled, the numbers count all."""
        num_lookups += self._num_lookups_before
        num_hits += self._num_hits_before
        if not hit_keys and not miss_keys:
            self._num_lookups_before, self._num_hits_before = num_lookups, num_hits
            return
        self._num_lookups_before = self._num_hits_before = 0
        keys = array("Q", (*hit_keys, *miss_keys))
        self._append(_Entry(at_s, keys, True, len(hit_keys), num_lookups, num_hits))

    def append_stored(self, at_s: float, keys: Sequence[int]) -> None:
        """A path that was stored without being looked up."""
        self._append(_Entry(at_s, array("Q", keys), False, 0, 0, 0))

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._num_keys += len(entry.keys)
        while self._num_keys > self._max_keys:
            self._drop_oldest()

    def forget_before(self, at_s: float) -> None:
        while self._entries and self._entries[0].at_s < at_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._num_keys -= len(self._entries.popleft().keys)

    def sampled(self, stack: RecencyStack, now_s: float) -> SampledLog:
        """All entries, thinned out to the stack's present rate."""
        key_to_number: dict[int, int] = {}
        paths = []
        num_sampled_hits = 0
        for entry in self._entries:
            keys = [key for key in entry.keys if stack.is_sampled(key)]
            num_sampled_hits += sum(map(stack.is_sampled, entry.keys[: entry.num_hit_keys]))
            if keys:
                numbers = tuple(key_to_number.setdefault(k, len(key_to_number)) for k in keys)
                paths.append(LoggedPath(numbers, entry.is_lookup))
        return SampledLog(
            paths=tuple(paths),
            weight=stack.weight,
            covered_s=now_s - self._entries[0].at_s if self._entries else 0.0,
            num_lookups=self._num_lookups_before + sum(e.num_lookups for e in self._entries),
            num_hits=self._num_hits_before + sum(e.num_hits for e in self._entries),
            num_sampled_hits=num_sampled_hits,
        )
