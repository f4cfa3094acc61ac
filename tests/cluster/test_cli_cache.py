"""`pando cache` against a real Gateway whose toy replicas measure their reuse with the real meter."""

import edge_path  # noqa: F401, I001 (before what it makes importable)
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_driver import DEMO_TENANCY, ReportingBackend, failure_of, gateway, pando
from reuse_fakes import MeasuringBackend
from typer.testing import CliRunner

from cluster.cli.cache_plot import plotted, scale_name
from cluster.cli.cache_replay import known_policies, replay_policies
from cluster.cache_status import CacheStatus, LogStatus
from cluster.cli.main import app
from workers.protocol import CURVE_SCALES

LONG = "the quick brown fox jumps over the lazy dog and the cat " * 8


class CacheBackend(MeasuringBackend, ReportingBackend):
    """Both: a status as a real Gateway's, and measured reuse."""


@pytest.fixture(autouse=True)
def _no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANDO_API_KEY", raising=False)


def ask(url: str, text: str, key: str | None = None) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "toy/model", "prompt": text, "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status()


def test_the_text() -> None:
    with gateway(CacheBackend(), tenancy=DEMO_TENANCY) as url:
        for key in ("demo-acme", "demo-acme", "demo-globex"):
            ask(url, LONG, key)
        run = pando("cache", "--url", url, "--api-key", "demo-acme", "--replay")
    assert run.exit_code == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("replica-0  4,096 blocks of 16 tokens, 0.00 GiB, 2% used, ")
    assert "last 30 min, 1 block in 1 followed" in lines[0]
    header, everyone, acme, globex = (line.split() for line in lines[2:6])
    assert header == ["lookups", "of", "1/2x", "1x", "2x", "4x", "now", "lookups"]
    # One of three prompts found all its blocks, whatever the pool: 4,096 blocks are many times enough.
    assert everyone[:6] == ["all", *["33%"] * 5]
    assert acme[:6] == ["acme", *["50%"] * 5]
    assert globex[:6] == ["globex", *["0%"] * 5]
    assert "Twice the memory would answer 0% more" in run.stdout
    assert run.stdout.count("█") > 20
    policies = {line.split()[0]: line.split()[1:] for line in lines[-len(known_policies()) :]}
    assert policies == dict.fromkeys(known_policies(), ["33.3%"] * 3)


