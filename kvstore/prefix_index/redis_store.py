"""The prefix index in Redis or Valkey: the only place that knows keys and commands.

    {ns}:replicas                     set     ids of replicas that announced themselves
    {ns}:news                         stream  "look again": a lease began or a snapshot is ready; capped
    {ns/replica}:lease                string  the replica's `LeaseRow`; lives lease_s
    {ns/replica}:events:<epoch>       stream  its events; an entry's id is `<seq>-0`
    {ns/replica}:snapshot:<epoch>     string  its last snapshot; lives 3 · lease_s
    {ns/replica}:wanted:<epoch>       string  a follower asks for a snapshot at or after this seq

Braces are hash tags: what one replica owns lies in one cluster slot. The entry id carries the sequence number,
so Redis itself refuses an event that arrives twice or late (a server that was frozen can still execute what an
abandoned connection had sent). Snapshots are written only when a follower asks. Keeping a second copy of
every resident set in Redis was the alternative; it costs 38–64 bytes a block all the time, where this costs
16 bytes a block for the few seconds in which somebody needs it, and one more heartbeat of waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from kvstore.prefix_index.events import (
    IndexEvent,
    LeaseRow,
    MalformedMessage,
    Snapshot,
    decode_event,
    decode_lease,
    decode_snapshot,
)
from kvstore.prefix_index.options import IndexOptions

MAX_REPLICAS = 4096
_NEWS_LEN = 256
_READ_COUNT = 64  # events of one stream in one read: 2 MiB at most
_MAX_SNAPSHOT_BYTES = 256 * 2**20  # sixteen million blocks
_SNAPSHOT_LIVES = 3  # in leases

# A row is taken over unless a younger incarnation holds it.
_CLAIM = """
local held = redis.call('GET', KEYS[1])
if held then
  local ok, row = pcall(cjson.decode, held)
  if ok and row.epoch ~= ARGV[2] and tonumber(row.started_ns) > tonumber(ARGV[3]) then return 0 end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 1
"""
_RELEASE = """
local held = redis.call('GET', KEYS[1])
if not held then return 0 end
local ok, row = pcall(cjson.decode, held)
if ok and row.epoch ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class StoreUnavailable(Exception):
    """The server is away, refuses us, or is out of memory. Try again later."""


@dataclass(frozen=True, slots=True)
class _Keys:
    namespace: str
    replica_id: str

    def _key(self, name: str) -> str:
        return f"{{{self.namespace}/{quote(self.replica_id, safe='')}}}:{name}"

    @property
    def lease(self) -> str:
        return self._key("lease")

    def events(self, epoch: str) -> str:
        return self._key(f"events:{quote(epoch, safe='')}")

    def snapshot(self, epoch: str) -> str:
        return self._key(f"snapshot:{quote(epoch, safe='')}")

    def wanted(self, epoch: str) -> str:
        return self._key(f"wanted:{quote(epoch, safe='')}")


def _connect(url: str, socket_timeout_s: float) -> "Redis":
    return Redis.from_url(
        url,
        protocol=2,  # one shape of XREAD's answer
        decode_responses=False,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=socket_timeout_s,
        retry=Retry(NoBackoff(), 0),  # publisher and follower repeat whole steps themselves
        health_check_interval=0,
    )


def is_answering(url: str, timeout_s: float) -> bool:
    """Whether a server at `url` answers PING within `timeout_s`."""
    client = _connect(url, timeout_s)
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class Beat:
    """Answer to a heartbeat: whether a younger incarnation holds our name, and the seq a snapshot is wanted at."""

    is_fenced: bool
    wanted_seq: int | None


