"""Publisher and follower through a real Valkey, and through everything that can happen to it."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import pytest
from redis import Redis
from redis.crc import key_slot

from cluster.embedded_valkey import EmbeddedValkey
from kvstore.prefix_hash import digest_of
from kvstore.prefix_index.follower import IndexFollower
from kvstore.prefix_index.mirror import IndexMirror, IndexMode, ReplicaRow
from kvstore.prefix_index.options import IndexOptions
from kvstore.prefix_index.publisher import IndexPublisher

pytestmark = pytest.mark.integration
FAST = IndexOptions(
    lease_s=1.0, heartbeat_s=0.1, flush_s=0.001, socket_timeout_s=0.5, max_backoff_s=0.1
)

_DYING = """
import sys, time
from hashlib import blake2b
from kvstore.prefix_index.options import IndexOptions
from kvstore.prefix_index.publisher import IndexPublisher
options = IndexOptions.model_validate_json(sys.argv[2])
publisher = IndexPublisher(options, sys.argv[1], replica_id="dying", epoch="e", fingerprint="f")
publisher.start()
publisher.sealed([blake2b(f"0/{i}".encode(), digest_size=16).digest() for i in range(10)])
time.sleep(600)
"""


def _hashes(num: int, seed: int = 0) -> list[bytes]:
    return [blake2b(f"{seed}/{i}".encode(), digest_size=16).digest() for i in range(num)]


def _until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class Bench:
    """One server, and publishers and followers that end with the test. `namespace` keeps tests apart."""

    def __init__(self, valkey: EmbeddedValkey, namespace: str) -> None:
        self.valkey = valkey
        self.options = FAST.model_copy(update={"namespace": namespace})
        self.stack = ExitStack()
        self.redis: Redis = Redis.from_url(valkey.url, protocol=2)
        self.stack.callback(self.redis.close)

    def publisher(self, replica_id: str, epoch: str = "e1", **options: object) -> IndexPublisher:
        publisher = IndexPublisher(
            self.options.model_copy(update=options),
            self.valkey.url,
            replica_id=replica_id,
            epoch=epoch,
            fingerprint="f",
            describe=b'{"block_size": 16}',
        )
        publisher.start()
        self.stack.callback(publisher.close)
        return publisher

    def follower(self) -> tuple[IndexMirror, IndexFollower]:
        mirror = IndexMirror(self.options)
        follower = IndexFollower(self.options, self.valkey.url, mirror)
        follower.start()
        self.stack.callback(follower.close)
        return mirror, follower

    def mirror(self) -> IndexMirror:
        return self.follower()[0]

    def stored_keys(self) -> set[str]:
        return {key.decode() for key in self.redis.keys(f"*{self.options.namespace}*")}


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def bench(valkey: EmbeddedValkey, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(valkey, request.node.name.replace("[", ".").replace("]", "")[5:60])
    with bench.stack:
        yield bench


def _row(mirror: IndexMirror, replica_id: str) -> ReplicaRow | None:
    return next((row for row in mirror.replicas() if row.replica_id == replica_id), None)


def _is_equal(mirror: IndexMirror, replica_id: str, expected: list[bytes]) -> bool:
    row = _row(mirror, replica_id)
    return (
        row is not None
        and row.is_synced
        and row.num_hashes == len(expected)
        and row.digest == digest_of(expected)
        and mirror.match("f", expected, time.monotonic()).get(replica_id, 0) == len(expected)
    )


def test_a_follower_comes_to_hold_what_the_publisher_holds(bench: Bench) -> None:
    publisher, mirror = bench.publisher("r#1{x} y"), bench.mirror()
    hashes = _hashes(5000)
    publisher.sealed(hashes)
    _until(lambda: _is_equal(mirror, "r#1{x} y", hashes))
    publisher.evicted(hashes[3000:])
    _until(lambda: _is_equal(mirror, "r#1{x} y", hashes[:3000]))
    _until(lambda: mirror.mode is IndexMode.EXACT)
    row = _row(mirror, "r#1{x} y")
    assert row is not None
    assert (row.epoch, row.fingerprint, row.facts) == ("e1", "f", '{"block_size": 16}')
    assert (publisher.digest, publisher.num_resident) == (row.digest, 3000)
    assert publisher.is_connected
    mirror.check_invariants()


def test_a_clear_on_an_idle_replica_reaches_the_index(bench: Bench) -> None:
    publisher, mirror = bench.publisher("r"), bench.mirror()
    publisher.sealed(_hashes(100))
    _until(lambda: _is_equal(mirror, "r", _hashes(100)))
    publisher.cleared()
    _until(lambda: _row(mirror, "r").num_hashes == 0)
    assert mirror.match("f", _hashes(100), time.monotonic()) == {}


def test_random_changes_of_two_replicas_converge_for_early_and_late_followers(bench: Bench) -> None:
    publishers = [bench.publisher("a"), bench.publisher("b")]
    early = bench.mirror()
    rng = random.Random(7)
    universe, held = _hashes(400), [set[bytes](), set[bytes]()]
    for _ in range(400):
        which = rng.randrange(2)
        part = rng.sample(universe, 20)
        if rng.random() < 0.02:
            publishers[which].cleared()
            held[which].clear()
        elif rng.random() < 0.6:
            publishers[which].sealed([h for h in part if h not in held[which]])
            held[which].update(part)
        else:
            publishers[which].evicted([h for h in part if h in held[which]])
            held[which].difference_update(part)
        time.sleep(0.001)
    late = bench.mirror()
    for mirror in (early, late):
        for name, expected in zip("ab", held, strict=True):
            _until(lambda m=mirror, n=name, e=expected: _is_equal(m, n, []) or _same(m, n, e))
        mirror.check_invariants()


def _same(mirror: IndexMirror, replica_id: str, expected: set[bytes]) -> bool:
    row = _row(mirror, replica_id)
    return (
        row is not None
        and row.is_synced
        and row.num_hashes == len(expected)
        and all(replica_id in mirror.match("f", [h], time.monotonic()) for h in expected)
    )


def test_one_replicas_eviction_never_removes_anothers_entry(bench: Bench) -> None:
    a, b, mirror = bench.publisher("a"), bench.publisher("b"), bench.mirror()
    hashes = _hashes(50)
    a.sealed(hashes)
    b.sealed(hashes)
    _until(lambda: _is_equal(mirror, "a", hashes) and _is_equal(mirror, "b", hashes))
    a.evicted(hashes)
    _until(lambda: _row(mirror, "a").num_hashes == 0)
    assert mirror.match("f", hashes, time.monotonic()) == {"b": 50}


def test_a_trimmed_stream_is_made_good_by_a_snapshot(bench: Bench) -> None:
    publisher = bench.publisher("r", stream_max_len=3)
    for h in _hashes(30):
        publisher.sealed([h])
        time.sleep(0.005)
    mirror = bench.mirror()
    _until(lambda: _is_equal(mirror, "r", _hashes(30)))
    stream = next(key for key in bench.stored_keys() if ":events:" in key)
    assert bench.redis.xlen(stream) <= 3
    for h in _hashes(60)[30:]:
        publisher.sealed([h])
        time.sleep(0.002)
    _until(lambda: _is_equal(mirror, "r", _hashes(60)))


def test_a_stream_is_bounded_in_bytes(bench: Bench) -> None:
    publisher, mirror = bench.publisher("r", stream_max_bytes=65_536), bench.mirror()
    for seed in range(10):
        publisher.sealed(_hashes(2000, seed))
        time.sleep(0.01)
    expected = [h for seed in range(10) for h in _hashes(2000, seed)]
    _until(lambda: _is_equal(mirror, "r", expected))
    stream = next(key for key in bench.stored_keys() if ":events:" in key)
    entries = bench.redis.xrange(stream)
    assert sum(len(fields[b"s"]) for _, fields in entries) <= 65_536


def test_a_restart_in_place_is_believed_nothing_of_before(bench: Bench) -> None:
    mirror = bench.mirror()
    old = bench.publisher("r", "e1")
    old.sealed(_hashes(500))
    _until(lambda: _is_equal(mirror, "r", _hashes(500)))
    new = bench.publisher("r", "e2")  # the old one was not closed: it hangs, and still renews
    _until(lambda: _row(mirror, "r").epoch == "e2")
    assert mirror.match("f", _hashes(500), time.monotonic()) == {}
    new.sealed(_hashes(20))
    _until(lambda: _is_equal(mirror, "r", _hashes(20)))
    old.sealed(_hashes(500, seed=1))
    lease = next(key for key in bench.stored_keys() if key.endswith(":lease"))
    for _ in range(100):  # five heartbeats of the zombie
        assert b'"epoch":"e2"' in bench.redis.get(lease)
        time.sleep(0.005)
    assert _is_equal(mirror, "r", _hashes(20))
    assert mirror.match("f", _hashes(500, seed=1), time.monotonic()) == {}
    new.close()
    _until(lambda: _is_equal(mirror, "r", [*_hashes(500), *_hashes(500, seed=1)]))


def test_closing_withdraws_at_once_and_leaves_only_keys_that_expire(bench: Bench) -> None:
    publisher, mirror = bench.publisher("r", lease_s=3600.0), bench.mirror()
    publisher.sealed(_hashes(10))
    _until(lambda: _is_equal(mirror, "r", _hashes(10)))
    publisher.close()
    _until(lambda: not mirror.replicas())
    assert mirror.match("f", _hashes(10), time.monotonic()) == {}
    _until(lambda: not bench.redis.smembers(f"{{{bench.options.namespace}}}:replicas"))
    for key in bench.stored_keys() - {f"{{{bench.options.namespace}}}:news"}:
        assert bench.redis.pttl(key) > 0


def test_a_killed_replica_goes_with_its_lease_and_its_keys_expire(bench: Bench) -> None:
    alive, mirror = bench.publisher("alive"), bench.mirror()
    alive.sealed(_hashes(10))
    dying = subprocess.Popen(
        [sys.executable, "-c", _DYING, bench.valkey.url, bench.options.model_dump_json()],
        cwd=Path(__file__).parents[2],
    )
    with dying:
        _until(lambda: all(_is_equal(mirror, name, _hashes(10)) for name in ("dying", "alive")))
        dying.kill()
    _until(lambda: _row(mirror, "dying") is None)
    assert mirror.match("f", _hashes(10), time.monotonic()) == {"alive": 10}
    _until(lambda: not any("/dying}" in key for key in bench.stored_keys()))


def test_every_key_of_a_replica_lies_in_one_slot(bench: Bench) -> None:
    publisher = bench.publisher("r", stream_max_len=1)
    for h in _hashes(5):
        publisher.sealed([h])
        time.sleep(0.01)
    mirror = bench.mirror()
    _until(lambda: _is_equal(mirror, "r", _hashes(5)))
    keys = [key for key in bench.stored_keys() if "/r}" in key]
    assert {key.split("}:")[1].split(":")[0] for key in keys} >= {"lease", "events", "snapshot"}
    slots = {key_slot(key.encode()) for key in keys}
    assert len(slots) == 1


def test_a_wrong_set_with_the_right_number_is_found_within_a_beat(bench: Bench) -> None:
    publisher, mirror = bench.publisher("r"), bench.mirror()
    publisher.sealed(_hashes(10))
    _until(lambda: _is_equal(mirror, "r", _hashes(10)))
    row = mirror._rows["r"]
    mirror._shelves.remove(row, _hashes(1))
    row.digest ^= digest_of(_hashes(1))
    assert mirror.match("f", _hashes(10), time.monotonic()) == {}
    _until(lambda: _is_equal(mirror, "r", _hashes(10)))


@pytest.mark.parametrize(
    "fields", [{b"k": b"?"}, {b"k": b"c", b"d": bytes(8), b"s": b"x", b"e": b""}]
)
def test_an_unreadable_event_costs_a_snapshot_not_the_follower(
    bench: Bench, fields: dict[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    publisher, mirror = bench.publisher("r"), bench.mirror()
    publisher.sealed(_hashes(10))
    _until(lambda: _is_equal(mirror, "r", _hashes(10)))
    stream = next(key for key in bench.stored_keys() if ":events:" in key)
    with caplog.at_level(logging.WARNING):
        bench.redis.xadd(stream, fields)  # under a number far ahead of the publisher's
        _until(lambda: "unreadable event" in caplog.text)
    _until(lambda: _is_equal(mirror, "r", _hashes(10)))
    publisher.sealed(_hashes(20)[10:])
    _until(lambda: _is_equal(mirror, "r", _hashes(20)))
    assert caplog.text.count("unreadable event") < 5


def test_rubbish_in_leases_is_passed_over(bench: Bench) -> None:
    namespace = bench.options.namespace
    bench.redis.sadd(f"{{{namespace}}}:replicas", "ghost", "liar", b"\xff")
    bench.redis.set(f"{{{namespace}/liar}}:lease", b'{"epoch": ')
    publisher, mirror = bench.publisher("liar"), bench.mirror()
    publisher.sealed(_hashes(3))
    _until(lambda: _is_equal(mirror, "liar", _hashes(3)))
    _until(lambda: bench.redis.smembers(f"{{{namespace}}}:replicas") == {b"liar"})


def test_a_flushed_server_is_refilled(bench: Bench) -> None:
    publisher, mirror = bench.publisher("r"), bench.mirror()
    publisher.sealed(_hashes(100))
    _until(lambda: _is_equal(mirror, "r", _hashes(100)))
    bench.redis.flushall()
    newcomer = bench.mirror()
    _until(lambda: _is_equal(newcomer, "r", _hashes(100)))
    publisher.evicted(_hashes(100)[50:])
    for each in (mirror, newcomer):
        _until(lambda m=each: _is_equal(m, "r", _hashes(50)))


def test_a_server_killed_under_a_stream_of_events_comes_back_empty_and_all_is_exact_again() -> None:
    with EmbeddedValkey() as valkey:
        bench = Bench(valkey, "killed")
        with bench.stack:
            publishers, mirror = [bench.publisher("a"), bench.publisher("b")], bench.mirror()
            hashes = _hashes(3000)
            for step in range(300):
                for publisher in publishers:
                    publisher.sealed(hashes[10 * step : 10 * step + 10])
                    publisher.evicted(hashes[10 * step : 10 * step + 3])
                if step in (100, 200):
                    assert valkey.pid is not None
                    os.kill(valkey.pid, signal.SIGKILL)
                time.sleep(0.001)
            assert mirror.mode in (IndexMode.STALE, IndexMode.EXACT)
            expected = {h for i, h in enumerate(hashes) if i % 10 >= 3}
            for name in "ab":
                _until(lambda n=name: _same(mirror, n, expected))
            _until(lambda: mirror.mode is IndexMode.EXACT)
            assert valkey.num_restarts >= 1
            mirror.check_invariants()


def test_publishing_never_waits_for_a_frozen_server_and_its_late_work_does_no_harm() -> None:
    with EmbeddedValkey() as valkey:
        bench = Bench(valkey, "frozen")
        with bench.stack:
            publisher, (mirror, follower) = bench.publisher("r"), bench.follower()
            hashes = _hashes(10_000)
            publisher.sealed(hashes[:100])
            _until(lambda: _is_equal(mirror, "r", hashes[:100]))
            pid = valkey.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                for h in hashes[100:]:
                    publisher.sealed([h])
                publisher.evicted(hashes[9000:])
                assert publisher.num_resident == 9000  # and the server has not run meanwhile
                _until(lambda: not publisher.is_connected and not follower.is_connected)
                assert mirror.match("f", hashes, time.monotonic()) == {"r": 100}
                assert mirror.mode is IndexMode.STALE
            finally:
                os.kill(pid, signal.SIGCONT)
            _until(lambda: _is_equal(mirror, "r", hashes[:9000]))
            _until(lambda: mirror.mode is IndexMode.EXACT)


def _successor(server: EmbeddedValkey) -> EmbeddedValkey:
    """An empty server where `server` was, under the same URL."""
    successor = EmbeddedValkey(port=server._port)
    successor._password = server._password
    return successor


def test_an_outage_longer_than_the_lease_costs_no_live_replica_its_place() -> None:
    with ExitStack() as servers:
        server = servers.enter_context(EmbeddedValkey())
        bench = Bench(server, "long")
        servers.enter_context(bench.stack)
        # The publisher is slower to come back, so the follower finds a server without its lease.
        publisher = bench.publisher("r", max_backoff_s=0.9)
        mirror, follower = bench.follower()
        publisher.sealed(_hashes(50))
        _until(lambda: _is_equal(mirror, "r", _hashes(50)))
        server.close()
        time.sleep(1.2 * FAST.lease_s)  # the publisher now pauses from 0.8 s to 1.6 s
        assert not follower.is_connected
        successor = _successor(server)
        with successor:
            deadline = time.monotonic() + 20
            while mirror.mode is not IndexMode.EXACT:
                assert mirror.match("f", _hashes(50), time.monotonic()) == {"r": 50}
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert publisher.is_connected
            assert _is_equal(mirror, "r", _hashes(50))
            bench.stack.close()


def test_more_changes_than_the_queue_holds_while_away_are_made_good() -> None:
    with EmbeddedValkey() as valkey:
        bench = Bench(valkey, "overflow")
        with bench.stack:
            publisher, mirror = bench.publisher("r", queue_max_events=50), bench.mirror()
            _until(lambda: publisher.is_connected and _row(mirror, "r") is not None)
            pid = valkey.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            publisher.sealed(_hashes(2000))
            os.kill(pid, signal.SIGCONT)
            _until(lambda: _is_equal(mirror, "r", _hashes(2000)))


def test_starting_before_the_server_is_no_error() -> None:
    with EmbeddedValkey() as gone:
        url = gone.url
    options = FAST.model_copy(update={"namespace": "early"})
    mirror = IndexMirror(options)
    follower = IndexFollower(options, url, mirror)
    publisher = IndexPublisher(options, url, replica_id="r", epoch="e", fingerprint="f")
    follower.start()
    publisher.start()
    publisher.sealed(_hashes(5))
    _until(lambda: mirror.mode is IndexMode.LOAD_ONLY)
    assert not publisher.is_connected
    with _successor(gone):
        _until(lambda: _is_equal(mirror, "r", _hashes(5)))
        publisher.close()
        follower.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"describe": b"[]"}, "describe"),
        ({"describe": b"{"}, "Expecting"),
        ({"describe": b'"' + b"x" * 20_000 + b'"'}, "describe"),
        ({"replica_id": ""}, "replica_id"),
        ({"epoch": "e" * 129}, "epoch"),
    ],
)
def test_bad_names_and_facts_are_refused(changes: dict[str, object], message: str) -> None:
    good = {"replica_id": "r", "epoch": "e", "fingerprint": "f"}
    with pytest.raises(ValueError, match=message):
        IndexPublisher(FAST, "redis://127.0.0.1:1", **{**good, **changes})
