"""`pando cache` on the live cluster: what is measured, whom it names, and flushing."""

import json
import subprocess
import sys
import uuid
from typing import Any

import pytest
from live_cluster import KEYS, MODEL, ROOT, Cluster

pytestmark = pytest.mark.integration

STORY = "The lighthouse keeper counted the ships that passed in the night. " * 20


def pando_cache(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-c", "from cluster.cli.main import app; app()", "cache", *arguments]
    done = subprocess.run(
        [*command, "--url", cluster.url, "--api-key", KEYS["acme"]],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(cluster: Cluster) -> Any:
    return json.loads(pando_cache(cluster, "--output", "json"))


def of_tenant(told: Any, name: str) -> tuple[int, int]:
    """(lookups, hits)."""
    curves = [curve for curve in told["tenants"] if curve["tenant"] == name]
    return (curves[0]["num_lookups"], curves[0]["num_hits"]) if curves else (0, 0)


def ask(cluster: Cluster, text: str, tenant: str) -> tuple[int, int]:
    """(prompt tokens, cached tokens)."""
    usage = (
        cluster.openai(tenant, timeout=300)
        .chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=2
        )
        .usage
    )
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def test_lookups_and_hits_are_those_that_clients_saw(cluster: Cluster) -> None:
    before = measured(cluster)
    text = f"{uuid.uuid4()} {STORY}"
    seen = [ask(cluster, text, tenant) for tenant in ("acme", "acme", "globex")]
    after = measured(cluster)
    block_size = after["replicas"][0]["block_size"]
    new = {
        name: [now - then for now, then in zip(of_tenant(after, name), of_tenant(before, name), strict=True)]
        for name in ("acme", "globex")
    }  # fmt: skip
    lookups = [(num_prompt - 1) // block_size for num_prompt, _ in seen]
    hits = [num_cached // block_size for _, num_cached in seen]
    assert new == {"acme": [sum(lookups[:2]), sum(hits[:2])], "globex": [lookups[2], hits[2]]}
    assert hits[1] == lookups[1]
    assert len(after["replicas"]) == 2
    # The pools are far larger than all that was ever asked: more memory would answer no more, and the
    # prediction for the present size is what happened.
    overall = after["overall"]
    here = overall["hit_ratios"][after["scales"].index(1.0)]
    assert here == overall["hit_ratios"][-1]
    assert here == pytest.approx(overall["num_hits"] / overall["num_lookups"], abs=0.02)


def test_the_curve_is_a_metric(cluster: Cluster) -> None:
    ask(cluster, f"{uuid.uuid4()} {STORY}", "acme")
    with cluster.http("acme") as client:
        lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("pando_cache_predicted_hit_ratio{")]
    assert len(found) == 2 * 4
    assert all(0 <= float(line.split()[-1]) <= 1 for line in found)


def test_the_report_for_people_replays_every_policy(cluster: Cluster) -> None:
    ask(cluster, f"{uuid.uuid4()} {STORY}", "acme")
    text = pando_cache(cluster, "--replay")
    assert "Twice the memory would answer" in text
    assert any(line.startswith("acme ") for line in text.splitlines())
    assert any(line.startswith("lru ") and line.endswith("%") for line in text.splitlines())


def test_a_flush_forgets_on_every_replica(cluster: Cluster) -> None:
    text = f"{uuid.uuid4()} {STORY}"
    ask(cluster, text, "acme")
    cluster.wait_for("is_idle")
    assert "2 replicas" in pando_cache(cluster, "flush", "--yes")
    status = cluster.status()
    assert [replica["num_cached_blocks"] for replica in status["replicas"]] == [0, 0]
    _, num_cached = ask(cluster, text, "acme")
    assert num_cached == 0
    cluster.wait_for("is_index_exact")
    with cluster.http("globex") as client:
        assert client.delete("/cache").status_code == 403
