"""The mirror against a model of plain sets, and the cases that have broken other systems' indexes."""

import threading
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.prefix_hash import digest_of
from kvstore.prefix_index.events import EventKind, IndexEvent, Snapshot
from kvstore.prefix_index.mirror import IndexMirror, IndexMode, Outcome
from kvstore.prefix_index.options import IndexOptions

EVERY = [blake2b(bytes([i]), digest_size=16).digest() for i in range(8)]
OPTIONS = IndexOptions(speculative_s=4, stale_s=10)
replica_ids = st.sampled_from(["r0", "r1", "r2"])
fingerprints = st.sampled_from(["f0", "f1"])
chains = st.lists(st.sampled_from(EVERY), max_size=6)
sets = st.sets(st.sampled_from(EVERY))


@dataclass
class ModelRow:
    epoch: str | None
    fingerprint: str
    seq: int = 0
    held: set[bytes] = field(default_factory=set)
    hash_to_expiry: dict[bytes, float] = field(default_factory=dict)
    is_synced: bool = False


def _event(seq: int, before: set[bytes], after: set[bytes]) -> IndexEvent:
    sealed, evicted = b"".join(sorted(after - before)), b"".join(sorted(before - after))
    return IndexEvent(seq, EventKind.CHANGE, digest_of(sorted(after)), sealed, evicted)


