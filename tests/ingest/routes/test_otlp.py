"""OTLP/HTTP: the OpenTelemetry SDK's own exporters, and every status of the specification."""

import gzip
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kpl_core.testing import RecordError, When
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal
from kpl_integrations.ingest.request.otlp import status_message
from kpl_integrations.ingest.tenants import Tenant
from tests.support.running_gateway import RunningGateway, key_directory, running_gateway

STREAMS = {"logs": 2, "traces": 2, "metrics": 1}
EVERYWHERE: dict[Any, str] = {"logs": "logs", "traces": "traces", "metrics": "metrics"}
DIRECTORY = key_directory(
    ada=Tenant(id="ada", otlp_streams=EVERYWHERE, default_ack="delivered"),
    held=Tenant(id="held", otlp_streams=EVERYWHERE, records_per_second=1, default_ack="delivered"),
    lost=Tenant(id="lost", otlp_streams={"logs": "nowhere"}),
    none=Tenant(id="none"),
)
ONE = ExportLogsServiceRequest(resource_logs=[{"schema_url": "one"}])  # type: ignore[list-item]
PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running_gateway(DIRECTORY, STREAMS, max_body_bytes=100_000, max_inflated_bytes=2_000_000) as running:
        yield running


def post(gateway: RunningGateway, body: bytes, *, tenant: str = "ada", signal: str = "logs", **headers: str) -> Any:
    names = {"Content-Type": PROTOBUF, "Authorization": f"Bearer {tenant}"}
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    with requests.Session() as session:
        session.trust_env = False
        return session.post(f"{gateway.url}/v1/{signal}", data=body, headers=names, timeout=20)


def stored(gateway: RunningGateway, stream: str, *, in_json: bool = False) -> list[bytes]:
    """Return the records of a stream in one encoding; the first byte of a record shows its encoding."""
    return [record.data for record in gateway.user_records(stream) if record.data.startswith(b"{") == in_json]


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_a_consumer_decodes_what_the_sdk_sent(gateway, compression):
    mark = f"with {compression.value}"
    resource = Resource.create({"service.name": mark})
    options: dict[str, Any] = {"headers": {"authorization": "Bearer ada"}, "compression": compression, "timeout": 20}

    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{gateway.url}/v1/traces", **options)))
    for number in range(700):
        tracers.get_tracer("t").start_span(f"span-{number}").end()
    tracers.shutdown()

    loggers = LoggerProvider(resource=resource)
    loggers.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(f"{gateway.url}/v1/logs", **options)))
    for number in range(700):
        loggers.get_logger("l").emit(body=f"line-{number}")
    loggers.shutdown()

    exporter = OTLPMetricExporter(f"{gateway.url}/v1/metrics", **options)
    meters = MeterProvider([PeriodicExportingMetricReader(exporter, 60_000)], resource=resource)
    meters.get_meter("m").create_counter("made").add(42)
    meters.shutdown()

    spans = [
        span.name
        for data in stored(gateway, "traces")
        for part in ExportTraceServiceRequest.FromString(data).resource_spans
        if mark in str(part.resource)
        for scope in part.scope_spans
        for span in scope.spans
    ]
    assert sorted(spans) == sorted(f"span-{number}" for number in range(700))
    lines = [
        record.body.string_value
        for data in stored(gateway, "logs")
        for part in ExportLogsServiceRequest.FromString(data).resource_logs
        if mark in str(part.resource)
        for scope in part.scope_logs
        for record in scope.log_records
    ]
    assert sorted(lines) == sorted(f"line-{number}" for number in range(700))
    points = [
        metric.sum.data_points[0].as_int
        for data in stored(gateway, "metrics")
        for part in ExportMetricsServiceRequest.FromString(data).resource_metrics
        if mark in str(part.resource)
        for scope in part.scope_metrics
        for metric in scope.metrics
    ]
    assert points == [42]


def test_success_is_an_empty_answer_in_the_request_s_encoding(gateway):
    answered = post(gateway, ONE.SerializeToString())
    assert (answered.status_code, answered.headers["Content-Type"]) == (200, PROTOBUF)
    assert ExportLogsServiceResponse.FromString(answered.content) == ExportLogsServiceResponse()
    body = b'{"resourceLogs": [{"schemaUrl": "in json"}]}'
    answered = post(gateway, gzip.compress(body), Content_Type=f"{JSON}; charset=utf-8", Content_Encoding="gzip")
    assert (answered.status_code, answered.headers["Content-Type"], answered.json()) == (200, JSON, {})
    assert body in stored(gateway, "logs", in_json=True)
    assert post(gateway, b"").status_code == 200


def test_the_partition_key_comes_from_a_header_or_is_random(gateway):
    request = ExportLogsServiceRequest(resource_logs=[{"schema_url": "keyed"}]).SerializeToString()  # type: ignore[list-item]
    for headers in ({}, {}, {"X_Partition_Key": "host-1"}):
        assert post(gateway, request, **headers).status_code == 200
    keys = [record.partition_key for record in gateway.user_records("logs") if record.data == request]
    assert len(set(keys)) == 3
    assert "host-1" in keys


