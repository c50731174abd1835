"""Exports larger than a record."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kpl_core import Config
from kpl_core.testing import FakeKinesis
from kpl_integrations.otel.telemetry_records import encoder, items_in, leaves_of, telemetry_records
from tests.support.telemetry import PROTOS, exported, user_records

MIB = 1024 * 1024
RECORD_BYTES = MIB


@dataclasses.dataclass(frozen=True)
class Leaf:
    name: int
    size: int
    resource: object
    instrumentation_scope: object


PLACES = [object(), object(), object()]
LEAVES = st.lists(
    st.builds(Leaf, st.integers(), st.integers(1, 40), st.sampled_from(PLACES), st.sampled_from(PLACES)),
    min_size=1,
    max_size=60,
)


@given(LEAVES, st.integers(12, 400))
def test_every_leaf_is_in_one_piece_that_fits_or_is_too_large_alone(leaves, max_bytes):
    encoded = []

    def encode(part):
        encoded.append(list(part))
        # Two resource bytes and three scope bytes each time they are named.
        places = (
            {id(leaf.resource) for leaf in part},
            {(id(leaf.resource), id(leaf.instrumentation_scope)) for leaf in part},
        )
        return bytes(sum(leaf.size for leaf in part) + 2 * len(places[0]) + 3 * len(places[1]))

    found: Counter[int] = Counter()
    for record in telemetry_records(leaves, encode, max_bytes=max_bytes):
        if record.data is None:
            assert len(encoded[-1]) == 1
            assert encoded[-1][0].size + 5 > max_bytes
        else:
            assert len(record.data) <= max_bytes
        assert record.items == len(encoded[-1])
        found.update(map(id, encoded[-1]))
    assert found == Counter(map(id, leaves))


def large_spans(count: int, size: int):
    made = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracer = provider.get_tracer("tests")
    with tracer.start_as_current_span("root"):
        for number in range(count):
            tracer.start_span("large", attributes={"number": number, "text": "x" * size}).end()
    return made.get_finished_spans()[:count]


def test_twelve_mebibytes_of_one_trace_arrive_whole_and_in_one_shard(make_exporter, kinesis: FakeKinesis):
    # All goes to one shard: at its own pace that takes 12 seconds.
    exporter = make_exporter("traces", config=Config(rate_limit_bytes_per_sec_per_shard=1e9))
    spans = large_spans(120, 105_000)
    assert len(encoder("traces", "otlp_proto")(spans)) > 12 * MIB
    exporter.export(spans)
    assert exporter.force_flush(20_000)
    arrived = list(exported(kinesis, "telemetry", "traces"))
    assert sorted(span.attributes[0].value.int_value for _, span in arrived) == list(range(120))
    assert all(len(span.attributes[1].value.string_value) == 105_000 for _, span in arrived)
    assert len({shard for shard, _ in arrived}) == 1
    records = user_records(kinesis, "telemetry")
    assert len(records) >= 13
    assert max(len(record.data) for _, record in records) < RECORD_BYTES
    assert exporter.counts().delivered == 120


def test_log_records_are_divided_by_resource_then_by_scope(make_exporter, kinesis: FakeKinesis):
    made = InMemoryLogRecordExporter()
    for service in ("orders", "billing"):
        provider = LoggerProvider(Resource({"service.name": service}), shutdown_on_exit=False)
        provider.add_log_record_processor(SimpleLogRecordProcessor(made))
        for scope in ("http", "sql"):
            for _ in range(5):
                provider.get_logger(scope).emit(body="x" * 100_000)
    exporter = make_exporter("logs")
    exporter.export(list(made.get_finished_logs()))
    assert exporter.force_flush(20_000)
    requests = [PROTOS["logs"].FromString(record.data) for _, record in user_records(kinesis, "telemetry")]
    assert all(len(request.resource_logs) == 1 for request in requests)
    places = Counter(
        (request.resource_logs[0].resource.attributes[0].value.string_value, scope.scope.name, len(scope.log_records))
        for request in requests
        for scope in request.resource_logs[0].scope_logs
    )
    assert places == Counter({(service, scope, 5): 1 for service in ("orders", "billing") for scope in ("http", "sql")})


def test_a_metric_with_too_many_data_points_is_divided_between_them():
    reader = InMemoryMetricReader()
    counter = MeterProvider([reader], shutdown_on_exit=False).get_meter("tests").create_counter("requests")
    for number in range(500):
        counter.add(number, {"tenant": f"tenant-{number}"})
    made = reader.get_metrics_data()
    assert made is not None
    leaves = leaves_of(made)
    assert items_in(leaves) == 500
    parts = list(telemetry_records(leaves, encoder("metrics", "otlp_proto"), max_bytes=5_000))
    assert all(part.data is not None and len(part.data) <= 5_000 for part in parts)
    values = [
        point.as_int
        for part in parts
        for resource in PROTOS["metrics"].FromString(part.data).resource_metrics
        for metric in resource.scope_metrics[0].metrics
        for point in metric.sum.data_points
    ]
    assert sorted(values) == list(range(500))


@pytest.mark.parametrize("others", [0, 3])
def test_only_a_span_that_is_too_large_is_lost_and_counted(make_exporter, kinesis: FakeKinesis, others):
    exporter = make_exporter("traces")
    exporter.export([*large_spans(1, 2 * MIB), *large_spans(others, 10)])
    assert not exporter.force_flush(10_000)
    assert exporter.counts().lost == {"TooLarge": 1}
    assert len(list(exported(kinesis, "telemetry", "traces"))) == others
