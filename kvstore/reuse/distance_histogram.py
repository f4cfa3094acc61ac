"""Reuse distances, counted in bins that grow with the distance: exact up to 32, within a sixteenth beyond."""

from collections.abc import Iterable

_BITS = 4
_BINS_AN_OCTAVE = 1 << _BITS


def bin_of(distance: int) -> int:
    """Bin b < 32 holds distance b alone; from there on 16 bins share each octave."""
    shift = max(0, distance.bit_length() - 1 - _BITS)
    return (shift << _BITS) + (distance >> shift)


def bin_start(index: int) -> int:
    """The smallest distance in a bin; the largest is one less than the next bin's."""
    shift = max(0, (index >> _BITS) - 1)
    return (index - (shift << _BITS)) << shift


class DistanceHistogram:
    """Weights by distance; `num_unknown` is the weight of what was never seen before, or too long ago."""

    __slots__ = ("_bin_to_weight", "num_unknown")

    def __init__(self) -> None:
        self._bin_to_weight: dict[int, int] = {}
        self.num_unknown = 0

    def add(self, distances: Iterable[int | None], weight: int) -> None:
        bins = self._bin_to_weight
        for distance in distances:
            if distance is None:
                self.num_unknown += weight
            else:
                index = bin_of(distance)
                bins[index] = bins.get(index, 0) + weight

    def merge(self, other: "DistanceHistogram") -> None:
        for index, weight in list(other._bin_to_weight.items()):
            self._bin_to_weight[index] = self._bin_to_weight.get(index, 0) + weight
        self.num_unknown += other.num_unknown

    @property
    def total(self) -> int:
        return self.num_unknown + sum(self._bin_to_weight.values())

    def num_below(self, distance: float) -> float:
        """The weight at smaller distances, as if each bin were evenly filled."""
        below = 0.0
        for index, weight in self._bin_to_weight.items():
            start, end = bin_start(index), bin_start(index + 1)
            below += weight * min(1.0, max(0.0, (distance - start) / (end - start)))
        return below
