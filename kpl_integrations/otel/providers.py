"""Providers whose exporters are ours, for an application that configures OpenTelemetry itself.

    telemetry = kinesis_telemetry("telemetry", service_name="orders", region="us-east-1")
    app = FastAPI(telemetry=telemetry.for_fastapi())

FastAPI's own telemetry (from 0.142 on) configures OTLP exporters only, refuses OTEL_*_EXPORTER=kinesis, and never
shuts down providers it is given: so it is told not to configure, and the end of the process is ours.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kpl_core import ConfigError
from kpl_integrations.last_flush import take_part
from kpl_integrations.otel.counts import ExportCounts
from kpl_integrations.otel.global_flush import hand_over, in_background
from kpl_integrations.otel.log_record_exporter import KinesisLogRecordExporter
from kpl_integrations.otel.metric_exporter import KinesisMetricExporter
from kpl_integrations.otel.options import ExporterArguments, Signal, resolve_options
from kpl_integrations.otel.span_exporter import KinesisSpanExporter

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

__all__ = ["KinesisTelemetry", "kinesis_telemetry"]


class KinesisTelemetry:
    """A provider for each signal. They shut themselves down when the process ends, unless a signal ends it.

    Under a server that ends so, `KinesisLifespan` flushes them; without it, call `shutdown` in your own lifespan.
    """

    def __init__(self, resource: Resource, stream: str | None, arguments: ExporterArguments) -> None:
        self._exporters: dict[Signal, KinesisSpanExporter | KinesisLogRecordExporter | KinesisMetricExporter] = {}
        spans = self._exporters["traces"] = KinesisSpanExporter(stream, **arguments)
        logs = self._exporters["logs"] = KinesisLogRecordExporter(stream, **arguments)
        metrics = KinesisMetricExporter(stream, **arguments)
        self._exporters["metrics"] = metrics
        # As long as the shutdown of an exporter.
        self._last_flush = max(
            resolve_options(signal, {"stream": stream, **arguments}).shutdown_timeout for signal in self._exporters
        )
        self.tracer_provider = TracerProvider(resource=resource)
        self.tracer_provider.add_span_processor(BatchSpanProcessor(spans))
        self.logger_provider = LoggerProvider(resource=resource)
        self.logger_provider.add_log_record_processor(BatchLogRecordProcessor(logs))
        self.meter_provider = MeterProvider([PeriodicExportingMetricReader(metrics)], resource=resource)
        # How many were lost when that was last told.
        self._told_losses = self._losses()
        take_part(self)

    def for_fastapi(self) -> "TelemetryConfig":
        """Return what `FastAPI(telemetry=...)` takes; more settings of FastAPI's can be added to it.

        Raises:
            ConfigError: the installed FastAPI has no telemetry of its own.
        """
        if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("fastapi.telemetry") is None:
            message = (
                "the installed FastAPI has no telemetry of its own; upgrade it to 0.142, or instrument the "
                "application with opentelemetry-instrumentation-fastapi and these providers"
            )
            raise ConfigError(message)
        return {
            "auto_configure": False,
            "tracer_provider": self.tracer_provider,
            "logger_provider": self.logger_provider,
            "meter_provider": self.meter_provider,
        }

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Hand over what the SDK holds, then say whether all since the last flush arrived, within `timeout_millis`."""
        deadline = time.monotonic() + timeout_millis / 1_000
        waits = [
            hand_over("traces", self.tracer_provider, deadline),
            hand_over("logs", self.logger_provider, deadline),
            hand_over("metrics", self.meter_provider, deadline),
        ]
        is_handed_over = [wait() for wait in waits]
        arrived = [
            exporter.force_flush(max(0.0, deadline - time.monotonic()) * 1_000) for exporter in self._exporters.values()
        ]
        # The SDK's reader flushes the exporter too, which tells of a loss once, and keeps the answer to itself.
        told, self._told_losses = self._told_losses, self._losses()
        return all(is_handed_over) and all(arrived) and told == self._told_losses

    def _losses(self) -> dict[Signal, int]:
        return {signal: counts.lost_total for signal, counts in self.counts().items()}

    def begin_last_flush(self) -> Callable[[], object]:
        """Begin to flush all signals (`last_flush`)."""
        return in_background(lambda deadline: self.force_flush((deadline - time.monotonic()) * 1_000), self._last_flush)

    def shutdown(self) -> None:
        """Deliver what is there, each signal within its shutdown timeout; before that an export may wait for room."""
        self.tracer_provider.shutdown()
        self.logger_provider.shutdown()
        self.meter_provider.shutdown()

    def counts(self) -> dict[Signal, ExportCounts]:
        """Return where everything is, by signal."""
        return {signal: exporter.counts() for signal, exporter in self._exporters.items()}


def kinesis_telemetry(
    stream: str | None = None,
    *,
    service_name: str | None = None,
    resource: Resource | None = None,
    **arguments: Unpack[ExporterArguments],
) -> KinesisTelemetry:
    """Return providers for all three signals; `arguments` are the exporters', what is not given the environment's.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """
    described = Resource.create({} if service_name is None else {"service.name": service_name})
    return KinesisTelemetry(described.merge(resource or Resource.get_empty()), stream, arguments)
