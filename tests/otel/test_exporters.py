"""The exporters under the SDK's own processors, read back with the OTLP protos."""

import logging
from collections import Counter, defaultdict
from typing import Any

import pytest
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context, get_value
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from kpl_core.testing import FakeTransport
from kpl_integrations.otel import KinesisLogRecordExporter, KinesisSpanExporter
from kpl_integrations.otel.sender import TelemetrySender
from tests.otel.conftest import EXPORTERS, emit
from tests.support.telemetry import exported, user_records

PER_COUNT = {"traces": 2, "logs": 1, "metrics": 1}


@pytest.mark.parametrize("encoding", ["otlp_proto", "otlp_json"])
@pytest.mark.parametrize("signal", EXPORTERS)
def test_a_consumer_decodes_what_the_sdk_made(kinesis, make_exporter, signal, encoding):
    exporter = make_exporter(signal, encoding=encoding)
    shut_down = emit(signal, exporter, 700)
    shut_down()
    wanted = 700 * PER_COUNT[signal]
    assert sum(1 for _ in exported(kinesis, "telemetry", signal, encoding)) == wanted
    counts = exporter.counts()
    assert (counts.exported, counts.delivered, counts.lost, counts.pending) == (wanted, wanted, {}, 0)


def test_the_spans_of_one_trace_are_in_one_shard(kinesis, make_exporter):
    emit("traces", make_exporter("traces"), 400)()
    shards = defaultdict(set)
    for shard, span in exported(kinesis, "telemetry", "traces"):
        shards[span.trace_id].add(shard)
    assert len(shards) == 400
    assert all(len(where) == 1 for where in shards.values())
    assert len(set.union(*shards.values())) == 4


def test_the_key_by_resource_is_the_same_for_a_service_in_every_process(kinesis, make_exporter):
    exporter = make_exporter("logs", partition_key="resource")
    for service in ("orders", "billing"):
        logs = LoggerProvider(Resource({"service.name": service}), shutdown_on_exit=False)
        logs.add_log_record_processor(SimpleLogRecordProcessor(exporter))
        for _ in range(20):
            logs.get_logger("tests").emit(body=service)
    assert exporter.force_flush(5_000)
    keys = {record.partition_key for _, record in user_records(kinesis, "telemetry")}
    assert keys == {"02c7ba6ad046e691", "3ba1e9b8adb4bdc8"}


def test_a_key_function_gives_each_span_its_key(kinesis, make_exporter):
    exporter = make_exporter("traces", partition_key=lambda span: str(span.attributes.get("number", "child")))
    emit("traces", exporter, 10)()
    keys = Counter(record.partition_key for _, record in user_records(kinesis, "telemetry"))
    assert keys == Counter(["child", *map(str, range(10))])


def test_a_key_function_that_raises_loses_its_export_and_is_counted(make_exporter):
    exporter = make_exporter("traces", partition_key=lambda span: span.nothing)
    spans = TracerProvider(shutdown_on_exit=False)
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    spans.get_tracer("tests").start_span("span").end()
    assert exporter.counts().lost == {"EncodingFailed": 1}


def test_instrumentation_is_suppressed_wherever_the_exporter_works(kinesis):
    seen = []

    class Watching(FakeTransport):
        async def put_records(self, request):
            seen.append(get_value(_SUPPRESS_INSTRUMENTATION_KEY))
            return await super().put_records(request)

        async def list_shards(self, stream):
            seen.append(get_value(_SUPPRESS_INSTRUMENTATION_KEY))
            return await super().list_shards(stream)

    exporter = KinesisSpanExporter("telemetry", transport=lambda _config: Watching(kinesis))
    emit("traces", exporter, 10)()
    assert len(seen) >= 2
    assert set(seen) == {True}


def test_what_the_exporter_logs_is_not_exported(kinesis):
    class Talking(FakeTransport):
        async def put_records(self, request):
            logs.get_logger("botocore").emit(body="sending")
            return await super().put_records(request)

    exporter = KinesisLogRecordExporter("telemetry", transport=lambda _config: Talking(kinesis))
    logs = LoggerProvider(shutdown_on_exit=False)
    logs.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    logs.get_logger("tests").emit(body="line")
    assert exporter.force_flush(5_000)
    logs.shutdown()
    assert [record.body.string_value for _, record in exported(kinesis, "telemetry", "logs")] == ["line"]


@pytest.mark.parametrize("signal", EXPORTERS)
def test_exports_after_the_shutdown_are_counted_as_lost(make_exporter, signal):
    exporter = make_exporter(signal)
    exporter.shutdown()
    emit(signal, exporter, 3)()
    assert exporter.counts().lost == {"Closed": 3 * PER_COUNT[signal]}


def test_a_sender_that_cannot_start_logs_the_reason_and_counts_the_loss(caplog):
    exporter = EXPORTERS["traces"]("telemetry", transport=_no_transport)
    with caplog.at_level(logging.WARNING, logger="kpl_integrations.otel"):
        emit("traces", exporter, 5)()
    assert exporter.counts().lost == {"SenderFailed": 10}
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "nothing can be sent to stream 'telemetry'",
        "spans for stream 'telemetry' did not all arrive",
    ]


def _no_transport(_config):
    from kpl_core import ConfigError  # noqa: PLC0415 - raised here only

    message = "no region is configured; set AWS_REGION"
    raise ConfigError(message)


def test_the_exporters_metrics_show_losses_by_the_names_of_the_conventions(kinesis, make_exporter):
    reader = InMemoryMetricReader()
    exporter = make_exporter("traces", meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    emit("traces", exporter, 4)()
    emit("traces", exporter, 1)()
    found = {}
    made: Any = reader.get_metrics_data()
    for metric in made.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            found[metric.name, point.attributes.get("error.type")] = point.value
    assert found == {
        ("otel.sdk.exporter.span.exported", None): 8,
        ("otel.sdk.exporter.span.exported", "Closed"): 2,
        ("otel.sdk.exporter.span.inflight", None): 0,
    }


def test_a_signal_handler_may_export_while_the_sender_starts(make_exporter, monkeypatch):
    start = TelemetrySender.start

    def interrupted(sender: TelemetrySender, *arguments: Any) -> None:
        starts.append(sender)
        if len(starts) == 1:
            tracer.start_span("of the handler", context=Context()).end()
        start(sender, *arguments)

    starts: list[TelemetrySender] = []
    monkeypatch.setattr(TelemetrySender, "start", interrupted)
    exporter = make_exporter("traces")
    traces = TracerProvider(shutdown_on_exit=False)
    traces.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = traces.get_tracer("tests")
    tracer.start_span("first").end()
    assert exporter.force_flush()
    assert len(starts) == 1
    assert exporter.counts().delivered == 2