class PublisherStore:
    """One replica's writes. Every method raises StoreUnavailable and nothing else."""

    def __init__(self, options: IndexOptions, url: str, replica_id: str, epoch: str) -> None:
        self._options = options
        self._epoch = epoch
        self._replica_id = replica_id
        self._keys = _Keys(options.namespace, replica_id)
        self._client = _connect(url, options.socket_timeout_s)
        self._lease_ms = int(options.lease_s * 1000)

    def append(self, events: Sequence[IndexEvent], oldest_seq: int) -> int | None:
        """Add `events` to the stream and drop what is older than `oldest_seq`; the wanted seq, or None."""
        key = self._keys.events(self._epoch)

        def commands(pipe: Any) -> None:
            for event in events:
                pipe.xadd(
                    key,
                    event.encode(),
                    id=f"{event.seq}-0",
                    minid=f"{oldest_seq}-0",
                    approximate=False,
                )
            pipe.pexpire(key, self._lease_ms * _SNAPSHOT_LIVES)
            pipe.get(self._keys.wanted(self._epoch))

        try:
            return _as_seq(self._run(commands)[-1])
        except StoreUnavailable as error:
            # Numbers never repeat, so a younger entry than ours was put there by somebody else.
            if "equal or smaller" in str(error):
                _call(lambda: self._client.delete(key))
            raise

    def beat(self, row: LeaseRow) -> Beat:
        """Renew the lease. The row is not written while a younger incarnation holds it."""
        keys = self._keys

        def commands(pipe: Any) -> None:
            pipe.eval(
                _CLAIM,
                2,
                keys.lease,
                keys.events(self._epoch),
                row.encode(),
                row.epoch,
                row.started_ns,
                self._lease_ms,
                self._lease_ms * _SNAPSHOT_LIVES,
            )
            pipe.get(keys.wanted(self._epoch))

        claimed, wanted = self._run(commands)
        if claimed:
            self._announce()
        return Beat(is_fenced=not claimed, wanted_seq=_as_seq(wanted))

    def offer(self, snapshot: Snapshot) -> None:
        """Put down the snapshot that followers asked for, and tell them."""
        keys = self._keys

        def commands(pipe: Any) -> None:
            pipe.set(
                keys.snapshot(self._epoch), snapshot.encode(), px=self._lease_ms * _SNAPSHOT_LIVES
            )
            pipe.delete(keys.wanted(self._epoch))

        self._run(commands)
        self.tell()

    def withdraw(self, event: IndexEvent) -> None:
        """Say goodbye in the stream, and give the lease and the snapshot back."""
        keys = self._keys

        def commands(pipe: Any) -> None:
            pipe.xadd(keys.events(self._epoch), event.encode(), id=f"{event.seq}-0")
            pipe.pexpire(keys.events(self._epoch), self._lease_ms)
            pipe.eval(_RELEASE, 1, keys.lease, self._epoch)
            pipe.delete(keys.snapshot(self._epoch), keys.wanted(self._epoch))

        self._run(commands)

    def tell(self) -> None:
        """Make followers look at leases and snapshots now rather than at their next beat."""
        news = f"{{{self._options.namespace}}}:news"
        _call(lambda: self._client.xadd(news, {b"r": self._replica_id.encode()}, maxlen=_NEWS_LEN))

    def close(self) -> None:
        self._client.close()

    def _announce(self) -> None:
        replicas = f"{{{self._options.namespace}}}:replicas"
        if _call(lambda: self._client.sadd(replicas, self._replica_id)):
            self.tell()

    def _run(self, fill: Any) -> list[Any]:
        """One MULTI."""

        def call() -> list[Any]:
            with self._client.pipeline(transaction=True) as pipe:
                fill(pipe)
                return pipe.execute()

        return cast(list[Any], _call(call))


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """Where a follower stands in one replica's stream."""

    replica_id: str
    epoch: str
    seq: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The next events of one stream, which ends at `last_seq`.

    `is_malformed` when an entry could not be read; it and those after it are left out of `events`.
    """

    replica_id: str
    epoch: str
    events: tuple[IndexEvent, ...]
    last_seq: int
    is_malformed: bool


@dataclass(frozen=True, slots=True)
class News:
    """What one read brought. `has_news` says that leases or snapshots are worth another look."""

    batches: tuple[Batch, ...]
    has_news: bool


@dataclass(frozen=True, slots=True)
class Leases:
    """All announced replicas: rows by id, and ids whose row is missing or unreadable."""

    rows: Mapping[str, LeaseRow] = field(default_factory=dict)
    lapsed: frozenset[str] = frozenset()


class FollowerStore:
    """A Gateway's reads. Every method raises StoreUnavailable and nothing else."""

    def __init__(self, options: IndexOptions, url: str) -> None:
        self._options = options
        self._block_ms = max(1, int(min(options.heartbeat_s, 1.0) * 500))
        self._client = _connect(url, options.socket_timeout_s + self._block_ms / 1000)
        self._news_id = b"0-0"

    def leases(self) -> Leases:
        """Every live replica's row. One SMEMBERS and one GET a replica; no scan."""
        members = _call(lambda: self._client.smembers(f"{{{self._options.namespace}}}:replicas"))
        ids = []
        for member in sorted(members)[:MAX_REPLICAS]:
            try:
                ids.append(member.decode())
            except UnicodeDecodeError:
                self.strike(member)

        def gets() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                for replica_id in ids:
                    pipe.get(_Keys(self._options.namespace, replica_id).lease)
                return pipe.execute()

        rows: dict[str, LeaseRow] = {}
        for replica_id, data in zip(ids, cast(list[Any], _call(gets)), strict=True):
            try:
                row = decode_lease(data) if data is not None else None
            except MalformedMessage:
                row = None
            if row is not None and row.replica_id == replica_id:
                rows[replica_id] = row
        return Leases(rows, frozenset(ids) - rows.keys())

    def strike(self, replica_id: str | bytes) -> None:
        """Take a lapsed replica off the list; it puts itself back with its next heartbeat if it lives."""
        replicas = f"{{{self._options.namespace}}}:replicas"
        _call(lambda: self._client.srem(replicas, replica_id))

    def read(self, cursors: Sequence[StreamCursor]) -> News:
        """The events after each cursor; waits up to half a heartbeat for the first."""
        news = f"{{{self._options.namespace}}}:news"
        streams: dict[Any, Any] = {news: self._news_id}
        key_to_cursor: dict[bytes, StreamCursor] = {}
        for cursor in cursors:
            key = _Keys(self._options.namespace, cursor.replica_id).events(cursor.epoch)
            streams[key] = f"{cursor.seq}-0"
            key_to_cursor[key.encode()] = cursor
        answer = _call(lambda: self._client.xread(streams, count=_READ_COUNT, block=self._block_ms))
        batches, has_news = [], False
        for key, entries in cast(list[Any], answer or []):
            if key in key_to_cursor:
                batches.append(_batch(key_to_cursor[key], entries))
            elif entries:
                self._news_id, has_news = entries[-1][0], True
        return News(tuple(batches), has_news)

    def snapshot(self, replica_id: str, epoch: str, min_seq: int) -> Snapshot | None:
        """The replica's snapshot if there is one at or after `min_seq`."""
        key = _Keys(self._options.namespace, replica_id).snapshot(epoch)
        header = cast(bytes, _call(lambda: self._client.getrange(key, 0, 15)))
        try:
            if decode_snapshot(header).seq < min_seq:
                return None
            return decode_snapshot(
                cast(bytes, _call(lambda: self._client.getrange(key, 0, _MAX_SNAPSHOT_BYTES - 1)))
            )
        except MalformedMessage:
            return None

    def ask(self, replica_id: str, epoch: str, min_seq: int) -> None:
        """Ask the replica for a snapshot at or after `min_seq`; it answers with its next heartbeat."""
        key = _Keys(self._options.namespace, replica_id).wanted(epoch)
        ttl_ms = int(self._options.lease_s * 1000)
        _call(lambda: self._client.set(key, min_seq, px=ttl_ms))

    def close(self) -> None:
        self._client.close()


def _batch(cursor: StreamCursor, entries: Sequence[Any]) -> Batch:
    events: list[IndexEvent] = []
    is_malformed = False
    try:
        for entry_id, fields in entries:
            events.append(decode_event(_seq_of(entry_id), fields))
    except MalformedMessage:
        is_malformed = True
    last_seq = _seq_of(entries[-1][0])
    return Batch(cursor.replica_id, cursor.epoch, tuple(events), last_seq, is_malformed)


def _seq_of(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _as_seq(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return 0  # somebody wants a snapshot, whatever they wrote


def _call(command: Any) -> Any:
    try:
        return command()
    except (RedisError, OSError) as error:
        raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