class MirrorMachine(RuleBasedStateMachine):
    """Rows of the model are replaced, never repaired: a new epoch is a new, empty one."""

    @initialize()
    def begin(self) -> None:
        self.mirror = IndexMirror(OPTIONS)
        self.rows: dict[str, ModelRow] = {}
        self.now = 0.0
        self.is_connected = False
        self.away_since: float | None = None

    @rule(replica_id=replica_ids, epoch=st.sampled_from(["e0", "e1"]), fingerprint=fingerprints)
    def admit(self, replica_id: str, epoch: str, fingerprint: str) -> None:
        self.mirror.admit(replica_id, epoch, fingerprint, now=self.now)
        row = self.rows.get(replica_id)
        if row is not None and row.epoch is None and row.fingerprint == fingerprint:
            row.epoch = epoch
        elif row is None or row.epoch != epoch:
            self.rows[replica_id] = ModelRow(epoch, fingerprint)

    @rule(replica_id=replica_ids, after=sets)
    def change(self, replica_id: str, after: set[bytes]) -> None:
        row = self.rows.get(replica_id)
        if row is None or row.epoch is None:
            outcome = self.mirror.apply(replica_id, "e0", _event(1, set(), after))
            assert outcome is Outcome.UNKNOWN
            return
        event = _event(row.seq + 1, row.held, after)
        assert self.mirror.apply(replica_id, row.epoch + "-old", event) is Outcome.UNKNOWN
        assert self.mirror.apply(replica_id, row.epoch, event) is Outcome.APPLIED
        assert self.mirror.apply(replica_id, row.epoch, event) is Outcome.OLD
        for h in after - row.held:
            row.hash_to_expiry.pop(h, None)
        row.seq, row.held = row.seq + 1, after

    @rule(replica_id=replica_ids, after=sets)
    def clear(self, replica_id: str, after: set[bytes]) -> None:
        row = self.rows.get(replica_id)
        if row is None or row.epoch is None:
            return
        event = IndexEvent(
            row.seq + 3, EventKind.CLEARED, digest_of(sorted(after)), b"".join(sorted(after))
        )
        assert self.mirror.apply(replica_id, row.epoch, event) is Outcome.APPLIED
        row.seq, row.held, row.hash_to_expiry = row.seq + 3, after, {}

    @rule(replica_id=replica_ids, after=sets, is_gap=st.booleans())
    def break_stream(self, replica_id: str, after: set[bytes], is_gap: bool) -> None:
        row = self.rows.get(replica_id)
        if row is None or row.epoch is None:
            return
        good = _event(row.seq + 1, row.held, after)
        if is_gap:
            event = IndexEvent(good.seq + 1, good.kind, good.digest, good.sealed, good.evicted)
        else:
            event = IndexEvent(good.seq, good.kind, good.digest ^ 1, good.sealed, good.evicted)
        outcome = self.mirror.apply(replica_id, row.epoch, event)
        assert outcome is (Outcome.GAP if is_gap else Outcome.DIVERGED)
        row.is_synced = False

    @rule(replica_id=replica_ids, after=sets)
    def reset(self, replica_id: str, after: set[bytes]) -> None:
        row = self.rows.get(replica_id)
        if row is None or row.epoch is None:
            return
        data = b"".join(sorted(after))
        seq = row.seq + 5
        bad = Snapshot(seq, digest_of(sorted(after)) ^ 1, data)
        assert self.mirror.reset(replica_id, row.epoch, bad) is Outcome.DIVERGED
        good = Snapshot(seq, digest_of(sorted(after)), data)
        assert self.mirror.reset(replica_id, row.epoch, good) is Outcome.APPLIED
        for h in after - row.held:
            row.hash_to_expiry.pop(h, None)
        row.seq, row.held = seq, after

    @rule(replica_id=replica_ids, ahead=st.integers(-1, 1), is_right=st.booleans())
    def confirm(self, replica_id: str, ahead: int, is_right: bool) -> None:
        row = self.rows.get(replica_id)
        if row is None or row.epoch is None:
            return
        digest = digest_of(sorted(row.held)) ^ (not is_right)
        outcome = self.mirror.confirm(replica_id, row.epoch, row.seq + ahead, digest, self.now)
        if ahead > 0:
            assert outcome is Outcome.GAP
        elif ahead == 0 and not is_right:
            assert outcome is Outcome.DIVERGED
        else:
            assert outcome is Outcome.APPLIED
        row.is_synced = outcome is Outcome.APPLIED

    @rule(replica_id=replica_ids)
    def forget(self, replica_id: str) -> None:
        self.mirror.forget(replica_id)
        self.rows.pop(replica_id, None)

    @rule(replica_id=replica_ids, fingerprint=fingerprints, hashes=chains)
    def speculate(self, replica_id: str, fingerprint: str, hashes: list[bytes]) -> None:
        self.mirror.speculate(replica_id, fingerprint, hashes, self.now)
        row = self.rows.setdefault(replica_id, ModelRow(None, fingerprint))
        if row.fingerprint != fingerprint:
            return
        for h in hashes:
            is_known = h in row.held and self._has_view()
            is_young = row.hash_to_expiry.get(h, 0) - self.now > OPTIONS.speculative_s / 2
            if not is_known and not is_young:
                row.hash_to_expiry[h] = self.now + OPTIONS.speculative_s

    @rule(seconds=st.integers(0, 6), is_connected=st.booleans())
    def tick(self, seconds: int, is_connected: bool) -> None:
        self.now += seconds
        self.mirror.tick(self.now, is_connected=is_connected)
        if self.is_connected and not is_connected:
            self.away_since = self.now
        self.is_connected = is_connected
        self._expire()
        for replica_id, row in list(self.rows.items()):
            if row.epoch is None and not row.hash_to_expiry:
                del self.rows[replica_id]

    @rule(fingerprint=fingerprints, hashes=chains, seconds=st.integers(0, 2))
    def match(self, fingerprint: str, hashes: list[bytes], seconds: int) -> None:
        self.now += seconds
        self._expire()
        self._check_match(fingerprint, hashes)

    @invariant()
    def answers_agree(self) -> None:
        for fingerprint in ("f0", "f1"):
            for start in range(len(EVERY)):
                self._check_match(fingerprint, EVERY[start:] + EVERY[:start])

    def _check_match(self, fingerprint: str, hashes: list[bytes]) -> None:
        expected = {}
        for replica_id, row in self.rows.items():
            believed = set(row.hash_to_expiry) | (row.held if self._has_view() else set())
            depth = next((i for i, h in enumerate(hashes) if h not in believed), len(hashes))
            if depth and row.fingerprint == fingerprint:
                expected[replica_id] = depth
        assert self.mirror.match(fingerprint, hashes, self.now) == expected

    @invariant()
    def rows_and_mode_agree(self) -> None:
        self.mirror.check_invariants()
        leased = {r: row for r, row in self.rows.items() if row.epoch is not None}
        assert {
            (r.replica_id, r.epoch, r.fingerprint, r.seq, r.digest, r.num_hashes, r.is_synced)
            for r in self.mirror.replicas()
        } == {
            (
                replica_id,
                row.epoch,
                row.fingerprint,
                row.seq,
                digest_of(sorted(row.held)),
                len(row.held),
                row.is_synced,
            )
            for replica_id, row in leased.items()
        }
        if self.is_connected and all(row.is_synced for row in leased.values()):
            assert self.mirror.mode is IndexMode.EXACT
        elif leased and self._has_view():
            assert self.mirror.mode is IndexMode.STALE
        else:
            assert self.mirror.mode in (IndexMode.SPECULATIVE, IndexMode.LOAD_ONLY)

    def _has_view(self) -> bool:
        away = self.away_since
        return self.is_connected or (away is not None and self.now - away <= OPTIONS.stale_s)

    def _expire(self) -> None:
        for row in self.rows.values():
            row.hash_to_expiry = {h: t for h, t in row.hash_to_expiry.items() if t > self.now}


TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def _mirror(options: IndexOptions = OPTIONS, *replicas: str) -> IndexMirror:
    mirror = IndexMirror(options)
    mirror.tick(0, is_connected=True)
    for replica_id in replicas:
        mirror.admit(replica_id, "e", "f", now=0)
    return mirror


def test_one_replicas_eviction_leaves_anothers_entry() -> None:
    mirror = _mirror(OPTIONS, "a", "b")
    for replica_id in ("a", "b"):
        mirror.apply(replica_id, "e", _event(1, set(), set(EVERY)))
    mirror.apply("a", "e", _event(2, set(EVERY), set(EVERY[:2])))
    assert mirror.match("f", EVERY, 0) == {"a": 2, "b": 8}


def test_a_hole_ends_the_hit() -> None:
    mirror = _mirror(OPTIONS, "a")
    mirror.apply("a", "e", _event(1, set(), {EVERY[0], EVERY[2]}))
    assert mirror.match("f", EVERY, 0) == {"a": 1}
    assert mirror.match("f", EVERY[1:], 0) == {}


def test_a_hole_ends_the_hit_of_one_replica_while_another_goes_on() -> None:
    mirror = _mirror(OPTIONS, "holed", "whole", "headless")
    mirror.apply("holed", "e", _event(1, set(), set(EVERY) - {EVERY[3]}))
    mirror.apply("whole", "e", _event(1, set(), set(EVERY)))
    mirror.apply("headless", "e", _event(1, set(), set(EVERY[1:])))
    assert mirror.match("f", EVERY, 0) == {"holed": 3, "whole": 8}


def test_a_new_epoch_hides_the_old_one_before_anything_is_swept() -> None:
    mirror = _mirror(OPTIONS, "a")
    mirror.apply("a", "e", _event(1, set(), set(EVERY)))
    mirror.speculate("a", "f", EVERY, 0)
    mirror.admit("a", "e2", "f", now=0)
    assert mirror.match("f", EVERY, 0) == {}
    assert mirror.apply("a", "e", _event(2, set(EVERY), set())) is Outcome.UNKNOWN
    assert mirror.apply("a", "e2", _event(1, set(), {EVERY[0]})) is Outcome.APPLIED
    assert mirror.match("f", EVERY, 0) == {"a": 1}


def test_speculation_fills_holes_until_it_expires_and_survives_the_first_lease() -> None:
    mirror = _mirror()
    mirror.speculate("a", "f", EVERY[:4], 0)
    assert mirror.match("f", EVERY, 0) == {"a": 4}
    mirror.admit("a", "e", "f", now=1)
    mirror.apply("a", "e", _event(1, set(), set(EVERY[:2])))
    assert mirror.match("f", EVERY, 3.9) == {"a": 4}
    assert mirror.match("f", EVERY, 4) == {"a": 2}


