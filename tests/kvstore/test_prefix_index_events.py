"""Wire forms and options of the prefix index: what comes in wrong is named and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstore.prefix_index.events import (
    MAX_EVENT_HASHES,
    MAX_LEASE_BYTES,
    EventKind,
    IndexEvent,
    LeaseRow,
    MalformedMessage,
    Snapshot,
    decode_event,
    decode_lease,
    decode_snapshot,
)
from kvstore.prefix_index.options import IndexOptions

digests = st.integers(0, 2**64 - 1)
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(b"".join)
events = st.builds(IndexEvent, st.integers(1), st.sampled_from(EventKind), digests, hashes, hashes)


@given(events)
def test_event_survives_the_wire(event: IndexEvent) -> None:
    assert decode_event(event.seq, event.encode()) == event


@given(st.builds(Snapshot, st.integers(0, 2**64 - 1), digests, hashes))
def test_snapshot_survives_the_wire(snapshot: Snapshot) -> None:
    assert decode_snapshot(snapshot.encode()) == snapshot


def _lease(**changes: object) -> LeaseRow:
    fields = {
        "replica_id": "r",
        "epoch": "e",
        "fingerprint": "f",
        "started_ns": 1,
        "beat": 2,
        "seq": 3,
        "digest": 2**64 - 1,
        "num_resident": 4,
        "facts": '{"block_size": 16}',
    }
    return LeaseRow.model_validate({**fields, **changes})


def test_lease_survives_the_wire() -> None:
    assert decode_lease(_lease().encode()) == _lease()


@pytest.mark.parametrize(
    "changes",
    [
        {b"k": b"?"},
        {b"k": b"\xff"},
        {b"d": b"short"},
        {b"s": b"x" * 15},
        {b"e": b"x" * 17},
        {b"s": bytes(8), b"e": bytes(8)},
        {b"s": bytes(16 * MAX_EVENT_HASHES), b"e": bytes(16)},
    ],
)
def test_malformed_event_is_refused(changes: dict[bytes, bytes]) -> None:
    good = IndexEvent(1, EventKind.CHANGE, 0, bytes(16)).encode()
    with pytest.raises(MalformedMessage, match="event 1"):
        decode_event(1, {**good, **changes})


def test_event_without_a_field_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="event 7"):
        decode_event(7, {b"k": b"c"})


@pytest.mark.parametrize("size", [0, 15, 17, 31])
def test_malformed_snapshot_is_refused(size: int) -> None:
    with pytest.raises(MalformedMessage, match=f"{size} bytes"):
        decode_snapshot(bytes(size))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xff", b"x" * (MAX_LEASE_BYTES + 1), b'{"replica_id": 1}']
)
def test_malformed_lease_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="lease row"):
        decode_lease(data)


def test_lease_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="surprise"):
        decode_lease(_lease().encode().replace(b'{"replica_id"', b'{"surprise":1,"replica_id"'))


@pytest.mark.parametrize("url", ["redis://h:6379/0", "rediss://:secret@h", "redis://[::1]:6379"])
def test_redis_urls_are_accepted_and_not_shown(url: str) -> None:
    options = IndexOptions(url=url)
    assert options.url is not None
    assert options.url.get_secret_value() == url
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    "url",
    ["http://:hunter2@h", "redis://", "h:6379", "redis://:hunter2@h:99999", "redis://[hunter2"],
)
def test_other_urls_are_refused_without_showing_the_password(url: str) -> None:
    with pytest.raises(ValidationError, match="url") as caught:
        IndexOptions(url=url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", "a{b}"),
        ("namespace", ""),
        ("heartbeat_s", 0),
        ("heartbeat_s", float("nan")),
        ("lease_s", 1.5),
        ("stream_max_len", 0),
        ("max_mirror_hashes", 0),
        ("typo", 1),
    ],
)
def test_bad_option_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        IndexOptions.model_validate({field: value})
