"""The producer's metrics through OpenTelemetry's API, and the sources of a gateway and a coordinator."""

from typing import Any

import pytest
from msgspec import structs
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kpl_core.hooks import ShardRateChanged
from kpl_integrations.metrics.catalogue import METRICS, Kind
from kpl_integrations.metrics.metrics_hook import LOST, Sample
from kpl_integrations.metrics.opentelemetry import OpenTelemetryMetrics
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import coordinator_source, request_source, tenant_wait_source
from tests.metrics.test_in_memory import DELIVERED, REQUEST, failed


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def metrics(reader: InMemoryMetricReader) -> OpenTelemetryMetrics:
    return OpenTelemetryMetrics(MeterProvider([reader], shutdown_on_exit=False), clock=lambda: 5.0)


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    data: Any = reader.get_metrics_data()
    return {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}


def test_facts_become_counters_histograms_and_gauges(metrics, reader):
    for fact in (REQUEST, DELIVERED, failed(), ShardRateChanged("orders", "shardId-000000000001", 0.85)):
        metrics(fact)
    found = collected(reader)
    records = {
        tuple(point.attributes.values()): point.value for point in found["kinesis_producer_records"].data.data_points
    }
    assert records == {("delivered", "", "normal"): 50, ("failed", "Expired", "bulk"): 7}
    (attempts,) = found["kinesis_producer_attempts"].data.data_points
    assert attempts.explicit_bounds == METRICS["kinesis_producer_attempts"].buckets
    assert (attempts.count, attempts.sum) == (1, 2)
    (limit,) = found["kinesis_producer_shard_rate_limit"].data.data_points
    assert (limit.value, limit.attributes["shard"]) == (0.85, "shardId-000000000001")
    assert found["kinesis_producer_queue_wait_seconds"].unit == "s"
    assert found["kinesis_producer_bytes"].unit == "By"


def test_one_answer_is_one_observation_of_the_greatest_value_and_the_last_is_not_lost(metrics, reader):
    for age, attempts in ((0.2, 1), (0.7, 3), (0.4, 2)):
        metrics(structs.replace(DELIVERED, age=age, attempts=attempts))
    metrics(REQUEST)
    metrics(REQUEST)
    metrics(failed())
    found = collected(reader)
    (ages,) = found["kinesis_producer_delivery_seconds"].data.data_points
    assert (ages.count, ages.sum, ages.min, ages.max) == (2, 30.7, 0.7, 30.0)
    (attempts,) = found["kinesis_producer_attempts"].data.data_points
    assert (attempts.count, attempts.sum) == (2, 4)
    assert "greatest" in found["kinesis_producer_attempts"].description
    assert "greatest" not in found["kinesis_producer_aggregation_ratio"].description


def test_two_readers_read_the_same_values():
    readers = InMemoryMetricReader(), InMemoryMetricReader()
    metrics = OpenTelemetryMetrics(MeterProvider(readers, shutdown_on_exit=False))
    metrics(DELIVERED)
    for reader in readers:
        (ages,) = collected(reader)["kinesis_producer_delivery_seconds"].data.data_points
        assert (ages.count, ages.sum) == (1, 0.3)


def test_every_metric_from_a_source_is_observed_under_its_name(metrics, reader):
    # The count of losses is there from the start.
    read = {name: metric for name, metric in METRICS.items() if metric.kind is not Kind.HISTOGRAM and name != LOST}
    samples = [Sample(name, tuple("x" for _ in metric.labels), 3) for name, metric in read.items()]
    metrics.watch(lambda: samples)
    found = collected(reader)
    assert set(found) == {sample.name.removesuffix("_total") for sample in samples} | {LOST.removesuffix("_total")}
    for name, metric in read.items():
        data = found[name.removesuffix("_total")].data
        assert [point.value for point in data.data_points] == [3]
        assert hasattr(data, "is_monotonic") is (metric.kind is Kind.COUNTER)


def test_ten_thousand_waiting_tenants_make_twenty_one_series():
    waits = {f"tenant-{number:05}": number / 1_000 for number in range(10_000)}
    metrics = PrometheusMetrics()
    metrics.watch(tenant_wait_source(lambda: waits))
    body, _ = metrics.exposition()
    lines = [line for line in body.decode().splitlines() if line.startswith("kinesis_ingest_tenant_wait_seconds{")]
    assert len(lines) == 21
    assert lines[0] == 'kinesis_ingest_tenant_wait_seconds{tenant="tenant-09999"} 9.999'
    assert lines[-1] == 'kinesis_ingest_tenant_wait_seconds{tenant="other"} 9.979'


def test_a_tenant_that_does_not_wait_has_no_series():
    assert list(tenant_wait_source(lambda: {"a": 0.0, "b": 1.0})()) == [
        Sample("kinesis_ingest_tenant_wait_seconds", ("b",), 1.0)
    ]


def test_requests_are_counted_by_status_and_reason():
    source = request_source(lambda: {202: 5, 429: 2}, lambda: {"over_quota": 2})
    assert list(source()) == [
        Sample("kinesis_ingest_requests_total", ("202",), 5),
        Sample("kinesis_ingest_requests_total", ("429",), 2),
        Sample("kinesis_ingest_rejected_total", ("over_quota",), 2),
    ]


def test_a_coordinators_shares_are_bounded_and_other_has_the_smallest_of_the_rest():
    shares = {f"shard-{number}": 0.5 for number in range(1_000)} | {"late": 0.2, "later": 0.1}
    found = list(coordinator_source(lambda: 1.5, lambda: shares)())
    assert found[0] == Sample("kinesis_coordinator_lease_age_seconds", (), 1.5)
    assert len(found) == 1 + 1_000 + 1
    assert found[-1] == Sample("kinesis_coordinator_share", ("other",), 0.1)
