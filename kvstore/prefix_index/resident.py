"""What a replica holds and what it has said about it: the pure core of the publisher."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvstore.prefix_hash import digest_of
from kvstore.prefix_index.events import MAX_EVENT_HASHES, EventKind, IndexEvent, Snapshot

_MAX_DRAIN_EVENTS = (
    8  # the engine may wait for the lock while a drain runs: some milliseconds, no more
)


@dataclass(frozen=True, slots=True)
class Drained:
    """What is to be sent now; `is_partial` when more was pending.

    `snapshot`, when asked for, is the state after the last of `events`.
    """

    events: tuple[IndexEvent, ...]
    snapshot: Snapshot | None
    is_partial: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """The number of the last event drained, and the digest of the set after it."""

    seq: int
    digest: int


class ResidentSet:
    """Resident hashes with their number of copies, and the net change not yet drained. Thread-safe.

    Changes are kept as a net effect, so a block that comes and goes between two drains costs no event, and
    what is pending never exceeds `max_pending` hashes: beyond that it is dropped, and the next drain says
    RESET instead. The set itself is always right, whatever was dropped.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._hash_to_copies: dict[bytes, int] = {}
        self._pending: dict[bytes, bool] = {}  # hash → came (True) or left (False)
        self._is_cleared = False
        self._is_lost = False
        self._digest = 0
        self._sent_digest = 0
        self._seq = 0

    def seal(self, hashes: Iterable[bytes]) -> None:
        """One more copy of each became resident. Only the first copy of a hash is news."""
        with self._lock:
            for h in hashes:
                copies = self._hash_to_copies.get(h, 0)
                self._hash_to_copies[h] = copies + 1
                if not copies:
                    self._note(h, came=True)

    def evict(self, hashes: Iterable[bytes]) -> None:
        """One copy of each left. Only the last copy's leaving is news; an unknown hash is not."""
        with self._lock:
            for h in hashes:
                copies = self._hash_to_copies.get(h, 0)
                if copies > 1:
                    self._hash_to_copies[h] = copies - 1
                elif copies:
                    del self._hash_to_copies[h]
                    self._note(h, came=False)

    def clear(self) -> None:
        """Every copy of everything left."""
        with self._lock:
            self._hash_to_copies.clear()
            self._pending.clear()
            self._digest = 0
            # An event that says what is there from nothing on needs none of those that were lost.
            self._is_cleared, self._is_lost = True, False

    def lose(self) -> None:
        """What was drained last may not have arrived: the next drain begins with RESET."""
        with self._lock:
            self._forget_pending()

    def drain(self, *, with_snapshot: bool) -> Drained:
        """Events numbered on from the last drain: up to `_MAX_DRAIN_EVENTS`, or with a snapshot all of them."""
        with self._lock:
            events = tuple(self._events(None if with_snapshot else _MAX_DRAIN_EVENTS))
            hashes = list(self._hash_to_copies) if with_snapshot else []
            seq, digest, is_partial = self._seq, self._digest, bool(self._pending)
        snapshot = Snapshot(seq, digest, b"".join(hashes)) if with_snapshot else None
        return Drained(events, snapshot, is_partial)

    @property
    def digest(self) -> int:
        """XOR digest of what is resident now, drained or not."""
        return self._digest

    @property
    def num_resident(self) -> int:
        return len(self._hash_to_copies)

    def sent(self) -> Sent:
        """Where the last drain left followers."""
        with self._lock:
            return Sent(self._seq, self._sent_digest)

    def check_invariants(self) -> None:
        """Assert that digest, copies and pending changes agree."""
        with self._lock:
            assert all(copies > 0 for copies in self._hash_to_copies.values())
            assert self._digest == digest_of(list(self._hash_to_copies))
            assert len(self._pending) <= self._max_pending
            assert not (self._is_lost and (self._pending or self._is_cleared))
            for h, came in self._pending.items():
                assert came == (h in self._hash_to_copies)
            base = 0 if self._is_cleared else self._sent_digest
            assert self._is_lost or base ^ digest_of(list(self._pending)) == self._digest

    def _note(self, h: bytes, *, came: bool) -> None:
        self._digest ^= int.from_bytes(h[:8], "little")
        if self._is_lost:
            return
        if self._pending.pop(h, came) != came:
            return  # it undoes what was pending
        self._pending[h] = came
        if len(self._pending) > self._max_pending:
            self._forget_pending()

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._is_cleared = False
        self._is_lost = True

    def _events(self, max_events: int | None) -> Iterator[IndexEvent]:
        kind = EventKind.CHANGE
        if self._is_lost:
            kind, self._sent_digest = EventKind.RESET, self._digest
        elif self._is_cleared:
            kind, self._sent_digest = EventKind.CLEARED, 0
        self._is_lost = self._is_cleared = False
        num_events = 0
        while (self._pending or kind is not EventKind.CHANGE) and num_events != max_events:
            part = list(islice(self._pending.items(), MAX_EVENT_HASHES))
            for h, _ in part:
                del self._pending[h]
            num_events += 1
            self._seq += 1
            self._sent_digest ^= digest_of([h for h, _ in part])
            yield IndexEvent(
                self._seq,
                kind,
                self._sent_digest,
                sealed=b"".join(h for h, came in part if came),
                evicted=b"".join(h for h, came in part if not came),
            )
            kind = EventKind.CHANGE
