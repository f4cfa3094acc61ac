"""Measures how the radix tree's blocks are reused, as requests come: cheap enough to be always on.

Most blocks cost one comparison of their hash; only the sampled ones reach the recency stack. One thread records;
any thread may tell the time and read.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.prefix_hash import HASH_BYTES
from kvstore.reuse.curve import MissRatioCurve, ReuseCounts
from kvstore.reuse.prompt_log import PromptLog, SampledLog
from kvstore.reuse.recency_stack import RecencyStack

OTHER_ROOTS = b""
# Curves reach to this many times the pool.
MAX_SCALE = 4


@dataclass(slots=True)
class _Window:
    began_s: float
    overall: ReuseCounts = field(default_factory=ReuseCounts)
    root_to_counts: dict[bytes, ReuseCounts] = field(default_factory=dict)

    def counts_of(self, root: bytes, max_roots: int) -> ReuseCounts:
        counts = self.root_to_counts.get(root)
        if counts is None:
            if len(self.root_to_counts) >= max_roots:
                root = OTHER_ROOTS
            counts = self.root_to_counts.setdefault(root, ReuseCounts())
        return counts


class ReuseMeter:
    """Reuse distances of block lookups over the last `window_s` seconds, overall and by root.

    Args:
        num_blocks: in the pool.
        max_samples: blocks followed at once; 16,384 keep a curve within about a point.
        num_windows: the window slides in this many steps.
        max_roots: roots with counts of their own in one step; later ones are counted together.
        max_logged: sampled blocks kept for a replay, 8 bytes each.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        max_samples: int = 16384,
        window_s: float = 3600.0,
        num_windows: int = 12,
        max_roots: int = 64,
        max_logged: int = 65536,
    ) -> None:
        self._num_blocks = num_blocks
        self._window_s = window_s
        self._step_s = window_s / num_windows
        self._max_roots = max_roots
        self._stack = RecencyStack(max_samples, MAX_SCALE * num_blocks)
        self._log = PromptLog(max_logged)
        self._windows: deque[_Window] = deque([_Window(0.0)], maxlen=num_windows)
        self._now_s = 0.0
        self._has_time = False
        self._lock = threading.Lock()

    def advance(self, now_s: float) -> None:
        """Tell the time, in seconds of a monotonic clock; what has left the window is forgotten. From any thread."""
        with self._lock:
            newest = self._windows[-1]
            if not self._has_time:
                newest.began_s, self._has_time = now_s, True
            self._now_s = max(now_s, self._now_s)
            num_steps = int((self._now_s - newest.began_s) / self._step_s)
            if num_steps == 0:
                return
            for i in range(max(1, num_steps - self._num_windows + 1), num_steps + 1):
                self._windows.append(_Window(newest.began_s + i * self._step_s))
            self._log.forget_before(self._now_s - self._window_s)

    def record(self, root: bytes, hashes: bytes, num_hits: int) -> None:
        """A prompt was looked up.

        Args:
            hashes: of the blocks that could have been hits, concatenated.
            num_hits: how many of them were, from the first on.
        """
        split = num_hits * HASH_BYTES
        stack = self._stack
        hit_keys, miss_keys = stack.sample(hashes[:split]), stack.sample(hashes[split:])
        num_lookups = len(hashes) // HASH_BYTES
        with self._lock:
            hit_distances, miss_distances = stack.distances(hit_keys), stack.distances(miss_keys)
            window = self._windows[-1]
            for counts in (window.overall, window.counts_of(root, self._max_roots)):
                counts.add(num_lookups, num_hits, hit_distances, miss_distances, stack.weight)
            stack.use(hit_keys + miss_keys)
            self._log.append_lookup(self._now_s, hit_keys, miss_keys, num_lookups, num_hits)

    def store(self, hashes: bytes) -> None:
        """A path was put into the tree, or used there, without being looked up: a prompt with its answer."""
        keys = self._stack.sample(hashes)
        if not keys:
            return
        with self._lock:
            # Without a new block it is the end of a prompt that is in the log already.
            if self._stack.use(keys):
                self._log.append_stored(self._now_s, keys)

    def curve(self) -> MissRatioCurve:
        """Over all roots."""
        with self._lock:
            return MissRatioCurve(_merged([window.overall for window in self._windows]))

    def root_to_curve(self) -> dict[bytes, MissRatioCurve]:
        """The busiest roots' lookups in the one pool that all share; the others together as `OTHER_ROOTS`."""
        root_to_parts: dict[bytes, list[ReuseCounts]] = {}
        with self._lock:
            for window in self._windows:
                for root, counts in window.root_to_counts.items():
                    root_to_parts.setdefault(root, []).append(counts)
            root_to_counts = {root: _merged(parts) for root, parts in root_to_parts.items()}
        others = [root_to_counts.pop(OTHER_ROOTS, ReuseCounts())]
        busiest = sorted(root_to_counts, key=lambda root: -root_to_counts[root].num_lookups)
        others += [root_to_counts.pop(root) for root in busiest[self._max_roots :]]
        if any(counts.num_lookups for counts in others):
            root_to_counts[OTHER_ROOTS] = _merged(others)
        return {root: MissRatioCurve(counts) for root, counts in root_to_counts.items()}

    def log(self) -> SampledLog:
        """The last prompts, as far as they are kept."""
        with self._lock:
            return self._log.sampled(self._stack, self._now_s)

    @property
    def covered_s(self) -> float:
        """For how long there are counts; at most the window."""
        return self._now_s - self._windows[0].began_s if self._has_time else 0.0

    @property
    def weight(self) -> int:
        """How many blocks one sampled block stands for."""
        return self._stack.weight

    @property
    def _num_windows(self) -> int:
        return self._windows.maxlen or 1

    def check_invariants(self) -> None:
        self._stack.check_invariants()
        total = sum(window.overall.num_lookups for window in self._windows)
        by_root = sum(c.num_lookups for w in self._windows for c in w.root_to_counts.values())
        assert total == by_root


def _merged(parts: Sequence[ReuseCounts]) -> ReuseCounts:
    total = ReuseCounts()
    for part in parts:
        total.merge(part)
    return total
