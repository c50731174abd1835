"""Providers with Kinesis exporters, for an application that configures OpenTelemetry itself.

    telemetry = kinesis_telemetry("telemetry", service_name="orders", region="us-east-1")
    app = FastAPI(telemetry=telemetry.for_fastapi())

FastAPI's own telemetry (0.142 and later) configures OTLP exporters only, refuses OTEL_*_EXPORTER=kinesis, and never
shuts down providers that it is given. So its own configuration is turned off, and this package flushes at the end.
"""

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Unpack

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kpl_core import ConfigError
from kpl_core.background.process_end import ProcessListener, listen
from kpl_integrations.otel.exporters import (
    KinesisLogRecordExporter,
    KinesisMetricExporter,
    KinesisSpanExporter,
)
from kpl_integrations.otel.flushing import begin_in_thread, begin_provider_flush, confirm_flushes
from kpl_integrations.otel.options import ExporterArguments, Signal, own_files
from kpl_integrations.otel.sender import ExportCounts

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig


class KinesisTelemetry(ProcessListener):
    """A provider for each signal. They shut down when the interpreter exits.

    They are flushed when a `KinesisLifespan` ends, when uvicorn shuts down, and with `flush_on_sigterm` before SIGTERM
    ends the process.
    """

    def __init__(self, resource: Resource, stream: str | None, arguments: ExporterArguments) -> None:
        self._exporters: dict[Signal, KinesisSpanExporter | KinesisLogRecordExporter | KinesisMetricExporter] = {}
        spans = self._exporters["traces"] = KinesisSpanExporter(stream, **_of_signal("traces", arguments))
        logs = self._exporters["logs"] = KinesisLogRecordExporter(stream, **_of_signal("logs", arguments))
        metrics = KinesisMetricExporter(stream, **_of_signal("metrics", arguments))
        self._exporters["metrics"] = metrics
        self._last_flush = max(each.signal_exporter.options.shutdown_timeout for each in self._exporters.values())
        self.tracer_provider = TracerProvider(resource=resource)
        self.tracer_provider.add_span_processor(BatchSpanProcessor(spans))
        self.logger_provider = LoggerProvider(resource=resource)
        self.logger_provider.add_log_record_processor(BatchLogRecordProcessor(logs))
        self.meter_provider = MeterProvider([PeriodicExportingMetricReader(metrics)], resource=resource)
        self._providers: dict[Signal, TracerProvider | LoggerProvider | MeterProvider]
        self._providers = {"traces": self.tracer_provider, "logs": self.logger_provider, "metrics": self.meter_provider}
        for signal, provider in self._providers.items():
            confirm_flushes(provider, signal, partial(list, [self._exporters[signal].signal_exporter]))
        self.flushes_at_sigterm = arguments.get("flush_on_sigterm") is not False
        _open.add(self)
        listen(self)

    def for_fastapi(self) -> "TelemetryConfig":
        """Return the argument of `FastAPI(telemetry=...)`; other settings of FastAPI can be added to it.

        Raises:
            ConfigError: the installed FastAPI is older than 0.142 and has no telemetry.
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
        """Export what the SDK holds; return True if all since the last flush arrived, within `timeout_millis`."""
        deadline = time.monotonic() + timeout_millis / 1_000
        waits = [begin_provider_flush(signal, provider, deadline) for signal, provider in self._providers.items()]
        is_arrived = [wait() for wait in waits]
        return all(is_arrived)

    def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object]:
        """Start to flush all signals, within `seconds`, or `share` of their longest shutdown timeout."""
        return begin_in_thread(
            lambda deadline: self.force_flush((deadline - time.monotonic()) * 1_000),
            self._last_flush * share if seconds is None else seconds,
        )

    def shutdown(self) -> None:
        """Deliver what is there, each signal within its shutdown timeout. Before that, an export may wait for room."""
        _open.discard(self)
        for provider in self._providers.values():
            provider.shutdown()

    def counts(self) -> dict[Signal, ExportCounts]:
        """Return where everything is, by signal."""
        return {signal: exporter.counts() for signal, exporter in self._exporters.items()}


def _of_signal(signal: Signal, arguments: ExporterArguments) -> ExporterArguments:
    config = arguments.get("config")
    return arguments if config is None else {**arguments, "config": own_files(config, signal)}


# The SDK keeps the providers until the process exits, so an application may keep only a tracer of them.
_open: Final[set[KinesisTelemetry]] = set()


def kinesis_telemetry(
    stream: str | None = None,
    *,
    service_name: str | None = None,
    resource: Resource | None = None,
    **arguments: Unpack[ExporterArguments],
) -> KinesisTelemetry:
    """Return providers for all three signals. `arguments` are those of the exporters; the environment gives the others.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """
    described = Resource.create({} if service_name is None else {"service.name": service_name})
    return KinesisTelemetry(described.merge(resource or Resource.get_empty()), stream, arguments)
