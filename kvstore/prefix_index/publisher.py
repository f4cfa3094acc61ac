"""A replica's voice: tells the prefix index which blocks it holds, without ever holding up the engine."""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvstore.prefix_index.events import (
    MAX_FACTS_BYTES,
    EventKind,
    IndexEvent,
    LeaseRow,
)
from kvstore.prefix_index.options import IndexOptions
from kvstore.prefix_index.redis_store import PublisherStore, StoreUnavailable
from kvstore.prefix_index.resident import ResidentSet

_log = logging.getLogger(__name__)
_EVENT_OVERHEAD_BYTES = 64  # what an entry costs in Redis beside its hashes, roughly


class IndexPublisher:
    """One thread with its own connection; the engine's calls only change a set in memory.

    While the server is away, or when it returns with less than it knew, nothing is lost but time: the set is
    complete here, and the first event after an outage (RESET) states its digest, so that followers that
    differ ask for a snapshot.

    Args:
        options: the cluster's index settings; `options.url` is not read here.
        url: the server's URL, embedded or not.
        replica_id: the replica's name, which survives its restarts.
        epoch: this incarnation's name; never used twice with one `replica_id`.
        fingerprint: of the model and KV scheme under which hashes are computed.
        describe: a JSON object with static facts, put into the lease for whoever follows.

    Raises:
        ValueError: `describe` is no JSON object or too long, or a name is empty or too long.
    """

    def __init__(
        self,
        options: IndexOptions,
        url: str,
        *,
        replica_id: str,
        epoch: str,
        fingerprint: str,
        describe: bytes = b"{}",
    ) -> None:
        if len(describe) > MAX_FACTS_BYTES or not isinstance(json.loads(describe), dict):
            raise ValueError(f"describe must be a JSON object of at most {MAX_FACTS_BYTES} bytes")
        self._options = options
        self._resident = ResidentSet(options.queue_max_events)
        self._row = LeaseRow(
            replica_id=replica_id,
            epoch=epoch,
            fingerprint=fingerprint,
            started_ns=time.time_ns(),
            beat=0,
            seq=0,
            digest=0,
            num_resident=0,
            facts=describe.decode(),
        )
        self._store = PublisherStore(options, url, replica_id, epoch)
        self._kept_seq_bytes: deque[tuple[int, int]] = deque()  # (seq, bytes) of entries in Redis
        self._num_kept_bytes = 0
        self._wanted_seq: int | None = None
        self._beat_at = float("-inf")
        self._is_fenced = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index-publisher", daemon=True)
        self.is_connected = False

    def start(self) -> None:
        """Begin to publish. Returns at once, whether or not the server is there."""
        self._thread.start()

    def close(self) -> None:
        """Withdraw the lease, so that mirrors drop this replica at once, and stop.

        Waits at most about two socket timeouts when the server does not answer; the lease then runs out.
        """
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._store.close()

    def sealed(self, hashes: Sequence[bytes]) -> None:
        """One copy of each block (HASH_BYTES each) became resident. Never blocks on I/O, never raises."""
        self._resident.seal(hashes)
        self._wake.set()

    def evicted(self, hashes: Sequence[bytes]) -> None:
        """One copy of each block left; the hash leaves the index with its last copy. Never blocks, never raises."""
        self._resident.evict(hashes)
        self._wake.set()

    def cleared(self) -> None:
        """Everything left. Never blocks, never raises."""
        self._resident.clear()
        self._wake.set()

    @property
    def digest(self) -> int:
        """`prefix_hash.digest_of` what is resident now."""
        return self._resident.digest

    @property
    def num_resident(self) -> int:
        """Different hashes resident now."""
        return self._resident.num_resident

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
                continue
            except Exception:
                # A replica that stops publishing would lose its place for no reason; state it all anew.
                _log.exception("prefix index publisher failed")
                self._lose("a failure of our own")
                self._closing.wait(self._options.max_backoff_s)
                continue
            self._wake.wait(max(0.0, self._beat_at - time.monotonic()))
            self._closing.wait(self._options.flush_s)  # let a step's changes gather into one event
            self._wake.clear()
        self._withdraw()

    def _lose(self, reason: str) -> None:
        if self.is_connected:
            _log.warning("prefix index is away, will state everything anew: %s", reason)
        self.is_connected = False
        self._resident.lose()
        self._beat_at = float("-inf")

    def _step(self) -> None:
        is_more = True
        while is_more and not self._closing.is_set():
            is_more = self._flush()
            if time.monotonic() >= self._beat_at:
                self._beat()
            is_more = is_more or self._wanted_seq is not None

    def _flush(self) -> bool:
        """Send what is pending, with a snapshot if one is wanted; whether there was too much for one drain."""
        wanted_seq, self._wanted_seq = self._wanted_seq, None
        if wanted_seq is not None and wanted_seq > self._resident.sent().seq:
            self._resident.lose()  # only an event of ours can take the follower past what it stumbled on
        drained = self._resident.drain(with_snapshot=wanted_seq is not None)
        if drained.events:
            self._wanted_seq = self._store.append(drained.events, self._oldest_kept(drained.events))
        if drained.snapshot is not None:
            self._store.offer(drained.snapshot)
            self._wanted_seq = None
        return drained.is_partial

    def _beat(self) -> None:
        sent = self._resident.sent()
        self._row = self._row.model_copy(
            update={
                "beat": self._row.beat + 1,
                "seq": sent.seq,
                "digest": sent.digest,
                "num_resident": self._resident.num_resident,
            }
        )
        beat = self._store.beat(self._row)
        if beat.is_fenced and not self._is_fenced:
            _log.warning("prefix index: a younger incarnation of %s is alive", self._row.replica_id)
        self._is_fenced = beat.is_fenced
        self._wanted_seq = beat.wanted_seq
        self._beat_at = time.monotonic() + self._options.heartbeat_s
        self.is_connected = True

    def _oldest_kept(self, events: Sequence[IndexEvent]) -> int:
        """The oldest seq that the stream's limits leave room for once `events` are in it."""
        kept = self._kept_seq_bytes
        for event in events:
            num_bytes = event.num_bytes + _EVENT_OVERHEAD_BYTES
            kept.append((event.seq, num_bytes))
            self._num_kept_bytes += num_bytes
        while len(kept) > self._options.stream_max_len or (
            self._num_kept_bytes > self._options.stream_max_bytes and len(kept) > 1
        ):
            self._num_kept_bytes -= kept.popleft()[1]
        return kept[0][0]

    def _withdraw(self) -> None:
        if not self.is_connected:
            return
        sent = self._resident.sent()
        try:
            self._store.withdraw(IndexEvent(sent.seq + 1, EventKind.WITHDRAWN, sent.digest))
        except StoreUnavailable as error:
            _log.info("prefix index: lease not withdrawn, it will run out: %s", error)
