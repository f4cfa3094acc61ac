"""`pando status` against a real Gateway."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_driver import DEMO_TENANCY, failure_of, gateway, pando, toy_backend
from edge_fakes import FakeBackend

from cluster.cli.status import as_json
from cluster.status import ClusterStatus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANDO_API_KEY", raising=False)


def test_the_table() -> None:
    with gateway() as url:
        run = pando("status", "--url", url)
    assert run.exit_code == 0, run.stderr
    header, row, empty, *rest = run.stdout.splitlines()
    names = "replica epoch device kv run wait pool cached hits requests"
    assert header.split() == names.split()
    # 96 of 4,096 blocks used, none cached; 3 of 7 prompt tokens cached.
    assert row.split() == ["replica-0", "epoch-0", "cpu", "fp8", "0", "0", "2%", "0%", "43%", "0"]
    assert empty == ""
    assert rest[0] == "model   toy/model"
    assert rest[1].startswith("index   ")
    assert rest[2].startswith("router  0 open, 0 decisions, 0 retries")


def test_a_terminal_of_80_columns_shows_every_name_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with gateway() as url:
        lines = pando("status", "--url", url).stdout.splitlines()
    assert "\x1b[" in lines[0]
    assert all(name in lines[0] for name in ("replica", "device", "wait", "cached", "requests"))
    assert "replica-0" in lines[1] and "epoch-0" in lines[1]
    assert "…" not in "".join(lines)


def test_json_says_the_same() -> None:
    with gateway() as url:
        shown = pando("status", "--url", url, "--output", "json").parsed
    (replica,) = shown["replicas"]
    assert replica["replica_id"] == "replica-0"
    assert replica["hit_rate"] == 0.4286
    assert replica["used_share"] == 0.0234
    assert shown["index"]["is_connected"] is True
    assert shown["router"]["decisions_total"] == 0


def test_a_cluster_with_keys_wants_an_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(tenancy=DEMO_TENANCY) as url:
        assert "pando status: no API key" in failure_of("status", "--url", url)
        assert "admin" in failure_of("status", "--url", url, "--api-key", "demo-globex")
        assert "not known" in failure_of("status", "--url", url, "--api-key", "wrong")
        monkeypatch.setenv("PANDO_API_KEY", "demo-acme")
        assert pando("status", "--url", url).exit_code == 0
        assert "not known" in failure_of("status", "--url", url, "--api-key", "wrong")


def test_a_cluster_without_replicas_is_shown_too() -> None:
    with gateway(toy_backend(is_up=False)) as url:
        run = pando("status", "--url", url)
    assert run.exit_code == 0
    assert "no replica answers" in run.stdout


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://127.0.0.1", "http://", "http://a:99999", "http://a/v1", ""]
)
def test_an_address_that_is_none(url: str) -> None:
    assert "the URL must look like http://127.0.0.1:8000" in failure_of("status", "--url", url)


def test_nobody_there() -> None:
    assert "cannot reach http://127.0.0.1:1" in failure_of("status", "--url", "http://127.0.0.1:1")


def test_a_server_that_is_another_program() -> None:
    with gateway(FakeBackend()) as url:  # its /status is of another shape
        assert "does not answer as Pando does" in failure_of("status", "--url", url)


def test_watch_goes_on_until_interrupted() -> None:
    with gateway() as url:
        command = [sys.executable, "-m", "cluster.cli.main", "status", "--url", url]
        process = subprocess.Popen(
            [*command, "--watch", "--interval", "0.1", "--output", "json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert [json.loads(line)["replicas"][0]["replica_id"] for line in lines] == ["replica-0"] * 2
    assert (process.returncode, err) == (0, ""), rest


def test_watch_ends_when_the_server_goes() -> None:
    run = pando("status", "--url", "http://127.0.0.1:1", "--watch")
    assert run.exit_code == 1
    assert run.stderr.count("\n") == 1


def test_unknown_keys_of_a_newer_cluster_are_let_pass() -> None:
    load = {"owed_tokens": 3.5, "num_in_flight": 1, "prefill_tokens_per_s": 2000, "new": 1}
    now = ClusterStatus.model_validate(
        {
            "replicas": [],
            "new": {},
            "index": {"mode": "exact", "is_connected": True, "num_entries": 1, "new": 1},
            "router": {
                "num_open": 0,
                "decisions_total": 0,
                "retries_total": 0,
                "replicas_lost_total": 0,
                "routed_hit_tokens_total": 0,
                "delivered_hit_tokens_total": 0,
                "ledger": {"a": load},
            },
        }
    )
    assert now.router.ledger["a"].owed_tokens == 3.5
    assert as_json(now)["replicas"] == []
