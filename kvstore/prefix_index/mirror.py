"""The Gateway's own copy of the prefix index: which replica holds how much of a prefix. No I/O, no clock.

A row is one *incarnation*. When a replica comes back under another epoch it gets another row, so whatever was
known of the old one is invisible at once; the old row's entries are swept up afterwards, a few at a time.
Memory is bounded by `max_mirror_hashes` (row, hash) pairs, guesses included. A row that did not fit is still
followed exactly (its digest is arithmetic on events), it only matches less than it could.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.prefix_hash import digest_of, split_hashes
from kvstore.prefix_index.events import EventKind, IndexEvent, Snapshot
from kvstore.prefix_index.options import IndexOptions
from kvstore.prefix_index.shelves import Row, Shelves

_CHUNK_HASHES = 2048  # how many entries one hold of the lock may touch


class IndexMode(StrEnum):
    """What answers of the mirror are worth, best first.

    EXACT: every live replica's set is known, down to its last event. STALE: some view is behind, or the
    server is away and this is what was known. SPECULATIVE: only the router's own guesses are left.
    LOAD_ONLY: nothing is known, route by load.
    """

    EXACT = "exact"
    STALE = "stale"
    SPECULATIVE = "speculative"
    LOAD_ONLY = "load_only"


class Outcome(StrEnum):
    """What became of an event. GAP and DIVERGED leave the row out of sync until `reset`."""

    APPLIED = "applied"
    OLD = "old"  # already part of the row
    GAP = "gap"  # events before it never came
    DIVERGED = "diverged"  # the replica's digest after it is not ours
    UNKNOWN = "unknown"  # no such replica, or another epoch


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """What the mirror knows of one live replica. `lag_s` counts from the last moment it was known exact."""

    replica_id: str
    epoch: str
    fingerprint: str
    seq: int
    digest: int
    num_hashes: int
    lag_s: float
    is_synced: bool
    facts: str


class IndexMirror:
    """Thread-safe. `now` is always seconds on one monotonic clock; the last one passed is the mirror's own."""

    def __init__(self, options: IndexOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._shelves = Shelves(options.max_mirror_hashes, options.speculative_s)
        self._rows: dict[str, Row] = {}
        self._now = 0.0
        self._is_connected = False
        self._away_since: float | None = None  # None until a connection is lost

    # -- the router's side

    def match(self, fingerprint: str, hashes: Sequence[bytes], now: float) -> dict[str, int]:
        """replica_id → number of leading `hashes` it holds. Replicas without the first one are left out."""
        with self._lock:
            self._advance(now)
            shelf = self._shelves.shelf(fingerprint)
            if shelf is None:
                return {}
            reaches = self._shelves.reaches(shelf, hashes, with_view=self._has_view())
            return {
                row.replica_id: reach.num_blocks
                for row in self._rows.values()
                if row.shelf is shelf
                for reach in reaches
                if reach.mask & row.bit
            }

    def speculate(
        self, replica_id: str, fingerprint: str, hashes: Iterable[bytes], now: float
    ) -> None:
        """Believe for `speculative_s` that the replica will hold `hashes`, because it was just sent them.

        A guess about a replica whose lease shows another fingerprint is dropped, as is one that does not fit.
        """
        with self._lock:
            self._advance(now)
            row = self._rows.get(replica_id)
            if row is None:
                row = self._shelves.open_row(replica_id, None, fingerprint)
                self._rows[replica_id] = row
            if row.fingerprint == fingerprint:
                known = row.hashes if self._has_view() else frozenset()
                self._shelves.guess(row, (h for h in hashes if h not in known), self._now)

    @property
    def mode(self) -> IndexMode:
        """As of the last `now` passed."""
        with self._lock:
            leased = [row for row in self._rows.values() if row.epoch is not None]
            if self._is_connected and all(row.is_synced for row in leased):
                return IndexMode.EXACT
            if leased and self._has_view():
                return IndexMode.STALE
            return IndexMode.SPECULATIVE if self._shelves.has_guesses else IndexMode.LOAD_ONLY

    def replicas(self) -> list[ReplicaRow]:
        """Replicas with a live lease, by id."""
        with self._lock:
            return [
                ReplicaRow(
                    row.replica_id,
                    row.epoch,
                    row.fingerprint,
                    row.seq,
                    row.digest,
                    len(row.hashes),
                    max(0.0, self._now - row.exact_at),
                    row.is_synced,
                    row.facts,
                )
                for row in sorted(self._rows.values(), key=lambda row: row.replica_id)
                if row.epoch is not None
            ]

    @property
    def num_entries(self) -> int:
        """(replica, hash) pairs held, guesses included: what `max_mirror_hashes` bounds."""
        return self._shelves.num_entries

    # -- the follower's side

    def tick(self, now: float, *, is_connected: bool) -> None:
        """Let time pass: expire guesses, note whether the server is there, sweep up after retired rows."""
        with self._lock:
            self._advance(now)
            if self._is_connected and not is_connected:
                self._away_since = self._now
            self._is_connected = is_connected
            for row in [row for row in self._rows.values() if row.epoch is None]:
                if not row.hash_to_expiry:
                    self._shelves.retire(self._rows.pop(row.replica_id))
        is_more = True
        while is_more:
            with self._lock:
                is_more = self._shelves.sweep(_CHUNK_HASHES)

    def admit(
        self, replica_id: str, epoch: str, fingerprint: str, facts: str = "{}", *, now: float
    ) -> None:
        """A lease was seen. A new epoch starts empty, out of sync, and hides the old one; else no effect."""
        with self._lock:
            self._advance(now)
            row = self._rows.get(replica_id)
            if row is not None and row.epoch == epoch:
                return
            if row is not None and (row.epoch is not None or row.fingerprint != fingerprint):
                self._shelves.retire(row)
                row = None
            if row is None:
                row = self._shelves.open_row(replica_id, epoch, fingerprint)
                self._rows[replica_id] = row
            row.epoch, row.facts, row.exact_at = epoch, facts, self._now

    def apply(self, replica_id: str, epoch: str, event: IndexEvent) -> Outcome:
        """Apply the replica's next event. CLEARED and RESET may skip numbers: they stand on their own."""
        with self._lock:
            row = self._row_of(replica_id, epoch)
            if row is None:
                return Outcome.UNKNOWN
            if event.seq <= row.seq:
                return Outcome.OLD
            if event.seq != row.seq + 1 and event.kind is EventKind.CHANGE:
                row.is_synced = False
                return Outcome.GAP
            sealed, evicted = split_hashes(event.sealed), split_hashes(event.evicted)
            base = 0 if event.kind is EventKind.CLEARED else row.digest
            if base ^ digest_of(sealed) ^ digest_of(evicted) != event.digest:
                row.is_synced = False
                return Outcome.DIVERGED
            if event.kind is EventKind.CLEARED:
                row = self._restart(row)
            self._shelves.remove(row, evicted)
            self._shelves.add(row, sealed)
            row.seq, row.digest = event.seq, event.digest
            return Outcome.APPLIED

    def reset(self, replica_id: str, epoch: str, snapshot: Snapshot) -> Outcome:
        """Make the row equal to `snapshot`. Others may match meanwhile and see some of both."""
        wanted = set(split_hashes(snapshot.hashes))
        if digest_of(list(wanted)) != snapshot.digest:
            return Outcome.DIVERGED
        with self._lock:
            row = self._row_of(replica_id, epoch)
            if row is None:
                return Outcome.UNKNOWN
            gone, come = list(row.hashes - wanted), list(wanted - row.hashes)
        for start in range(0, max(len(gone), len(come)), _CHUNK_HASHES):
            with self._lock:
                if self._row_of(replica_id, epoch) is not row:
                    return Outcome.UNKNOWN
                self._shelves.remove(row, gone[start : start + _CHUNK_HASHES])
                self._shelves.add(row, come[start : start + _CHUNK_HASHES])
        with self._lock:
            row.seq, row.digest = snapshot.seq, snapshot.digest
        return Outcome.APPLIED

    def confirm(self, replica_id: str, epoch: str, seq: int, digest: int, now: float) -> Outcome:
        """Compare with a heartbeat that was read *before* the events applied last.

        Returns:
            APPLIED: the row is in sync. GAP: events up to `seq` are missing. DIVERGED: same seq, other set.
        """
        with self._lock:
            self._advance(now)
            row = self._row_of(replica_id, epoch)
            if row is None:
                return Outcome.UNKNOWN
            row.is_synced = row.seq > seq or (row.seq == seq and row.digest == digest)
            if row.is_synced:
                row.exact_at = self._now
                return Outcome.APPLIED
            return Outcome.GAP if row.seq < seq else Outcome.DIVERGED

    def doubt(self, replica_id: str, epoch: str) -> None:
        """The row is out of sync until the next `confirm`: its lease is missing or its stream unreadable."""
        with self._lock:
            row = self._row_of(replica_id, epoch)
            if row is not None:
                row.is_synced = False

    def forget(self, replica_id: str) -> None:
        """The replica is gone: nothing of it is answered any more."""
        with self._lock:
            row = self._rows.pop(replica_id, None)
            if row is not None:
                self._shelves.retire(row)

    def check_invariants(self) -> None:
        """Assert that rows, masks, guesses and counters tell one story. Linear in what is held."""
        with self._lock:
            self._shelves.check_invariants()
            for replica_id, row in self._rows.items():
                assert row.replica_id == replica_id
                assert row.shelf.live & row.bit

    # -- inside, lock held

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
        self._shelves.expire(self._now)

    def _has_view(self) -> bool:
        """Whether what replicas said may still be answered."""
        if self._is_connected:
            return True
        away_since = self._away_since
        return away_since is not None and self._now - away_since <= self._options.stale_s

    def _restart(self, row: Row) -> Row:
        """An empty row in the place of `row`: in constant time, whatever it held."""
        self._shelves.retire(row)
        fresh = self._shelves.open_row(row.replica_id, row.epoch, row.fingerprint)
        fresh.facts, fresh.exact_at, fresh.is_synced = row.facts, row.exact_at, row.is_synced
        self._rows[row.replica_id] = fresh
        return fresh

    def _row_of(self, replica_id: str, epoch: str) -> Row | None:
        row = self._rows.get(replica_id)
        return row if row is not None and row.epoch == epoch else None
