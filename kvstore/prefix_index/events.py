"""The messages of the prefix index, and their wire form. Redis carries bytes; here they become values.

A replica's events are numbered 1, 2, 3 … within one epoch, and each states the digest of the resident set
*after* it. A follower therefore knows at every event, not only at a heartbeat, whether it still holds the
same set: a missing number is a gap, another digest is a divergence, and both end in a snapshot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.prefix_hash import HASH_BYTES

MAX_EVENT_HASHES = 2048  # 32 KiB an event
MAX_FACTS_BYTES = 16_384
MAX_LEASE_BYTES = 65_536
_DIGEST_BYTES = 8
_SNAPSHOT_HEADER_BYTES = 16  # seq, digest


class MalformedMessage(ValueError):
    """Bytes in Redis that no publisher of this version wrote."""


class EventKind(StrEnum):
    """What an event says.

    CHANGE: `evicted` left, `sealed` came. CLEARED: everything left, then `sealed` came. RESET: events before
    this one were never sent; who holds another digest must take a snapshot. WITHDRAWN: the replica closed.
    """

    CHANGE = "c"
    CLEARED = "x"
    RESET = "r"
    WITHDRAWN = "w"


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """One net change. `sealed` and `evicted` are concatenated hashes without a hash in common."""

    seq: int
    kind: EventKind
    digest: int
    sealed: bytes = b""
    evicted: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.sealed) + len(self.evicted)

    def encode(self) -> dict[bytes, bytes]:
        """Fields of a stream entry. `seq` travels as the entry's id."""
        return {
            b"k": self.kind.value.encode(),
            b"d": self.digest.to_bytes(_DIGEST_BYTES, "little"),
            b"s": self.sealed,
            b"e": self.evicted,
        }


def decode_event(seq: int, fields: Mapping[bytes, bytes]) -> IndexEvent:
    """The inverse of `IndexEvent.encode`.

    Raises:
        MalformedMessage: a field is missing, of the wrong size, or of a kind nobody knows.
    """
    try:
        kind = EventKind(fields[b"k"].decode())
        digest, sealed, evicted = fields[b"d"], fields[b"s"], fields[b"e"]
    except (KeyError, ValueError) as error:
        raise MalformedMessage(f"event {seq}: {error!r}") from error
    if len(digest) != _DIGEST_BYTES:
        raise MalformedMessage(f"event {seq}: digest of {len(digest)} bytes")
    num_bytes = len(sealed) + len(evicted)
    if (
        num_bytes > MAX_EVENT_HASHES * HASH_BYTES
        or len(sealed) % HASH_BYTES
        or num_bytes % HASH_BYTES
    ):
        raise MalformedMessage(f"event {seq}: {num_bytes} hash bytes")
    return IndexEvent(seq, kind, int.from_bytes(digest, "little"), sealed, evicted)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All resident hashes, concatenated in no order, as they were just after event `seq`."""

    seq: int
    digest: int
    hashes: bytes

    def encode(self) -> bytes:
        return (
            self.seq.to_bytes(8, "little")
            + self.digest.to_bytes(_DIGEST_BYTES, "little")
            + self.hashes
        )


def decode_snapshot(data: bytes) -> Snapshot:
    """The inverse of `Snapshot.encode`.

    Raises:
        MalformedMessage: the header is short, or what follows is no whole number of hashes.
    """
    if len(data) < _SNAPSHOT_HEADER_BYTES or (len(data) - _SNAPSHOT_HEADER_BYTES) % HASH_BYTES:
        raise MalformedMessage(f"snapshot of {len(data)} bytes")
    return Snapshot(
        int.from_bytes(data[:8], "little"),
        int.from_bytes(data[8:_SNAPSHOT_HEADER_BYTES], "little"),
        data[_SNAPSHOT_HEADER_BYTES:],
    )


class LeaseRow(BaseModel):
    """A replica's own word that it lives, renewed by every heartbeat.

    `started_ns` is wall-clock time and only decides which of two incarnations that claim one `replica_id` is
    the newer. `facts` is the JSON text the replica described itself with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    replica_id: str = Field(min_length=1, max_length=256)
    epoch: str = Field(min_length=1, max_length=128)
    fingerprint: str = Field(min_length=1, max_length=128)
    started_ns: int = Field(ge=0)
    beat: int = Field(ge=0)
    seq: int = Field(ge=0)
    digest: Annotated[int, Field(ge=0, lt=2**64)]
    num_resident: int = Field(ge=0)
    facts: str = Field(default="{}", max_length=MAX_FACTS_BYTES)

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


def decode_lease(data: bytes) -> LeaseRow:
    """The inverse of `LeaseRow.encode`.

    Raises:
        MalformedMessage: too long, no JSON, or a field is missing, unknown or out of range.
    """
    if len(data) > MAX_LEASE_BYTES:
        raise MalformedMessage(f"lease row of {len(data)} bytes")
    try:
        return LeaseRow.model_validate_json(data)
    except ValidationError as error:
        raise MalformedMessage(f"lease row: {error}") from error
