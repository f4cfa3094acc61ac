"""Index, ledger and decisions in Prometheus' words. Read when scraped; nothing is counted twice."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.prefix_index.mirror import IndexMode
from router.policy import RoutingPolicy

_COUNTERS = {
    "decisions_total": "Routing decisions",
    "retries_total": "Decisions made again after a rejection or a loss",
    "routed_hit_tokens_total": "Prompt tokens that decisions expected to be reused",
    "delivered_hit_tokens_total": "Prompt tokens that replicas did reuse",
}


class RoutingCollector(Collector):
    """Adds this Gateway's routing state to a registry.

    Args:
        is_index_connected: whether the index's server answers now.
    """

    def __init__(self, policy: RoutingPolicy, is_index_connected: Callable[[], bool]) -> None:
        self._policy = policy
        self._is_index_connected = is_index_connected

    def collect(self) -> Iterable[Metric]:
        mirror = self._policy.mirror
        mode = GaugeMetricFamily(
            "pando_index_mode",
            "1 at what the index mirror's answers are worth now",
            labels=("mode",),
        )
        for each in IndexMode:
            mode.add_metric([each], float(mirror.mode is each))
        yield mode
        yield GaugeMetricFamily(
            "pando_index_connected",
            "Whether Redis answers",
            value=float(self._is_index_connected()),
        )
        yield GaugeMetricFamily(
            "pando_index_entries", "(replica, hash) pairs in the mirror", value=mirror.num_entries
        )
        for name, help_text in _COUNTERS.items():
            value = getattr(self._policy.counters, name)
            yield CounterMetricFamily(f"pando_router_{name}", help_text, value=value)
        owed = GaugeMetricFamily(
            "pando_ledger_owed_tokens", "Prompt tokens still to be computed", labels=("replica",)
        )
        in_flight = GaugeMetricFamily(
            "pando_ledger_in_flight", "Requests promised to a replica", labels=("replica",)
        )
        for replica_id, load in self._policy.loads().items():
            owed.add_metric([replica_id], load["owed_tokens"])
            in_flight.add_metric([replica_id], load["num_in_flight"])
        yield owed
        yield in_flight
