"""The miss-ratio curve: which share of block lookups a pool of another size would have answered."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.reuse.distance_histogram import DistanceHistogram


@dataclass(slots=True)
class ReuseCounts:
    """Lookups over some time, exactly, and their sampled distances, by what the pool answered.

    Keeping the two answers apart makes the estimate far steadier than the sample alone: how many lookups hit is
    known, and a block that everybody uses is either in the sample or not.
    """

    num_lookups: int = 0
    num_hits: int = 0
    hits: DistanceHistogram = field(default_factory=DistanceHistogram)
    misses: DistanceHistogram = field(default_factory=DistanceHistogram)

    def add(
        self,
        num_lookups: int,
        num_hits: int,
        hit_distances: Sequence[int | None],
        miss_distances: Sequence[int | None],
        weight: int,
    ) -> None:
        self.num_lookups += num_lookups
        self.num_hits += num_hits
        self.hits.add(hit_distances, weight)
        self.misses.add(miss_distances, weight)

    def merge(self, other: "ReuseCounts") -> None:
        self.num_lookups += other.num_lookups
        self.num_hits += other.num_hits
        self.hits.merge(other.hits)
        self.misses.merge(other.misses)


@dataclass(frozen=True, slots=True)
class MissRatioCurve:
    """Hit ratio by pool size under least-recently-used eviction, over a window of real lookups."""

    counts: ReuseCounts

    @property
    def measured(self) -> float:
        """The hit ratio that the pool, with its own eviction policy, really had."""
        return self.counts.num_hits / self.counts.num_lookups if self.counts.num_lookups else 0.0

    def hit_ratio(self, num_blocks: float) -> float:
        """Predicted for a pool of `num_blocks`; 0 when nothing was looked up."""
        counts = self.counts
        if counts.num_lookups == 0:
            return 0.0
        still_hits = 0.0
        if counts.num_hits:
            # By what would be lost: lost hits are far ones, and no far block is one that everybody uses.
            num_lost = counts.hits.total - counts.hits.num_below(num_blocks)
            still_hits = counts.num_hits - min(counts.num_hits, num_lost)
        num_misses = counts.num_lookups - counts.num_hits
        num_sampled = counts.misses.total
        near = counts.misses.num_below(num_blocks) / num_sampled if num_sampled else 0.0
        return (still_hits + num_misses * near) / counts.num_lookups
