"""Sequences that wait for memory or a place, in the order in which they are to be served."""

from bisect import insort
from collections.abc import Iterator
from itertools import islice

from workers.errors import Overloaded
from workers.sequence import Sequence


class WaitingRoom:
    """Sorted by `Sequence.order`: priority, then arrival. A preempted sequence returns to its old place."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def check_room(self, max_num_waiting: int) -> None:
        """Raises Overloaded when so many wait already."""
        if len(self._sequences) >= max_num_waiting:
            raise Overloaded(
                f"{len(self._sequences)} requests are waiting already", retry_after_s=1.0
            )

    def first(self, num_sequences: int) -> list[Sequence]:
        """The next ones to serve; a copy, so that they may leave meanwhile."""
        return list(islice(self._sequences, num_sequences))

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """It must be here."""
        self._sequences.remove(sequence)

    def remove_request(self, request_id: str) -> None:
        self._sequences = [s for s in self._sequences if s.request_id != request_id]


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
