"""When blocks are used again: hazard rates by class and age, and what keeping a block is worth.

A block's age is how many blocks the tree has taken in or found since the block was last used. Ages are cut at
half octaves. For each class of blocks and each bucket of ages two counts are kept: blocks that entered the
bucket unused, and blocks used again inside it. Their quotient is a hazard, and it is unbiased by what was
evicted or is still waiting, because a block that is no longer watched leaves the first count as well
(Kaplan and Meier, JASA 1958).
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

FIRST_AGE = 16
NUM_BUCKETS = 36  # up to 16 · 2^18 blocks
WORTH_LIFE = 512  # blocks of time after which a class's table of worths is computed anew
_ENDS = [int(FIRST_AGE * 2 ** (bucket / 2)) for bucket in range(NUM_BUCKETS)]
_WIDTHS = [end - start for start, end in zip([0, *_ENDS], _ENDS, strict=False)]


@dataclass(slots=True, eq=False)
class Span:
    """Blocks of one class that were last used at the same time, and have not been used since."""

    key: int
    since: int
    num_blocks: int
    bucket: int = 0


@dataclass(slots=True)
class _Counts:
    """Of one class: blocks by bucket of ages, and the worths that were computed of them at one time."""

    entered: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    hits: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    worths: list[float] = field(default_factory=list)
    computed_at: int = -1


class ReuseAges:
    """Watches spans of blocks and learns when blocks like them are used again.

    Args:
        prior_blocks: a class that was seen less often than this is judged mostly by all classes together.
        half_life_blocks: evidence of so many blocks ago weighs half.
    """

    def __init__(self, prior_blocks: float = 200.0, half_life_blocks: int = 1 << 20) -> None:
        if prior_blocks <= 0:
            raise ValueError(f"prior_blocks must be above 0, not {prior_blocks}")
        self.now = 0
        self._prior = prior_blocks
        self._half_life = half_life_blocks
        self._next_halving = half_life_blocks
        self._next_check = FIRST_AGE
        self._next_bucket = 0
        self._key_to_counts: dict[int, _Counts] = {}
        self._all = _Counts()
        self._waiting: list[deque[Span]] = [deque() for _ in range(NUM_BUCKETS)]

    def taught(self) -> "ReuseAges":
        """A fresh one at time 0 that already knows the rates learned here."""
        other = ReuseAges(self._prior, self._half_life)
        for key, counts in self._key_to_counts.items():
            other._key_to_counts[key] = _Counts(counts.entered[:], counts.hits[:])
        other._all = _Counts(self._all.entered[:], self._all.hits[:])
        return other

    def start(self, key: int, num_blocks: int) -> Span:
        """Blocks of class `key` were used just now."""
        span = Span(key, self.now, num_blocks)
        self._count(span.key).entered[0] += num_blocks
        self._all.entered[0] += num_blocks
        self._waiting[0].append(span)
        return span

    def hit(self, span: Span, num_blocks: int) -> None:
        """Some of its blocks are used again; they leave it."""
        span.num_blocks -= num_blocks
        self._count(span.key).hits[span.bucket] += num_blocks
        self._all.hits[span.bucket] += num_blocks

    def leave(self, span: Span, num_blocks: int) -> None:
        """Nobody will tell what becomes of some of its blocks."""
        span.num_blocks -= num_blocks
        for counts in (self._count(span.key), self._all):
            counts.entered[span.bucket] = max(counts.entered[span.bucket] - num_blocks, 0.0)

    def advance(self, num_blocks: int) -> None:
        self.now += num_blocks
        if self.now < self._next_check:
            return
        # Bounded, so that a jump of time among many spans is no pause: the rest is late and caught up.
        if self._move_spans(64 + num_blocks // 2):
            self._next_check = self.now + FIRST_AGE
        if self.now >= self._next_halving:
            self._next_halving = self.now + self._half_life
            for counts in (*self._key_to_counts.values(), self._all):
                counts.entered = [value / 2 for value in counts.entered]
                counts.hits = [value / 2 for value in counts.hits]

    def worth(self, key: int, since: int) -> float:
        """Hits to expect for each block of memory and unit of time, for a block last used at `since`.

        The best over all times at which one could give up waiting: max over τ of
        P(used by τ) / E[time until then, at most τ], given that it was not used so far (Gittins, JRSS B
        1979). A class whose hits come late is thus worth something before they come, and a class whose
        hits came early is worth nothing afterwards.
        """
        counts = self._count(key)
        if counts.computed_at < 0 or self.now - counts.computed_at > WORTH_LIFE:
            counts.worths = self._compute(counts)
            counts.computed_at = self.now
        return counts.worths[bisect_right(_ENDS, self.now - since, hi=NUM_BUCKETS - 1)]

    def _count(self, key: int) -> _Counts:
        counts = self._key_to_counts.get(key)
        if counts is None:
            counts = self._key_to_counts[key] = _Counts()
        return counts

    def _move_spans(self, num_left: int) -> bool:
        """Into the buckets of their ages; False when more than `num_left` are due."""
        for _ in range(NUM_BUCKETS - 1):
            num_left = self._move_from(self._next_bucket, num_left)
            if num_left == 0:
                return False
            self._next_bucket = (self._next_bucket + 1) % (NUM_BUCKETS - 1)
        return True

    def _move_from(self, bucket: int, num_left: int) -> int:
        queue, target = self._waiting[bucket], self._waiting[bucket + 1]
        deadline = self.now - _ENDS[bucket]
        while num_left and queue and queue[0].since <= deadline:
            num_left -= 1
            span = queue.popleft()
            if span.num_blocks == 0:
                continue
            span.bucket = bucket + 1
            self._count(span.key).entered[bucket + 1] += span.num_blocks
            self._all.entered[bucket + 1] += span.num_blocks
            target.append(span)
        return num_left

    def _compute(self, counts: _Counts) -> list[float]:
        hazards = []
        for bucket in range(NUM_BUCKETS):
            usual = self._all.hits[bucket] / (self._all.entered[bucket] + 1.0)
            seen = counts.entered[bucket] + self._prior
            hazards.append(min((counts.hits[bucket] + self._prior * usual) / seen, 1.0))
        return [_best_rate(hazards, bucket) for bucket in range(NUM_BUCKETS)]


def _best_rate(hazards: list[float], bucket: int) -> float:
    best = hits = time = 0.0
    unused = 1.0
    for later in range(bucket, NUM_BUCKETS):
        hazard = hazards[later]
        hits += unused * hazard
        time += unused * _WIDTHS[later] * (1 - hazard / 2)
        unused *= 1 - hazard
        if hits > best * time:
            best = hits / time
    return best
