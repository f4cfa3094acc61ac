"""`pando doctor`: each check against a machine that is well and one that is not."""

import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest
from cli_driver import gateway, pando
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli import cluster_checks, machine_checks
from cluster.cli.finding import GIB, Finding, Verdict
from cluster.config import ClusterConfig, load_config
from cluster.embedded_valkey import EmbeddedValkey


def config_of(*overrides: str) -> ClusterConfig:
    return load_config(overrides=overrides, env={})


def assert_failed(finding: Finding, *said: str) -> None:
    assert finding.verdict is Verdict.FAILED, finding
    assert finding.advice, "a failure without advice is of no use"
    for text in said:
        assert text in f"{finding.found} {finding.advice}", finding


def absent(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_python() -> None:
    assert machine_checks.check_python().verdict is Verdict.OK
    assert machine_checks.check_python((3, 11, 0)).verdict is Verdict.OK
    assert machine_checks.check_python((4, 0, 0)).verdict is Verdict.OK
    assert_failed(machine_checks.check_python((3, 10, 14)), "3.10.14", "3.11")


REQUIREMENTS = [
    "ray[serve]>=2.60",
    'triton>=3.7.1; sys_platform == "plan9"',
    "torch>=2.13,<3",
    'ruff>=0.17; extra == "dev"',
    "not a requirement !",
]


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("torch", "2.13.0", Verdict.OK),
        ("torch", "2.13.0+cpu", Verdict.OK),
        ("torch", "2.14.0.dev1", Verdict.OK),
        ("torch", "2.12.9", Verdict.FAILED),
        ("torch", "3.0", Verdict.FAILED),
        ("ray", "2.60.0", Verdict.OK),
        ("ray", "2.9.0", Verdict.FAILED),
        ("triton", "1.0", Verdict.NOTE),
        ("ruff", "0.1", Verdict.NOTE),
    ],
)
def test_packages(name: str, version: str, verdict: Verdict) -> None:
    finding = machine_checks.check_package(name, REQUIREMENTS, lambda _: version)
    assert finding.verdict is verdict
    assert version in finding.found


def test_missing_packages() -> None:
    assert_failed(
        machine_checks.check_package("torch", REQUIREMENTS, absent), "pip install 'torch<3,>=2.13'"
    )
    assert_failed(machine_checks.check_package("torch", None, absent), "pip install 'torch'")
    elsewhere = machine_checks.check_package("triton", REQUIREMENTS, absent)
    assert elsewhere.verdict is Verdict.NOTE


def test_the_packages_of_this_machine_are_found() -> None:
    for name in machine_checks.CHECKED_PACKAGES:
        finding = machine_checks.check_package(name, None)
        assert metadata.version(name) in finding.found


def test_namesake() -> None:
    assert machine_checks.check_namesake(absent).verdict is Verdict.OK
    assert_failed(machine_checks.check_namesake(lambda _: "0.9"), "pip uninstall kernels")


def says(text: str) -> list[str]:
    return [sys.executable, "-c", text]


_GPU = 'print(\'{"names": ["H200"], "total_bytes": [151397597184]}\')'


def test_gpu_present() -> None:
    finding = machine_checks.check_gpu(config_of(), says(f"print('warming up'); {_GPU}"))
    assert finding == Finding("gpu", Verdict.OK, "H200 (141 GiB)")


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ('print(\'{"names": [], "total_bytes": []}\')', ""),
        ("import os; os.abort()", "exit status"),
        ("raise RuntimeError('the driver is too old')", "the driver is too old"),
        ("print('nonsense')", "JSONDecodeError"),
        ("print('5')", "cannot say"),
        ("", "IndexError"),
    ],
)
def test_gpu_absent_or_broken(probe: str, said: str) -> None:
    finding = machine_checks.check_gpu(config_of(), says(probe))
    assert finding.verdict is Verdict.NOTE
    assert said in finding.found
    for wish in ("model.device=cuda", "replicas.num_gpus=1"):
        assert_failed(machine_checks.check_gpu(config_of(wish), says(probe)), said, "driver")


def test_disk(tmp_path: Path) -> None:
    config = config_of(f"cache_dir={tmp_path}/not/there/yet")
    asked: list[Path] = []

    def free(place: Path) -> int:
        asked.append(place)
        return 2 * GIB

    assert machine_checks.check_disk(config, free).verdict is Verdict.OK
    assert asked == [tmp_path]
    assert machine_checks.check_disk(config).found.endswith("free for models")
    assert_failed(machine_checks.check_disk(config, lambda _: GIB - 1), "cache_dir")


@given(st.integers(0, 64 * GIB), st.integers(1, 8), st.integers(0, 8 * GIB))
def test_memory(available: int, num_replicas: int, weights: int) -> None:
    config = config_of(f"replicas.num_replicas={num_replicas}")
    verdict = machine_checks.check_memory(config, weights, available).verdict
    more = machine_checks.check_memory(config, weights, available + GIB).verdict
    rank = [Verdict.FAILED, Verdict.NOTE, Verdict.OK]
    assert rank.index(more) >= rank.index(verdict)
    assert (verdict is Verdict.FAILED) == (available < GIB)
    on_gpu = config_of("model.device=cuda")
    assert machine_checks.check_memory(on_gpu, weights, max(available, GIB)).verdict is Verdict.OK


