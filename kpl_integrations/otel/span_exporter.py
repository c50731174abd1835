"""Spans to a Kinesis stream, the spans of one trace to one shard.

OTEL_TRACES_EXPORTER=kinesis KPL_OTEL_STREAM=telemetry opentelemetry-instrument uvicorn app:app
"""

from collections.abc import Sequence
from typing import Unpack

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kpl_integrations.otel.counts import ExportCounts
from kpl_integrations.otel.options import ExporterArguments
from kpl_integrations.otel.shipping import shipping_of

__all__ = ["KinesisSpanExporter"]


class KinesisSpanExporter(SpanExporter):
    """Exports spans; give it to a `BatchSpanProcessor`. What is not given comes from the environment (`otel.options`).

    The keywords are `options.ExporterArguments`; `partition_key` is "trace_id", "random", "resource" or a function of
    the span.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """

    def __init__(self, stream: str | None = None, **arguments: Unpack[ExporterArguments]) -> None:
        self._shipping = shipping_of("traces", stream, arguments)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take spans to send them; FAILURE if some were refused. What becomes of the others, `counts` knows."""
        is_taken = self._shipping.export(spans, timeout=self._shipping.options.timeout)
        return SpanExportResult.SUCCESS if is_taken else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Say whether every span exported since the last flush arrived, within `timeout_millis`."""
        return self._shipping.force_flush(timeout_millis / 1_000)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Deliver what is there, for the lesser of `timeout_millis` and `shutdown_timeout_millis`."""
        self._shipping.shutdown(timeout_millis / 1_000)

    def counts(self) -> ExportCounts:
        """Return where every span is."""
        return self._shipping.counts()