def test_json_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    with gateway(CacheBackend()) as url:
        ask(url, LONG)
        ask(url, LONG)
        run = pando("cache", "--url", url, "--output", "json", "--plot", str(picture))
        assert "cannot write" in failure_of(
            "cache", "--url", url, "--plot", str(tmp_path / "no" / "x.png")
        )
    told = run.parsed
    assert told["overall"]["num_hits"] * 2 == told["overall"]["num_lookups"] > 0
    assert [tenant["tenant"] for tenant in told["tenants"]] == ["local"]
    assert told["replay"] is None
    assert len(told["scales"]) == len(told["overall"]["hit_ratios"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_before_anything_was_looked_up_and_without_replicas() -> None:
    with gateway(CacheBackend()) as url:
        assert "Nothing was looked up yet." in pando("cache", "--url", url).stdout
    with gateway(CacheBackend(is_up=False)) as url:
        run = pando("cache", "--url", url, "--replay")
    assert (run.exit_code, run.stdout.splitlines()[0]) == (0, "no replica answers")


def test_flush_forgets_after_a_question() -> None:
    backend = CacheBackend()
    with gateway(backend) as url:
        ask(url, LONG)
        for answer in ("n\n", ""):
            refused = CliRunner().invoke(app, ["cache", "flush", "--url", url], input=answer)
            assert refused.exit_code == 1
            assert backend._resident
        agreed = CliRunner().invoke(app, ["cache", "flush", "--url", url], input="y\n")
        assert agreed.exit_code == 0
        assert "Forgotten on 1 replicas." in agreed.stdout
        assert not backend._resident
        shown = pando("cache", "flush", "--url", url, "--yes", "--output", "json").parsed
        assert shown == {"num_replicas": 1, "num_cleared": 1}


def test_flush_says_when_it_did_not_happen() -> None:
    backend = CacheBackend()
    backend.num_deaf = 1
    with gateway(backend) as url:
        said = failure_of("cache", "flush", "--url", url, "--yes")
    assert said == "pando cache flush: 0 of 1 replicas said in time that they have"
    with gateway(CacheBackend(is_up=False)) as url:
        assert "0 of 0 replicas" in failure_of("cache", "flush", "--url", url, "--yes")


def test_it_is_for_operators() -> None:
    with gateway(CacheBackend(), tenancy=DEMO_TENANCY) as url:
        assert "no API key" in failure_of("cache", "--url", url)
        assert "admin" in failure_of("cache", "--url", url, "--api-key", "demo-globex")
        flush = ("cache", "flush", "--url", url, "--yes", "--api-key")
        assert "admin" in failure_of(*flush, "demo-globex")
        assert pando(*flush, "demo-acme").exit_code == 0
    assert "cannot reach" in failure_of("cache", "--url", "http://127.0.0.1:1")


def log_of(paths: list[list[int]], **fields: Any) -> LogStatus:
    """A whole log (`weight` 1) of a pool that hit nothing, unless `fields` say otherwise."""
    return LogStatus.model_validate(
        {
            "replica_id": "r", "num_blocks": 4, "covered_s": 60, "weight": 1, "paths": paths,
            "num_lookups": sum(map(len, paths)), "num_hits": 0, "num_sampled_hits": 0,
            "lookups": [True] * len(paths),
        }
        | fields
    )  # fmt: skip


def test_an_answer_that_does_not_fit_itself_is_not_believed() -> None:
    curve = {"num_lookups": 1, "num_hits": 0, "hit_ratios": [0.5]}
    with pytest.raises(ValueError, match="differ in length"):
        CacheStatus.model_validate(
            {"scales": [1, 2], "overall": curve, "tenants": [], "replicas": []}
        )
    with pytest.raises(ValueError, match="differ in length"):
        log_of([[1]], lookups=[])


def status_of(ratios: list[float], scales: list[float]) -> CacheStatus:
    overall = {"num_lookups": 10, "num_hits": 5, "hit_ratios": ratios}
    return CacheStatus.model_validate(
        {"scales": scales, "overall": overall, "tenants": [], "replicas": []}
    )


def test_the_plot_rises_with_the_ratios() -> None:
    ratios = [0.4 * min(1.0, scale) for scale in CURVE_SCALES]
    lines = plotted(status_of(ratios, list(CURVE_SCALES)))
    assert len(lines) == 11
    assert lines[0].startswith("  40% ")
    heights = [
        sum(line.ljust(60)[6 + 2 * i] == "█" for line in lines[:-1])
        for i in range(len(CURVE_SCALES))
    ]
    assert heights == sorted(heights)
    assert [heights[CURVE_SCALES.index(scale)] for scale in (0.5, 1.0, 4.0)] == [5, 10, 10]
    for name, scale in (("1/2x", 0.5), ("1x ", 1.0), ("4x", 4.0)):
        assert lines[-1][6 + 2 * CURVE_SCALES.index(scale) :].startswith(name)
    assert lines[-1].split() == ["1/16x", "1/8x", "1/4x", "1/2x", "1x", "2x", "4x"]


def test_names_of_scales() -> None:
    assert [scale_name(s) for s in (0.0625, 0.5, 0.7, 1, 1.5, 4)] == [
        "1/16x", "1/2x", None, "1x", None, "4x"
    ]  # fmt: skip


def test_a_replay_tells_policies_apart_and_scales_the_pool() -> None:
    # Two blocks come back again and again between scans of blocks that never do.
    paths = []
    for i in range(200):
        paths += [[0, 1], [0, 1], *([1000 + 4 * i + j] for j in range(4))]
    log = log_of(paths, num_blocks=8, weight=2)
    results = {
        result.policy: result.hit_ratios for result in replay_policies([log], known_policies())
    }
    # Pools of 2, 4 and 8: with four the scan has pushed both out by the time they come back.
    assert results["lru"] == pytest.approx((2 / 8, 2 / 8, (4 * 200 - 2) / (8 * 200)))
    assert all(len(ratios) == 3 for ratios in results.values())
    assert replay_policies([], known_policies())[0].hit_ratios == (0, 0, 0)