def test_available_memory(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  24684096 kB\nMemAvailable:   1024 kB\n")
    assert machine_checks.available_memory_bytes(path) == 2**20
    path.write_text("MemAvailable: many\n")
    assert machine_checks.available_memory_bytes(path) is None
    assert machine_checks.available_memory_bytes(tmp_path / "none") is None
    assert machine_checks.check_memory(config_of(), None, None).verdict is Verdict.NOTE


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = config_of(f"listen.http_port={port}", f"listen.grpc_port={port}")
        # Nobody accepts: what listens there does not answer as a Pando would.
        finding = cluster_checks.check_http_port(config, timeout_s=0.2)
        assert_failed(finding, str(port), "listen.http_port")
        grpc = cluster_checks.check_grpc_port(config, is_running=False)
        assert_failed(grpc, "listen.grpc_port")
        assert cluster_checks.check_grpc_port(config, is_running=True).verdict is Verdict.NOTE
    assert cluster_checks.check_http_port(config).verdict is Verdict.OK


def test_a_running_pando_on_the_port_is_no_failure() -> None:
    with gateway() as url:
        config = config_of(f"listen.http_port={url.rpartition(':')[2]}")
        finding = cluster_checks.check_http_port(config)
    assert finding.verdict is Verdict.NOTE
    assert "a Pando" in finding.found


def test_index() -> None:
    assert cluster_checks.check_index(config_of()).verdict is Verdict.OK
    server = EmbeddedValkey()
    server.start()
    try:
        finding = cluster_checks.check_index(config_of(f"index.url={server.url}"))
        assert finding.verdict is Verdict.OK
        assert server.url.split(":")[2].split("@")[0] not in finding.found
        wrong = server.url.replace("redis://:", "redis://:not-")
        assert_failed(cluster_checks.check_index(config_of(f"index.url={wrong}")), "index.url")
    finally:
        server.close()
    gone = cluster_checks.check_index(config_of(f"index.url={server.url}"))
    assert_failed(gone, "does not answer PING")
    assert server.url not in gone.found


def test_model(tmp_path: Path) -> None:
    def found(name: str) -> cluster_checks.ModelFiles:
        return cluster_checks.check_model(config_of(f"model.name={name}", f"cache_dir={tmp_path}"))

    missing = found("some/model")
    assert (missing.finding.verdict, missing.weights_bytes) == (Verdict.NOTE, None)
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    for place, name in (
        (snapshot, "some/model"),
        (tmp_path / "converted" / "other", "an/other"),
        (tmp_path / "dir", str(tmp_path / "dir")),
    ):
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"x" * 100)
        assert found(name).finding.verdict is not Verdict.OK
        (place / "config.json").write_text("{}")
        present = found(name)
        assert (present.finding.verdict, present.weights_bytes) == (Verdict.OK, 100)
    assert_failed(found(str(tmp_path / "a.gguf")).finding, "model.name")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert found(str(tmp_path / "a.gguf")).weights_bytes == 4
    (tmp_path / "empty").mkdir()
    assert_failed(found(str(tmp_path / "empty")).finding, "config.json")


def test_the_command(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = ["doctor", "--set", f"listen.http_port={port}", "--set", f"cache_dir={tmp_path}"]
    bad = [*args, "--set", "index.url=redis://:secret@127.0.0.1:1/0"]
    run = pando(*bad)
    assert run.exit_code == 1
    assert "✗ index" in run.stdout
    assert "→ start it" in run.stdout
    assert "✓ python" in run.stdout
    assert "secret" not in run.stdout
    assert run.stdout.splitlines()[-1].endswith("mending.")
    shown = pando(*bad, "--output", "json")
    assert shown.exit_code == 1
    assert shown.parsed["is_ready"] is False
    name_to_verdict = {check["name"]: check["verdict"] for check in shown.parsed["checks"]}
    assert name_to_verdict["index"] == "failed"
    assert name_to_verdict["gpu"] in ("ok", "note")
    assert name_to_verdict["model"] == "note"


def test_a_bad_configuration_is_a_finding_among_others() -> None:
    run = pando("doctor", "--set", "model.blk=1", "--output", "json")
    assert run.exit_code == 1
    (finding,) = [c for c in run.parsed["checks"] if c["name"] == "config"]
    assert finding["verdict"] == "failed"
    assert "model.blk" in finding["found"]
    assert len(run.parsed["checks"]) > 10


def test_the_gpu_probe_runs_here() -> None:
    finding = machine_checks.check_gpu(config_of())
    assert finding.verdict in (Verdict.OK, Verdict.NOTE)
    assert "cannot say" not in finding.found
