"""OpenTelemetry's spans, logs and metrics to Kinesis, and a producer's own requests as spans."""

from kpl_integrations.otel.exporters import KinesisLogRecordExporter, KinesisMetricExporter, KinesisSpanExporter
from kpl_integrations.otel.providers import KinesisTelemetry, kinesis_telemetry
from kpl_integrations.otel.put_records_spans import PutRecordsSpans, current_trace_context
from kpl_integrations.otel.sender import ExportCounts
from kpl_integrations.otel.telemetry_records import MetricLeaf

__all__ = [
    "ExportCounts",
    "KinesisLogRecordExporter",
    "KinesisMetricExporter",
    "KinesisSpanExporter",
    "KinesisTelemetry",
    "MetricLeaf",
    "PutRecordsSpans",
    "current_trace_context",
    "kinesis_telemetry",
]
