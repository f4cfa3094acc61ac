"""What a scrape says of index, ledger and decisions."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_policy import REPLICAS, make_policy, make_request

from router.routing_metrics import RoutingCollector


def test_a_scrape_tells_the_state() -> None:
    policy, mirror, _ = make_policy()
    request = make_request("q", list(range(100)))
    policy.open(request)
    policy.decide("q", ["r0"])
    registry = CollectorRegistry()
    is_connected = True
    registry.register(RoutingCollector(policy, lambda: is_connected))

    def scrape() -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        }

    before = scrape()
    assert before["pando_ledger_owed_tokens", "r0"] == 100
    assert before["pando_ledger_in_flight", "r0"] == 1
    assert before["pando_router_decisions_total",] == 1
    assert before["pando_index_connected",] == 1
    assert sum(v for k, v in before.items() if k[0] == "pando_index_mode") == 1
    policy.close("q")
    mirror.tick(1000.0, is_connected=False)
    is_connected = False
    after = scrape()
    assert after["pando_ledger_in_flight", "r0"] == 0
    assert after["pando_index_connected",] == 0
    assert {k[1] for k in after if k[0] == "pando_ledger_in_flight"} == set(REPLICAS)
