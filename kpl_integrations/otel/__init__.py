"""OpenTelemetry's spans, logs and metrics to Kinesis, and a producer's own requests as spans."""

from kpl_integrations.otel.counts import ExportCounts
from kpl_integrations.otel.log_record_exporter import KinesisLogRecordExporter
from kpl_integrations.otel.metric_exporter import KinesisMetricExporter
from kpl_integrations.otel.metric_leaf import MetricLeaf
from kpl_integrations.otel.providers import KinesisTelemetry, kinesis_telemetry
from kpl_integrations.otel.put_records_spans import PutRecordsSpans
from kpl_integrations.otel.span_exporter import KinesisSpanExporter

__all__ = [
    "ExportCounts",
    "KinesisLogRecordExporter",
    "KinesisMetricExporter",
    "KinesisSpanExporter",
    "KinesisTelemetry",
    "MetricLeaf",
    "PutRecordsSpans",
    "kinesis_telemetry",
]
