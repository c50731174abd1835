"""What a consumer reads: the exports in a stream, taken out of their aggregates, by the OTLP protos."""

from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto_json.collector.logs.v1.logs_service import ExportLogsServiceRequest as JsonLogs
from opentelemetry.proto_json.collector.metrics.v1.metrics_service import ExportMetricsServiceRequest as JsonMetrics
from opentelemetry.proto_json.collector.trace.v1.trace_service import ExportTraceServiceRequest as JsonTraces

from kpl_core import UserRecord, decode
from kpl_core.testing import FakeKinesis
from kpl_integrations.otel import KinesisSpanExporter

PROTOS: dict[str, Any] = {
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}
JSON: dict[str, Any] = {"traces": JsonTraces, "logs": JsonLogs, "metrics": JsonMetrics}
LEVELS = {
    "traces": ("resource_spans", "scope_spans", "spans"),
    "logs": ("resource_logs", "scope_logs", "log_records"),
    "metrics": ("resource_metrics", "scope_metrics", "metrics"),
}


def impatient_exporter(endpoint_url: str, **options: Any) -> KinesisSpanExporter:
    """Return an exporter whose exports wait for 300 ms, and whose shutdown takes 100 ms, at most."""
    return KinesisSpanExporter(
        "telemetry",
        region="us-east-1",
        endpoint_url=endpoint_url,
        timeout_millis=300,
        shutdown_timeout_millis=100,
        **options,
    )


def user_records(kinesis: FakeKinesis, stream: str) -> list[tuple[str, UserRecord]]:
    """Return every user record with the shard it is in."""
    found = []
    for stored in kinesis.records(stream):
        inside = decode(stored.data) or [UserRecord(stored.partition_key, stored.data)]
        found += [(stored.shard_id, record) for record in inside]
    return found


def exported(kinesis: FakeKinesis, stream: str, signal: str, encoding: str = "otlp_proto") -> Iterator[tuple[str, Any]]:
    """Yield (shard, span or log record or metric) of everything in a stream."""
    resources, scopes, leaves = LEVELS[signal]
    for shard, record in user_records(kinesis, stream):
        if encoding == "otlp_proto":
            request = PROTOS[signal].FromString(record.data)
        else:
            request = JSON[signal].from_json(record.data)
        for resource in getattr(request, resources):
            for scope in getattr(resource, scopes):
                for leaf in getattr(scope, leaves):
                    yield shard, leaf
