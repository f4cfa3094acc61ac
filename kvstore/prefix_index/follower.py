"""A Gateway's ear: follows every replica's stream and keeps the mirror equal to what replicas hold."""

import logging
import threading
import time
from dataclasses import dataclass

from kvstore.prefix_index.events import EventKind, LeaseRow
from kvstore.prefix_index.mirror import IndexMirror, Outcome
from kvstore.prefix_index.options import IndexOptions
from kvstore.prefix_index.redis_store import (
    Batch,
    FollowerStore,
    Leases,
    StoreUnavailable,
    StreamCursor,
)

_log = logging.getLogger(__name__)
_MAX_REPLAY_EVENTS = 512  # a newcomer further behind takes a snapshot at once


@dataclass(slots=True)
class _Watch:
    """A replica we follow. `heard_at`: when its lease last changed, by our clock."""

    lease: LeaseRow
    heard_at: float
    seq: int = 0  # read up to here
    wanted_seq: int | None = None  # waiting for a snapshot at or after this
    asked_at: float = float("-inf")


class IndexFollower:
    """One thread with its own connection. It outlives any outage of the server and needs no restart after one.

    Each step reads leases (once a heartbeat, or when there is news), then all streams in one XREAD, and then
    compares with those leases. A gap, a trimmed or vanished tail, another digest, or an unreadable event makes it ask
    for a snapshot; until that comes the mirror keeps answering from what it knew. A lease that is missing in
    Redis is believed to be over once it has not changed for `lease_s` of our own time, so a server that lost
    its memory costs no replica its place.
    """

    def __init__(self, options: IndexOptions, url: str, mirror: IndexMirror) -> None:
        self._options = options
        self._mirror = mirror
        self._store = FollowerStore(options, url)
        self._watches: dict[str, _Watch] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index-follower", daemon=True)
        self._look_at = float("-inf")  # when leases are read next
        self.is_connected = False

    def start(self) -> None:
        """Begin to follow. Returns at once, whether or not the server is there."""
        self._thread.start()

    def close(self) -> None:
        """Stop following; the mirror stays as it is. Waits for the read in progress, half a second at most."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._store.close()

    def _run(self) -> None:
        backoff_s = 0.05
        while not self._closing.is_set():
            try:
                self._step()
                backoff_s = 0.05
            except StoreUnavailable as error:
                self._lose(str(error))
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, self._options.max_backoff_s)
            except Exception:
                # A mirror nobody feeds would look healthy and rot; start over from leases and snapshots.
                _log.exception("prefix index follower failed; resyncing")
                for replica_id in list(self._watches):
                    self._drop(replica_id)
                self._closing.wait(self._options.max_backoff_s)

    def _lose(self, reason: str) -> None:
        if self.is_connected:
            _log.warning("prefix index is away, routing on the last view: %s", reason)
        self.is_connected = False
        self._mirror.tick(time.monotonic(), is_connected=False)

    def _step(self) -> None:
        now = time.monotonic()
        leases = None
        if not self.is_connected or now >= self._look_at:
            leases = self._store.leases()
            self._look_at = now + self._options.heartbeat_s
            if not self.is_connected:
                # Leases could not be renewed where we could see it: everybody gets a full lease again.
                for watch in self._watches.values():
                    watch.heard_at = now
            self._observe(leases, now)
        cursors = [
            StreamCursor(replica_id, watch.lease.epoch, watch.seq)
            for replica_id, watch in self._watches.items()
        ]
        news = self._store.read(cursors)
        for batch in news.batches:
            self._take(batch)
        if news.has_news:
            self._look_at = float("-inf")
        if leases is not None:
            self._confirm(leases, frozenset(batch.replica_id for batch in news.batches))
        self._fetch_snapshots(now)
        self.is_connected = True
        self._mirror.tick(time.monotonic(), is_connected=True)

    def _observe(self, leases: Leases, now: float) -> None:
        for replica_id, row in leases.rows.items():
            watch = self._watches.get(replica_id)
            if watch is None or watch.lease.epoch != row.epoch:
                self._mirror.admit(replica_id, row.epoch, row.fingerprint, row.facts, now=now)
                watch = self._watches[replica_id] = _Watch(row, now)
                if row.seq > _MAX_REPLAY_EVENTS:
                    watch.seq = watch.wanted_seq = row.seq
            elif watch.lease != row:
                watch.lease, watch.heard_at = row, now
        for replica_id in leases.lapsed - self._watches.keys():
            self._store.strike(replica_id)
        for replica_id in list(self._watches.keys() - leases.rows.keys()):
            watch = self._watches[replica_id]
            self._mirror.doubt(replica_id, watch.lease.epoch)
            if now - watch.heard_at >= self._options.lease_s:
                self._drop(replica_id)

    def _drop(self, replica_id: str) -> None:
        del self._watches[replica_id]
        self._mirror.forget(replica_id)

    def _take(self, batch: Batch) -> None:
        watch = self._watches[batch.replica_id]
        for event in batch.events:
            watch.seq = event.seq
            if event.kind is EventKind.WITHDRAWN:
                self._drop(batch.replica_id)
                return
            if watch.wanted_seq is not None:
                continue  # a snapshot that is at least as new is on its way
            outcome = self._mirror.apply(batch.replica_id, batch.epoch, event)
            if outcome in (Outcome.GAP, Outcome.DIVERGED):
                _log.info(
                    "prefix index: %s at event %d of %s", outcome, event.seq, batch.replica_id
                )
                watch.wanted_seq = event.seq
        if batch.is_malformed:
            _log.warning("prefix index: unreadable event of %s", batch.replica_id)
            self._mirror.doubt(batch.replica_id, batch.epoch)
            watch.seq, watch.wanted_seq = batch.last_seq, watch.seq + 1

    def _confirm(self, leases: Leases, heard_from: frozenset[str]) -> None:
        for replica_id, row in leases.rows.items():
            watch = self._watches.get(replica_id)
            if watch is None or watch.wanted_seq is not None:
                continue
            outcome = self._mirror.confirm(
                replica_id, row.epoch, row.seq, row.digest, time.monotonic()
            )
            # Behind and still receiving is no loss; behind with nothing more to read is.
            is_lost = outcome is Outcome.GAP and replica_id not in heard_from
            if is_lost or outcome is Outcome.DIVERGED:
                _log.info("prefix index: %s at heartbeat %d of %s", outcome, row.seq, replica_id)
                watch.wanted_seq = row.seq

    def _fetch_snapshots(self, now: float) -> None:
        for replica_id, watch in self._watches.items():
            if watch.wanted_seq is None:
                continue
            epoch = watch.lease.epoch
            snapshot = self._store.snapshot(replica_id, epoch, watch.wanted_seq)
            if snapshot is not None:
                outcome = self._mirror.reset(replica_id, epoch, snapshot)
                if outcome is Outcome.APPLIED:
                    watch.seq, watch.wanted_seq = snapshot.seq, None
                    self._look_at = float("-inf")  # to be confirmed by a lease at once
                    continue
                _log.warning("prefix index: snapshot of %s is %s", replica_id, outcome)
            if now - watch.asked_at >= self._options.heartbeat_s:
                self._store.ask(replica_id, epoch, watch.wanted_seq)
                watch.asked_at = now
