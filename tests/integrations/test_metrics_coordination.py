from kpl_core.hooks import CoordinatorMet, Fact, ShareChanged
from kpl_integrations.metrics.in_memory import InMemoryMetrics
from kpl_integrations.metrics.prometheus import PrometheusMetrics

FACTS: list[Fact] = [
    CoordinatorMet("w1", "leased", 2.5, ""),
    CoordinatorMet("w1", "expired", 12.0, "down"),
    CoordinatorMet("w1", "expired", 17.0, "down"),
    ShareChanged("orders", "shardId-0", 0.25, 0.5, True),
]


def test_meetings_that_failed_are_counted_by_their_reason():
    metrics = InMemoryMetrics()
    for fact in FACTS:
        metrics(fact)
    assert metrics.value("kinesis_coordinator_failures_total", reason="down") == 2


def test_prometheus_can_scrape_them():
    metrics = PrometheusMetrics()
    for fact in FACTS:
        metrics(fact)
    assert 'kinesis_coordinator_failures_total{reason="down"} 2.0' in metrics.exposition()[0].decode()