def test_modes_go_down_one_by_one_and_up_at_once() -> None:
    mirror = _mirror(OPTIONS, "a")
    assert mirror.mode is IndexMode.STALE
    mirror.apply("a", "e", _event(1, set(), set(EVERY)))
    mirror.confirm("a", "e", 1, digest_of(EVERY), 0)
    assert mirror.mode is IndexMode.EXACT
    mirror.tick(1, is_connected=False)
    assert mirror.mode is IndexMode.STALE
    assert mirror.match("f", EVERY, 11) == {"a": 8}
    assert mirror.match("f", EVERY, 11.1) == {}
    mirror.speculate("a", "f", EVERY[:3], 12)
    assert mirror.mode is IndexMode.SPECULATIVE
    assert mirror.match("f", EVERY, 12) == {"a": 3}
    assert mirror.match("f", EVERY, 16) == {}
    assert mirror.mode is IndexMode.LOAD_ONLY
    mirror.tick(17, is_connected=True)
    assert mirror.mode is IndexMode.EXACT
    assert mirror.match("f", EVERY, 17) == {"a": 8}


@pytest.mark.parametrize("is_guess", [False, True])
def test_memory_is_bounded_and_the_digest_still_followed(is_guess: bool) -> None:
    mirror = _mirror(IndexOptions(max_mirror_hashes=5), "a", "b")
    if is_guess:
        mirror.speculate("a", "f", EVERY, 0)
    else:
        mirror.apply("a", "e", _event(1, set(), set(EVERY)))
    mirror.apply("b", "e", _event(1, set(), set(EVERY)))
    assert mirror.num_entries == 5
    mirror.check_invariants()
    assert mirror.confirm("b", "e", 1, digest_of(EVERY), 0) is Outcome.APPLIED
    assert mirror.apply("b", "e", _event(2, set(EVERY), set(EVERY[:1]))) is Outcome.APPLIED


def test_swept_rows_give_their_memory_and_their_bit_back() -> None:
    mirror = _mirror(OPTIONS, "a")
    many = [i.to_bytes(16, "little") for i in range(1, 5001)]
    mirror.reset("a", "e", Snapshot(9, digest_of(many), b"".join(many)))
    for n in range(200):
        mirror.admit("a", f"e{n}", "f", now=n)
        mirror.tick(n, is_connected=True)
    assert mirror.num_entries == 0
    mirror.check_invariants()
    mirror.forget("a")
    mirror.tick(300, is_connected=True)
    mirror.admit("a", "e", "f", now=300)
    mirror.apply("a", "e", _event(1, set(), {EVERY[0]}))
    assert mirror.match("f", EVERY, 300) == {"a": 1}


def test_guessing_the_same_again_and_again_does_not_grow() -> None:
    mirror = _mirror(IndexOptions(speculative_s=4, max_mirror_hashes=8))
    for step in range(1000):
        mirror.speculate("a", "f", EVERY, step / 10)
    assert mirror.num_entries == 8
    assert len(mirror._shelves._queue) <= 3
    assert mirror.match("f", EVERY, 100) == {"a": 8}
    assert mirror.match("f", EVERY, 104.1) == {}
    assert mirror.num_entries == 0


def test_matching_while_snapshots_go_in_disturbs_neither() -> None:
    mirror = _mirror(OPTIONS, "a", "b")
    mirror.apply("b", "e", _event(1, set(), set(EVERY)))
    many = [blake2b(i.to_bytes(4, "little"), digest_size=16).digest() for i in range(30_000)]
    done = threading.Event()

    def feed() -> None:
        for seq in range(1, 8):
            hashes = many if seq % 2 else []
            mirror.reset("a", "e", Snapshot(seq, digest_of(hashes), b"".join(hashes)))
        done.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    while not done.is_set():
        mirror.speculate("a", "f", many[:5], 0)
        assert mirror.match("f", EVERY, 0) == {"b": 8}
    feeder.join()
    mirror.check_invariants()
    assert mirror.match("f", many, 0) == {"a": 30_000}
