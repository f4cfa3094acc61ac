"""`pando serve` as a newcomer meets it: a ready line, two commands that work, Ctrl-C, and nothing left."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from live_cluster import ROOT, ServeProcess, short_tmp, start_serve

pytestmark = pytest.mark.integration


def family(process: int) -> set[int]:
    """A process and all its descendants."""
    rows = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.split()
    pairs = list(zip(map(int, rows[::2]), map(int, rows[1::2]), strict=True))
    found = {process}
    while True:
        more = {pid for pid, parent in pairs if parent in found} - found
        if not more:
            return found
        found |= more


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def pasted(serve: ServeProcess) -> list[list[str]]:
    """The commands under "Try", as a shell would split them."""
    lines = serve.output().split("Try, in another terminal:")[1].splitlines()
    return [shlex.split(line) for line in lines if line.startswith("  ")]


def test_a_whole_life(tmp_path: Path) -> None:
    serve = start_serve(tmp_path, "--demo-tenants")
    temporary = short_tmp(tmp_path)
    try:
        serve.wait_until_ready()
        assert f"http://127.0.0.1:{serve.http_port}/v1" in serve.output()
        assert f"127.0.0.1:{serve.grpc_port}" in serve.output()
        curl, demo = pasted(serve)
        answer = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
        assert "Paris" in answer
        # The command names the script it was started as; here that was `-c`.
        demo = [
            sys.executable,
            "-c",
            "from cluster.cli.main import app; app()",
            *demo[1:],
            "--turns",
            "2",
        ]
        told = subprocess.run(demo, capture_output=True, text=True, cwd=ROOT, check=False)
        assert told.returncode == 0, told.stdout + told.stderr
        assert "acme" in told.stdout and "globex" in told.stdout
        members = family(serve.process.pid)
        assert len(members) > 5
        assert serve.end() == 0
        assert serve.output().rstrip().endswith("ending …")
        assert not alive(members)
        for port in (serve.http_port, serve.grpc_port):
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"{port} is still open"
        assert list(temporary.iterdir()) == []
    finally:
        if serve.process.poll() is None:
            serve.process.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        serve = start_serve(tmp_path, "--port", str(port))
        assert serve.process.wait(120) == 1
    shutil.rmtree(short_tmp(tmp_path), ignore_errors=True)
    assert re.search(rf"listen\.http_port: cannot listen on 127\.0\.0\.1:{port}", serve.output())
    assert "Traceback" not in serve.output()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "engine.max_num_seqz=3"], "engine.max_num_seqz: there is no such key"),
        (["--kv-dtype", "int3"], "kv_dtype must be one of"),
        (["--model", "no-such-directory/and/more"], "no-such-directory/and/more"),
        (["--redis-url", "http://x"], "index.url"),
        (["--host", "0.0.0.0"], "tenancy.keys"),
        (["--address", "127.0.0.1:1"], "no Ray cluster at '127.0.0.1:1'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, flags: list[str], words: str) -> None:
    serve = start_serve(tmp_path, *flags)
    assert serve.process.wait(120) == 1
    assert words in serve.output()
    assert "Traceback" not in serve.output()
    shutil.rmtree(short_tmp(tmp_path), ignore_errors=True)
