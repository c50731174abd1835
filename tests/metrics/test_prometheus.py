"""The Prometheus exposition: the names of the specification, in the producer's own registry."""

import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from hypothesis import given, strategies as st
from msgspec import structs
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kpl_core import Config, ConfigError, Producer
from kpl_core.durability.circuit_breaker import CircuitBreaker
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.hooks import ShardMapRefreshed, ShardRateChanged
from kpl_core.records.record_result import REASONS
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.logging_handler import KinesisHandler
from kpl_integrations.metrics.catalogue import METRICS, Kind
from kpl_integrations.metrics.metrics_hook import Sample
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import (
    breaker_source,
    dead_letter_source,
    log_handler_source,
    producer_source,
    telemetry_source,
)
from tests.metrics.test_in_memory import DELIVERED, REQUEST, failed


def scraped(metrics: PrometheusMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read the exposition as Prometheus does."""
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float:
    return scraped(metrics)[name, frozenset(labels.items())]


def test_facts_are_exposed_under_the_names_of_the_specification() -> None:
    metrics = PrometheusMetrics(clock=lambda: 5.0)
    for fact in (REQUEST, DELIVERED, failed(), ShardMapRefreshed("orders", 1)):
        metrics(fact)
    metrics(ShardRateChanged("orders", "shardId-000000000001", 0.85))
    shard = {"stream": "orders", "shard": "shardId-000000000001"}
    records = "kinesis_producer_records_total"
    assert value(metrics, records, outcome="delivered", reason="", tier="normal") == 50
    assert value(metrics, records, outcome="failed", reason="Expired", tier="bulk") == 7
    assert value(metrics, "kinesis_producer_throttled_records_total", **shard) == 2
    assert value(metrics, "kinesis_producer_shard_rate_limit", **shard) == 0.85
    assert value(metrics, "kinesis_producer_shard_utilisation", **shard) == pytest.approx(0.1)
    assert value(metrics, "kinesis_producer_send_duration_seconds_count", outcome="answered") == 1
    assert value(metrics, "kinesis_producer_aggregation_ratio_bucket", le="50.0") == 1
    assert value(metrics, "kinesis_producer_attempts_sum") == 3


@given(st.lists(st.floats(0, 100) | st.sampled_from(METRICS["kinesis_producer_delivery_seconds"].buckets), max_size=50))
def test_a_histogram_counts_like_the_client_librarys_own(ages: list[float]) -> None:
    name = "kinesis_producer_delivery_seconds"
    metrics, own = PrometheusMetrics(), CollectorRegistry()
    theirs = Histogram(name, METRICS[name].meaning, registry=own, buckets=METRICS[name].buckets)
    for age in ages:
        metrics(structs.replace(DELIVERED, age=age))
        theirs.observe(age)
    for family in own.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert metrics.registry.get_sample_value(sample.name, sample.labels) == sample.value


def test_a_histogram_without_labels_exists_before_the_first_fact() -> None:
    assert value(PrometheusMetrics(), "kinesis_producer_delivery_seconds_count") == 0


def test_sources_are_read_at_every_scrape() -> None:
    metrics = PrometheusMetrics()
    breaker = CircuitBreaker()
    metrics.watch(breaker_source(lambda: {("orders", "shardId-000000000000"): breaker}))
    labels = {"stream": "orders", "shard": "shardId-000000000000"}
    assert value(metrics, "kinesis_producer_breaker_state", **labels) == 0
    breaker.record_outcomes(succeeded=0, failed=100, now=1.0)
    assert value(metrics, "kinesis_producer_breaker_state", **labels) == 2


def test_the_global_registry_is_unchanged_and_two_producers_do_not_collide() -> None:
    before = {family.name for family in REGISTRY.collect()}
    first, second = PrometheusMetrics(), PrometheusMetrics()
    first(DELIVERED)
    assert {family.name for family in REGISTRY.collect()} == before
    key = ("kinesis_producer_records_total", frozenset({("outcome", "delivered"), ("reason", ""), ("tier", "normal")}))
    assert key in scraped(first)
    assert key not in scraped(second)


def test_the_callers_registry_is_used() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry)(DELIVERED)
    labels = {"outcome": "delivered", "reason": "", "tier": "normal"}
    assert registry.get_sample_value("kinesis_producer_records_total", labels) == 50


def test_every_loss_is_zero_before_the_first_one() -> None:
    """`increase()` sees nothing where a series begins with its first value."""
    metrics = PrometheusMetrics()
    metrics.watch(dead_letter_source(cast("DeadLetterQueue", SimpleNamespace(depth=0, added=Counter()))))
    metrics.watch(telemetry_source(lambda: {"traces": SimpleNamespace(exported=0, lost_total=0)}))
    handler = KinesisHandler("logs", config=Config(region="us-east-1"))
    metrics.watch(log_handler_source(handler.counts))
    assert value(metrics, "kinesis_producer_lost_records_total") == 0
    assert [value(metrics, "kinesis_producer_dlq_records_total", reason=reason) for reason in REASONS] == [0] * 9
    assert value(metrics, "kinesis_otel_lost_items_total", signal="traces") == 0
    assert value(metrics, "kinesis_log_dropped_records_total") == 0


def test_a_failed_record_is_lost_and_a_kept_one_is_not() -> None:
    metrics = PrometheusMetrics()
    for outcome in ("failed", "spooled", "dead_lettered"):
        metrics(structs.replace(DELIVERED, outcome=outcome, reason="Expired"))
    assert value(metrics, "kinesis_producer_lost_records_total") == DELIVERED.user_records


def test_a_second_collector_on_a_registry_is_refused() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    with pytest.raises(ConfigError, match="has a PrometheusMetrics already"):
        PrometheusMetrics(registry)


def test_the_multiprocess_mode_is_refused_unless_each_process_exposes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/var/metrics")
    with pytest.raises(ConfigError, match=r"'/var/metrics'.*per_process=True"):
        PrometheusMetrics()
    assert value(PrometheusMetrics(per_process=True), "kinesis_producer_lost_records_total") == 0


def test_every_metric_of_the_catalogue_can_be_exported() -> None:
    """Fails for a row that the exporter cannot handle, whether its values come from facts or from a source."""
    metrics = PrometheusMetrics()

    def every_value() -> Iterator[Sample]:
        for metric in METRICS.values():
            if metric.kind is not Kind.HISTOGRAM:  # histograms are filled by facts
                yield Sample(metric.name, ("x",) * len(metric.labels), 1.0)

    metrics.watch(every_value)
    exported = {name for name, _ in scraped(metrics)}
    described = set(re.findall(r"^# TYPE (\w+) histogram$", metrics.exposition()[0].decode(), re.MULTILINE))
    for metric in METRICS.values():
        assert metric.name in exported | described
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")


@pytest.mark.anyio
async def test_the_metrics_of_a_real_producer_add_up() -> None:
    kinesis = FakeKinesis()
    kinesis.create_stream("orders", shard_count=2, now=anyio.current_time())
    metrics = PrometheusMetrics()
    config = Config(region="us-east-1", record_max_buffered_time_ms=5)
    async with Producer(config, transport=FakeTransport(kinesis), hooks=[metrics]) as producer:
        metrics.watch(producer_source(producer))
        deliveries = [
            producer.put_nowait("orders", partition_key=f"key-{number}", data=b"data") for number in range(500)
        ]
        for delivery in deliveries:
            assert (await delivery).successful
    samples = scraped(metrics)
    accepted = samples["kinesis_producer_accepted_records_total", frozenset()]
    outstanding = samples["kinesis_producer_outstanding_records", frozenset()]
    finished = sum(count for (name, _), count in samples.items() if name == "kinesis_producer_records_total")
    assert accepted == finished + outstanding == 500
