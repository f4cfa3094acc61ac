"""The sequences that run, in the order in which they are served, each with a place of its own."""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from workers.sequence import Sequence, SequenceState

_order = attrgetter("order")


class RunningRow:
    """Sorted by `Sequence.order`; the last one is the one to be preempted.

    A sequence that ended in the middle of a commit keeps its entry until `sweep`, but not its place.

    Args:
        num_places: sequences that can run at once.
    """

    def __init__(self, num_places: int) -> None:
        self._sequences: list[Sequence] = []
        self._free_places = list(reversed(range(num_places)))

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def last(self) -> Sequence:
        return self._sequences[-1]

    @property
    def is_held_up(self) -> bool:
        """Whether somebody runs, and nobody's token is on its way."""
        return bool(self._sequences) and not any(s.has_pending_token for s in self._sequences)

    def of_request(self, request_id: str) -> list[Sequence]:
        return [s for s in self._sequences if s.request_id == request_id]

    def add(self, sequence: Sequence) -> None:
        """It runs from now on; there must be a place."""
        sequence.state = SequenceState.RUNNING
        sequence.place = self._free_places.pop()
        insort(self._sequences, sequence, key=_order)

    def free_place(self, sequence: Sequence) -> None:
        """Another sequence may have the place, though `sequence` is not swept yet."""
        self._free_places.append(sequence.place)
        sequence.place = -1

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def sweep(self) -> None:
        """Drop the entries of those that do not run any more."""
        self._sequences = [s for s in self._sequences if s.state is SequenceState.RUNNING]

    def check_invariants(self, num_places: int) -> None:
        assert self._sequences == sorted(self._sequences, key=_order)
        assert all(s.state is SequenceState.RUNNING for s in self._sequences)
        taken = [s.place for s in self._sequences]
        assert sorted(taken + self._free_places) == list(range(num_places)), "places leak"