# A request, and its status in the specification.
STATUSES: list[tuple[str, bytes, dict[str, str], int]] = [
    ("no protobuf", b"\xff\xff", {}, 400),
    ("no json", b"{", {"Content_Type": JSON}, 400),
    ("truncated gzip", gzip.compress(b"x" * 100)[:-5], {"Content_Encoding": "gzip"}, 400),
    ("no credentials", b"", {"Authorization": "Bearer nobody"}, 401),
    ("no stream configured", b"", {"tenant": "none"}, 404),
    ("a stream that is not there", ONE.SerializeToString(), {"tenant": "lost"}, 404),
    ("too large", b"x" * 100_001, {}, 413),
    ("too large inflated", gzip.compress(b"\x12\x81\x89\x7a" + bytes(2_000_001)), {"Content_Encoding": "gzip"}, 413),
    ("another type", b"x", {"Content_Type": "text/plain"}, 415),
    ("another encoding", b"x", {"Content_Encoding": "br"}, 415),
    ("no spool", b"", {"X_Ack": "spooled"}, 400),
]


@pytest.mark.parametrize(("body", "given", "status"), [row[1:] for row in STATUSES], ids=[row[0] for row in STATUSES])
def test_every_refusal_has_the_specification_s_status_and_a_status_message(gateway, body, given, status):
    answered = post(gateway, body, **given)
    assert answered.status_code == status
    if given.get("Content_Type", PROTOBUF) == PROTOBUF:
        assert answered.headers["Content-Type"] == PROTOBUF
        message = Status.FromString(answered.content)
        assert message.code
        assert message.message
    else:
        assert answered.headers["Content-Type"] == JSON
        assert set(answered.json()) == {"code", "message"}


@pytest.mark.long
def test_overload_is_429_for_the_whole_request_and_an_sdk_that_retries_loses_nothing(gateway, caplog):
    held = {"authorization": "Bearer held"}
    loggers = LoggerProvider(resource=Resource.create({"service.name": "held"}))
    exporter = OTLPLogExporter(f"{gateway.url}/v1/logs", headers=held, timeout=30)
    processor = BatchLogRecordProcessor(exporter, max_export_batch_size=10)
    loggers.add_log_record_processor(processor)
    with caplog.at_level(logging.WARNING):
        for number in range(30):
            loggers.get_logger("l").emit(body=f"held-{number}")
        loggers.shutdown()
    assert "Transient error" in caplog.text
    assert gateway.gateway.tally.answers[429]
    lines = [
        record.body.string_value
        for data in stored(gateway, "logs")
        for part in ExportLogsServiceRequest.FromString(data).resource_logs
        for scope in part.scope_logs
        for record in scope.log_records
        if record.body.string_value.startswith("held-")
    ]
    assert sorted(lines) == sorted(f"held-{number}" for number in range(30))


def test_a_rejection_over_the_rate_has_retry_after_and_is_not_a_partial_success(gateway):
    answers = [post(gateway, ONE.SerializeToString(), tenant="held") for _ in range(3)]
    refused = next(answered for answered in answers if answered.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert "ratelimit" in refused.headers
    assert (
        "rate" in Status.FromString(refused.content).message or "send now" in Status.FromString(refused.content).message
    )


@pytest.mark.parametrize("content_type", [PROTOBUF, JSON])
def test_a_gateway_that_shuts_down_is_503_with_retry_after(gateway, monkeypatch, content_type):
    monkeypatch.setattr(gateway.gateway.admission, "state", "closed")
    answered = post(gateway, b"", Content_Type=content_type)
    assert (answered.status_code, answered.headers["Content-Type"]) == (503, content_type)
    assert int(answered.headers["Retry-After"]) >= 1


def test_records_that_kinesis_rejects_are_retryable_with_ack_delivered(gateway):
    effect, when = RecordError("ValidationException", "not this one"), When(stream="metrics")
    fault = gateway.kinesis.call(lambda fake, _: fake.faults.add(effect, when))
    try:
        answered = post(gateway, ONE.SerializeToString(), signal="metrics")
    finally:
        gateway.kinesis.call(lambda fake, _: fake.faults.remove(fault))
    assert answered.status_code == 502


@pytest.mark.parametrize("refusal", Refusal)
def test_every_refusal_has_a_status_message_that_google_rpc_reads(refusal):
    status = REFUSALS[refusal].status
    for detail in ("", "x" * 127, "x" * 128, "é" * 10_000):
        message = Status.FromString(status_message(status, detail, is_protobuf=True))
        assert (message.message, message.code > 0) == (detail, True)
        assert json.loads(status_message(status, detail, is_protobuf=False)) == {
            "code": message.code,
            "message": detail,
        }
