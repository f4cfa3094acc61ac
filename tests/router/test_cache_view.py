"""GET /cache: what operators learn of reuse, and who may."""

import asyncio
from typing import Any

import httpx
import pytest
from edge_fakes import make_service
from edge_server import TENANCY, serving
from reuse_fakes import MeasuringBackend

from kvstore.prefix_hash import root_hash
from kvstore.reuse.meter import OTHER_ROOTS
from router.cache_view import cache_json
from router.tenancy import Tenants
from workers.protocol import CURVE_SCALES, PREDICTION_SCALES, ReplicaInfo, ReuseCurve, ReuseReport

FINGERPRINT = "f" * 32
LONG = "the quick brown fox jumps over the lazy dog and the cat " * 8


def info(replica_id: str, fingerprint: str = FINGERPRINT) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id, "e", "m", fingerprint, 16, 100, "auto", 64, "float32", "cpu", 512, 400
    )


def curve(root: bytes, num_lookups: int, ratio: float) -> ReuseCurve:
    return ReuseCurve(root, num_lookups, int(num_lookups * ratio), (ratio,) * len(CURVE_SCALES))


def report(replica_id: str, *roots: ReuseCurve, fingerprint: str = FINGERPRINT) -> ReuseReport:
    num_lookups = sum(each.num_lookups for each in roots)
    overall = curve(b"", num_lookups, 0.5)
    return ReuseReport(info(replica_id, fingerprint), 60.0, 4, overall, roots)


def test_curves_of_replicas_are_weighed_by_lookups_and_roots_have_their_tenants_names() -> None:
    tenants = Tenants(TENANCY).all()
    assert [tenant.id for tenant in tenants] == ["a", "b", "ops"]
    root_a, root_b = (root_hash(FINGERPRINT, tenant.salt) for tenant in tenants[:2])
    other_model = root_hash("0" * 32, tenants[0].salt)
    told: Any = cache_json(
        [
            report("r0", curve(root_a, 300, 0.2), curve(root_b, 10, 1.0), curve(OTHER_ROOTS, 7, 0)),
            report("r1", curve(root_a, 100, 0.6), curve(b"x" * 16, 5, 0)),
            report("r2", curve(other_model, 8, 0.25), fingerprint="0" * 32),
        ],
        tenants,
    )
    assert [(each["tenant"], each["num_lookups"]) for each in told["tenants"]] == [
        ("a", 408),
        ("b", 10),
        (None, 12),
    ]
    (ratio,) = set(told["tenants"][0]["hit_ratios"])
    assert ratio == pytest.approx((300 * 0.2 + 100 * 0.6 + 8 * 0.25) / 408, abs=1e-4)
    assert told["overall"]["num_lookups"] == 430
    assert [each["replica_id"] for each in told["replicas"]] == ["r0", "r1", "r2"]
    assert told["replicas"][0]["weight"] == 4
    assert len(told["scales"]) == len(told["overall"]["hit_ratios"])
    assert set(PREDICTION_SCALES) <= set(told["scales"])


def test_no_replicas_and_no_lookups() -> None:
    told: Any = cache_json([], ())
    assert told["overall"] == {
        "num_lookups": 0, "num_hits": 0, "hit_ratios": [0.0] * len(CURVE_SCALES)
    }  # fmt: skip


def ask(url: str, key: str, text: str) -> None:
    body = {"model": "toy/model", "prompt": text, "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    httpx.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status()


def test_over_http() -> None:
    backend = MeasuringBackend()
    with serving(make_service(backend, tenancy=TENANCY)) as url:
        for key in ("key-a", "key-a", "key-b"):
            ask(url, key, LONG)
        with httpx.Client(base_url=url, headers={"authorization": "Bearer key-ops"}) as client:
            told = client.get("/cache").raise_for_status().json()
            log = client.get("/cache/log").raise_for_status().json()
            flushed = client.delete("/cache").raise_for_status().json()
    a, b = told["tenants"]
    assert (a["tenant"], b["tenant"]) == ("a", "b")
    assert a["num_lookups"] == 2 * b["num_lookups"] > 8
    assert a["num_hits"] == b["num_lookups"]
    assert b["num_hits"] == 0
    assert a["hit_ratios"][-1] == 0.5
    (replica,) = log["replicas"]
    assert replica["lookups"] == [True] * 3
    assert replica["paths"][0] == replica["paths"][1]
    assert not set(replica["paths"][0]) & set(replica["paths"][2])
    assert flushed == {"num_replicas": 1, "num_cleared": 1}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/cache"), ("GET", "/cache/log"), ("DELETE", "/cache")]
)
def test_only_operators(method: str, path: str) -> None:
    backend = MeasuringBackend()
    with serving(make_service(backend, tenancy=TENANCY)) as url:
        ask(url, "key-a", LONG)
        resident = set(backend._resident)
        for key, status in ((None, 401), ("wrong", 401), ("key-a", 403)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert httpx.request(method, url + path, headers=headers).status_code == status
    assert backend._resident == resident


def test_the_metric_has_one_value_a_replica_and_scale() -> None:
    from dataclasses import replace

    from prometheus_client.parser import text_string_to_metric_families

    from router.metrics import GatewayMetrics

    (plain,) = asyncio.run(MeasuringBackend().reports())
    ratios = (0.1, 0.2, 0.3, 0.35)
    measured = replace(plain, stats=replace(plain.stats, predicted_hit_ratios=ratios))
    text = GatewayMetrics().render([measured]).decode()
    (family,) = (
        family
        for family in text_string_to_metric_families(text)
        if family.name == "pando_cache_predicted_hit_ratio"
    )
    seen = {(s.labels["replica"], s.labels["scale"]): s.value for s in family.samples}
    names = ("0.5", "1", "2", "4")
    assert seen == {("replica-0", name): value for name, value in zip(names, ratios, strict=True)}
    # A replica that does not measure has no value, rather than 0.
    assert b"predicted_hit_ratio{" not in GatewayMetrics().render([plain])
