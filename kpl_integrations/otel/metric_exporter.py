"""OpenTelemetry's metrics to a Kinesis stream.

OTEL_METRICS_EXPORTER=kinesis KPL_OTEL_STREAM=telemetry opentelemetry-instrument uvicorn app:app
"""

from collections.abc import Mapping
from typing import Unpack

from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.metrics.view import Aggregation

from kpl_integrations.otel.counts import ExportCounts
from kpl_integrations.otel.metric_leaf import leaves_of
from kpl_integrations.otel.options import ExporterArguments
from kpl_integrations.otel.shipping import shipping_of

__all__ = ["KinesisMetricExporter"]


class KinesisMetricExporter(MetricExporter):
    """Exports metrics; give it to a `PeriodicExportingMetricReader`. What is not given comes from the environment.

    `partition_key` is "random", "resource" or a function of a `MetricLeaf`, a metric with its resource and scope;
    `preferred_temporality` and `preferred_aggregation` are the SDK's; else as `KinesisSpanExporter`.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """

    def __init__(
        self,
        stream: str | None = None,
        *,
        preferred_temporality: Mapping[type, AggregationTemporality] | None = None,
        preferred_aggregation: Mapping[type, Aggregation] | None = None,
        **arguments: Unpack[ExporterArguments],
    ) -> None:
        super().__init__(
            preferred_temporality=dict(preferred_temporality or {}) or None,
            preferred_aggregation=dict(preferred_aggregation or {}) or None,
        )
        self._shipping = shipping_of("metrics", stream, arguments)

    def export(
        self,
        metrics_data: MetricsData,
        timeout_millis: float = 10_000,
        **_unknown: object,
    ) -> MetricExportResult:
        """Take metrics to send them; FAILURE if some data points were refused."""
        timeout = min(timeout_millis / 1_000, self._shipping.options.timeout)
        is_taken = self._shipping.export(leaves_of(metrics_data), timeout=timeout)
        return MetricExportResult.SUCCESS if is_taken else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Say whether every data point exported since the last flush arrived, within `timeout_millis`."""
        return self._shipping.force_flush(timeout_millis / 1_000)

    def shutdown(self, timeout_millis: float = 30_000, *, timeout: float | None = None, **_unknown: object) -> None:
        """Deliver what is there, for the lesser of `timeout_millis` and `shutdown_timeout_millis`.

        The SDK's periodic reader calls its own remaining milliseconds `timeout`.
        """
        self._shipping.shutdown((timeout_millis if timeout is None else timeout) / 1_000)

    def counts(self) -> ExportCounts:
        """Return where every data point is."""
        return self._shipping.counts()
