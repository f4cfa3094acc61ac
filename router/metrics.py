"""What a Gateway counts, in Prometheus' words. Names begin with `pando_`; times are in seconds."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.requests import Usage
from workers.errors import PandoError
from workers.protocol import PREDICTION_SCALES, ReplicaReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OTHER_TENANTS = "other"
_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_INTER_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_REPLICA_GAUGES = (
    "num_running",
    "num_waiting",
    "num_free_blocks",
    "num_cached_blocks",
    "num_used_blocks",
    "index_connected",
)
_REPLICA_COUNTERS = (
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "preemptions_total",
    "evicted_blocks_total",
    "requests_total",
    "steps_total",
)


class GatewayMetrics:
    """The metrics of one Gateway process.

    Args:
        max_tenants: how many tenants get a label of their own; later ones share `other`, so that the
            number of time series has a bound.
    """

    def __init__(self, max_tenants: int = 100) -> None:
        self._max_tenants = max_tenants
        self._labelled: set[str] = set()
        self.registry = CollectorRegistry()
        self._replicas = _ReplicaCollector()
        self.registry.register(self._replicas)
        self._requests = self._counter("requests", "Prompts by how they ended", "outcome")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of begun prompts")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens that were reused")
        self._generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self._first_token = self._histogram(
            "time_to_first_token", "From arrival to the first token", _FIRST_TOKEN_BUCKETS_S
        )
        self._inter_token = self._histogram(
            "inter_token", "Between tokens of a prompt", _INTER_TOKEN_BUCKETS_S
        )
        self._duration = self._histogram(
            "request_duration", "From arrival to the end", _DURATION_BUCKETS_S
        )
        self._in_flight = Gauge(
            "pando_requests_in_flight", "Prompts in work in this Gateway", registry=self.registry
        )
        self._errors = Counter(
            "pando_errors", "Error answers by code", ("code",), registry=self.registry
        )

    def set_in_flight(self, num_requests: int) -> None:
        self._in_flight.set(num_requests)

    def count_error(self, code: str) -> None:
        """Count one error answer; `code` is a `workers.errors` code."""
        self._errors.labels(code).inc()

    @contextmanager
    def track(self, tenant_id: str, clock: Callable[[], float]) -> Iterator["RequestTimer"]:
        """Measure one prompt from here to the end of the block, however it ends."""
        timer = RequestTimer(self, self._label(tenant_id), clock, clock())
        outcome = "internal_error"
        try:
            yield timer
            outcome = "ok"
        except PandoError as error:
            outcome = error.code
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self._requests.labels(timer.label, outcome).inc()
            timer.end()

    def render(self, reports: Sequence[ReplicaReport]) -> bytes:
        """All metrics in Prometheus' text format, with `reports` as the replicas' part."""
        self._replicas.reports = tuple(reports)
        return generate_latest(self.registry)

    def _label(self, tenant_id: str) -> str:
        if tenant_id not in self._labelled:
            if len(self._labelled) >= self._max_tenants:
                return _OTHER_TENANTS
            self._labelled.add(tenant_id)
        return tenant_id

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"pando_{name}", help_text, ("tenant", *labels), registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"pando_{name}_seconds", help_text, ("tenant",), buckets=buckets, registry=self.registry
        )


@dataclass(slots=True)
class RequestTimer:
    """Follows one prompt; made by `GatewayMetrics.track`."""

    metrics: GatewayMetrics
    label: str
    clock: Callable[[], float]
    began: float
    usage: Usage = field(default_factory=Usage)
    last_token: float | None = None

    def observe(self, usage: Usage) -> None:
        """Tell it the usage so far, each time that tokens may have come."""
        num_new = usage.num_completion_tokens - self.usage.num_completion_tokens
        self.usage = usage
        if num_new == 0:
            return
        now = self.clock()
        metrics = self.metrics
        if self.last_token is None:
            metrics._first_token.labels(self.label).observe(now - self.began)
        else:
            metrics._inter_token.labels(self.label).observe((now - self.last_token) / num_new)
        self.last_token = now

    def end(self) -> None:
        metrics = self.metrics
        metrics._duration.labels(self.label).observe(self.clock() - self.began)
        metrics._prompt_tokens.labels(self.label).inc(self.usage.num_prompt_tokens)
        metrics._cached_tokens.labels(self.label).inc(self.usage.num_cached_tokens)
        metrics._generated_tokens.labels(self.label).inc(self.usage.num_completion_tokens)


class _ReplicaCollector(Collector):
    """The latest reports as metrics: a replica that is gone is gone from here as well."""

    def __init__(self) -> None:
        self.reports: tuple[ReplicaReport, ...] = ()

    def collect(self) -> Iterable[Metric]:
        for name in _REPLICA_GAUGES:
            gauge = GaugeMetricFamily(f"pando_replica_{name}", f"{name} now", labels=("replica",))
            for report in self.reports:
                gauge.add_metric([report.info.replica_id], float(getattr(report.stats, name)))
            yield gauge
        for name in _REPLICA_COUNTERS:
            counter = CounterMetricFamily(
                f"pando_replica_{name}", f"{name} since its epoch began", labels=("replica",)
            )
            for report in self.reports:
                counter.add_metric([report.info.replica_id], getattr(report.stats, name))
            yield counter
        blocks = GaugeMetricFamily(
            "pando_replica_num_blocks", "Blocks in the pool", labels=("replica",)
        )
        for report in self.reports:
            blocks.add_metric([report.info.replica_id], report.info.num_blocks)
        yield blocks
        predicted = GaugeMetricFamily(
            "pando_cache_predicted_hit_ratio",
            "Of the last hour's block lookups, what a least-recently-used pool of `scale` times the size would answer",
            labels=("replica", "scale"),
        )
        for report in self.reports:
            ratios = report.stats.predicted_hit_ratios
            for scale, ratio in zip(PREDICTION_SCALES, ratios, strict=False):
                predicted.add_metric([report.info.replica_id, f"{scale:g}"], ratio)
        yield predicted
