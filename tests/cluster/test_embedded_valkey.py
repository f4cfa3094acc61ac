"""The private Valkey: it answers, comes back, keeps its password to itself and never outlives its owner."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError
from redis.retry import Retry

from cluster.embedded_valkey import EmbeddedValkey
from kvstore.prefix_index.redis_store import is_answering

pytestmark = pytest.mark.integration
_OWNER = """
import sys, time
from cluster.embedded_valkey import EmbeddedValkey
valkey = EmbeddedValkey()
print(valkey.start(), valkey.pid, flush=True)
time.sleep(600)
"""


def _until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_serves_behind_a_password_that_no_process_list_shows() -> None:
    with EmbeddedValkey() as valkey, Redis.from_url(valkey.url) as client:
        assert client.set("a", "b")
        assert client.get("a") == b"b"
        assert client.config_get("save")["save"] == ""
        with (
            Redis(port=valkey._port, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(AuthenticationError),
        ):
            stranger.ping()
        assert valkey.pid is not None
        server = psutil.Process(valkey.pid)
        assert "valkey-server" in server.exe()
        assert valkey._password not in " ".join(server.cmdline())
        assert valkey._password not in repr(server.environ())


def test_two_servers_share_nothing() -> None:
    with EmbeddedValkey() as one, EmbeddedValkey() as two:
        assert one.url != two.url
        with Redis.from_url(one.url) as a, Redis.from_url(two.url) as b:
            a.set("key", "1")
            assert b.get("key") is None


def test_it_comes_back_on_the_same_port_each_time_it_is_killed() -> None:
    with EmbeddedValkey() as valkey:
        url = valkey.url
        for num_restarts in (1, 2, 3):
            pid = valkey.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            _until(lambda n=num_restarts: valkey.num_restarts >= n and is_answering(url, 1))
            assert valkey.url == url
            assert valkey.pid != pid


def test_it_outlives_the_thread_that_asked_for_it() -> None:
    valkey = EmbeddedValkey()
    thread = threading.Thread(target=valkey.start)
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert is_answering(valkey.url, 1)
    assert valkey.num_restarts == 0
    valkey.close()


def test_closing_ends_it_and_no_file_was_ever_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    valkey = EmbeddedValkey()
    url = valkey.start()
    pid = valkey.pid
    assert pid is not None
    assert list(tmp_path.iterdir()) == []
    valkey.close()
    valkey.close()
    assert _is_gone(pid)
    assert not is_answering(url, 0.5)
    assert list(tmp_path.iterdir()) == []


def test_it_dies_with_an_owner_that_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        url, pid = owner.stdout.readline().split()
        assert is_answering(url, 2)
        owner.kill()
        _until(lambda: _is_gone(int(pid)))
    assert not is_answering(url, 0.5)


def test_a_full_server_refuses_writes_and_drops_nothing() -> None:
    with EmbeddedValkey(max_memory_bytes=4 * 2**20) as valkey, Redis.from_url(valkey.url) as client:
        client.set("first", "1")

        def fill() -> None:
            for i in range(100):
                client.set(f"k{i}", bytes(100_000))

        with pytest.raises(OutOfMemoryError):
            fill()
        assert client.get("first") == b"1"


def test_a_taken_port_is_an_error_with_the_servers_own_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}.*[Ff]ailed"):
            EmbeddedValkey(port=port).start()


@pytest.mark.parametrize("arguments", [{"port": -1}, {"port": 65_536}, {"max_memory_bytes": 1}])
def test_bad_arguments_are_refused_by_name(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        EmbeddedValkey(**arguments)
