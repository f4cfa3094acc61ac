"""The publisher's core against a multiset: whoever applies its events, however drained, holds the same set."""

from collections import Counter
from hashlib import blake2b

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.prefix_hash import digest_of
from kvstore.prefix_index.events import MAX_EVENT_HASHES, EventKind, Snapshot
from kvstore.prefix_index.mirror import IndexMirror, Outcome
from kvstore.prefix_index.options import IndexOptions
from kvstore.prefix_index.resident import Drained, ResidentSet, Sent

MAX_PENDING = 6
EVERY = [blake2b(bytes([i]), digest_size=16).digest() for i in range(10)]
blocks = st.lists(st.sampled_from(EVERY), max_size=5)


class ResidentMachine(RuleBasedStateMachine):
    """`copies` is the model. A mirror that applies every event stands for all followers."""

    @initialize()
    def begin(self) -> None:
        self.resident = ResidentSet(MAX_PENDING)
        self.copies: Counter[bytes] = Counter()
        self.options = IndexOptions()
        self.mirror = IndexMirror(self.options)
        self.mirror.admit("r", "e", "f", now=0)
        self.seq = 0

    @rule(hashes=blocks)
    def seal(self, hashes: list[bytes]) -> None:
        self.resident.seal(hashes)
        self.copies.update(hashes)

    @rule(hashes=blocks)
    def evict(self, hashes: list[bytes]) -> None:
        self.resident.evict(hashes)
        for h in hashes:
            if self.copies[h]:
                self.copies[h] -= 1

    @rule()
    def clear(self) -> None:
        self.resident.clear()
        self.copies.clear()

    @rule()
    def lose_what_was_sent(self) -> None:
        self.resident.drain(with_snapshot=False)
        self.resident.lose()

    @rule(with_snapshot=st.booleans())
    def drain(self, with_snapshot: bool) -> None:
        drained = self.resident.drain(with_snapshot=with_snapshot)
        assert not drained.is_partial
        is_synced = all(
            self.mirror.apply("r", "e", event) is Outcome.APPLIED for event in drained.events
        )
        if with_snapshot:
            assert drained.snapshot is not None
            self._check_snapshot(drained.snapshot, drained)
        if not is_synced:
            self._reset()
        assert self._held() == self._expected()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.resident.digest == digest_of(sorted(self._expected()))
        assert self.resident.num_resident == len(self._expected())
        self.resident.check_invariants()
        self.mirror.check_invariants()

    def _reset(self) -> None:
        snapshot = self.resident.drain(with_snapshot=True).snapshot
        assert snapshot is not None
        assert self.mirror.reset("r", "e", snapshot) is Outcome.APPLIED

    def _check_snapshot(self, snapshot: Snapshot, drained: Drained) -> None:
        if drained.events:
            assert (snapshot.seq, snapshot.digest) == (
                drained.events[-1].seq,
                drained.events[-1].digest,
            )
        assert Sent(snapshot.seq, snapshot.digest) == self.resident.sent()
        assert len(snapshot.hashes) == 16 * len(self._expected())

    def _expected(self) -> set[bytes]:
        return {h for h, n in self.copies.items() if n}

    def _held(self) -> set[bytes]:
        self.mirror.tick(0, is_connected=True)
        return {h for h in EVERY if self.mirror.match("f", [h], 0)}


TestResidentSet = ResidentMachine.TestCase
TestResidentSet.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def _hashes(num: int) -> list[bytes]:
    return [i.to_bytes(16, "little") for i in range(1, num + 1)]


def test_second_copy_keeps_a_block_indexed() -> None:
    resident = ResidentSet(100)
    (h,) = _hashes(1)
    resident.seal([h])
    resident.seal([h])
    resident.evict([h])
    (event,) = resident.drain(with_snapshot=False).events
    assert (event.sealed, event.evicted) == (h, b"")
    resident.evict([h])
    (event,) = resident.drain(with_snapshot=False).events
    assert (event.sealed, event.evicted) == (b"", h)


def test_what_comes_and_goes_between_drains_costs_no_event() -> None:
    resident = ResidentSet(100)
    resident.seal(_hashes(3))
    resident.evict(_hashes(3))
    assert resident.drain(with_snapshot=False).events == ()


def test_overflow_says_reset_with_the_right_digest() -> None:
    resident = ResidentSet(4)
    resident.seal(_hashes(5))
    resident.evict(_hashes(1))
    (event,) = resident.drain(with_snapshot=False).events
    assert event.kind is EventKind.RESET
    assert event.digest == digest_of(_hashes(5)[1:])
    assert event.num_bytes == 0


def test_many_changes_leave_in_bounded_events_and_bounded_drains() -> None:
    resident = ResidentSet(10**6)
    hashes = _hashes(20 * MAX_EVENT_HASHES + 1)
    resident.seal(hashes)
    first = resident.drain(with_snapshot=False)
    assert first.is_partial
    events = list(first.events)
    while len(events) < 21:
        events += resident.drain(with_snapshot=False).events
    assert all(event.num_bytes <= 16 * MAX_EVENT_HASHES for event in events)
    assert [event.seq for event in events] == list(range(1, 22))
    assert b"".join(event.sealed for event in events) == b"".join(hashes)
    assert events[-1].digest == digest_of(hashes)
