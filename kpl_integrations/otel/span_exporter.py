"""Spans to a Kinesis stream, the spans of one trace to one shard.

OTEL_TRACES_EXPORTER=kinesis KPL_OTEL_STREAM=telemetry opentelemetry-instrument uvicorn app:app
"""

from collections.abc import Sequence

from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kpl_core import Config
from kpl_integrations.otel.counts import ExportCounts
from kpl_integrations.otel.options import KeyChoice, resolve_options
from kpl_integrations.otel.self_metrics import observe
from kpl_integrations.otel.shipping import MakeTransport, Shipping

__all__ = ["KinesisSpanExporter"]


class KinesisSpanExporter(SpanExporter):
    """Exports spans; give it to a `BatchSpanProcessor`. What is not given comes from the environment (`otel.options`).

    `partition_key` is "trace_id", "random", "resource" or a function of the span. `config` is the producer's
    options in full, in place of region, endpoint_url and the bounds of its buffer.

    Raises:
        ConfigError: an option is missing or out of its bounds.
    """

    def __init__(  # noqa: PLR0913 - options, all by keyword but the first
        self,
        stream: str | None = None,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        encoding: str | None = None,
        partition_key: KeyChoice | None = None,
        timeout_millis: float | None = None,
        shutdown_timeout_millis: float | None = None,
        max_buffer_bytes: int | None = None,
        config: Config | None = None,
        meter_provider: MeterProvider | None = None,
        transport: MakeTransport | None = None,
    ) -> None:
        options = resolve_options("traces", locals())
        self._shipping = Shipping("traces", options, transport)
        observe("traces", self._shipping.counts, meter_provider)

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
