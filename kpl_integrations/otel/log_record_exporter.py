"""OpenTelemetry's log records to a Kinesis stream.

    OTEL_LOGS_EXPORTER=kinesis KPL_OTEL_STREAM=telemetry opentelemetry-instrument uvicorn app:app

What the exporter's own thread logs is not exported: with the root logger at DEBUG each request would make more.
"""

from collections.abc import Sequence
from typing import Unpack

from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult

from kpl_integrations.otel.counts import ExportCounts
from kpl_integrations.otel.options import ExporterArguments
from kpl_integrations.otel.quietly import is_ours
from kpl_integrations.otel.shipping import shipping_of

__all__ = ["KinesisLogRecordExporter"]


class KinesisLogRecordExporter(LogRecordExporter):
    """Exports log records; give it to a `BatchLogRecordProcessor`. What is not given comes from the environment.

    `partition_key` is "random", "resource" or a function of the log record; else as `KinesisSpanExporter`.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """

    def __init__(self, stream: str | None = None, **arguments: Unpack[ExporterArguments]) -> None:
        self._shipping = shipping_of("logs", stream, arguments)

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Take log records to send them; FAILURE if some were refused."""
        records = [record for record in batch if not is_ours(record.log_record.trace_id)]
        is_taken = self._shipping.export(records, timeout=self._shipping.options.timeout)
        return LogRecordExportResult.SUCCESS if is_taken else LogRecordExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Say whether every log record exported since the last flush arrived, within `timeout_millis`."""
        return self._shipping.force_flush(timeout_millis / 1_000)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Deliver what is there, for the lesser of `timeout_millis` and `shutdown_timeout_millis`."""
        self._shipping.shutdown(timeout_millis / 1_000)

    def counts(self) -> ExportCounts:
        """Return where every log record is."""
        return self._shipping.counts()
