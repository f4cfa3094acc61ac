"""What the metrics say after known events."""

import asyncio

import pytest
from edge_fakes import FakeBackend
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import GatewayMetrics
from router.requests import Usage
from workers.errors import InvalidRequest
from workers.protocol import ReplicaReport


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def samples(
    metrics: GatewayMetrics, reports: list[ReplicaReport] | None = None
) -> dict[str, float]:
    """Each sample's value, by its name and label values."""
    text = metrics.render(reports or []).decode()
    return {
        "/".join((sample.name, *(sample.labels[k] for k in sorted(sample.labels)))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_times_and_tokens_of_one_prompt() -> None:
    metrics, clock = GatewayMetrics(), Clock()
    with metrics.track("a", clock) as timer:
        clock.now += 2
        timer.observe(Usage(10, 4, 0))
        clock.now += 1
        timer.observe(Usage(10, 4, 1))
        clock.now += 1
        timer.observe(Usage(10, 4, 5))
        clock.now += 5
    seen = samples(metrics)
    assert seen["pando_time_to_first_token_seconds_sum/a"] == 3
    assert seen["pando_inter_token_seconds_sum/a"] == 0.25
    assert seen["pando_request_duration_seconds_sum/a"] == 9
    assert seen["pando_prompt_tokens_total/a"] == 10
    assert seen["pando_cached_tokens_total/a"] == 4
    assert seen["pando_generated_tokens_total/a"] == 5
    assert seen["pando_requests_total/ok/a"] == 1


def test_outcomes() -> None:
    metrics, clock = GatewayMetrics(), Clock()
    errors = (InvalidRequest("x"), asyncio.CancelledError(), GeneratorExit(), RuntimeError())
    for error in errors:
        with pytest.raises(type(error)), metrics.track("a", clock):
            raise error
    seen = samples(metrics)
    assert seen["pando_requests_total/invalid_request/a"] == 1
    assert seen["pando_requests_total/cancelled/a"] == 2
    assert seen["pando_requests_total/internal_error/a"] == 1


def test_the_number_of_tenant_labels_is_bounded() -> None:
    metrics, clock = GatewayMetrics(max_tenants=2), Clock()
    for tenant in ("a", "b", "c", "d", "a"):
        with metrics.track(tenant, clock):
            pass
    seen = samples(metrics)
    counts = {
        k.rsplit("/", 1)[1]: v for k, v in seen.items() if k.startswith("pando_requests_total")
    }
    assert counts == {"a": 2, "b": 1, "other": 2}


def test_replicas_come_and_go() -> None:
    metrics = GatewayMetrics()
    backend = FakeBackend()
    reports = asyncio.run(backend.reports())
    seen = samples(metrics, reports)
    assert seen["pando_replica_num_blocks/replica-0"] == 4096
    assert seen["pando_replica_cached_tokens_total/replica-0"] == 3
    assert seen["pando_replica_index_connected/replica-0"] == 1
    assert not any("replica-0" in name for name in samples(metrics))


def test_in_flight_and_errors() -> None:
    metrics = GatewayMetrics()
    metrics.set_in_flight(3)
    metrics.count_error("overloaded")
    seen = samples(metrics)
    assert seen["pando_requests_in_flight"] == 3
    assert seen["pando_errors_total/overloaded"] == 1
