"""A Kinesis without a network, and the three signals made by the real SDK."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.otel import KinesisLogRecordExporter, KinesisMetricExporter, KinesisSpanExporter

EXPORTERS: dict[str, Any] = {
    "traces": KinesisSpanExporter,
    "logs": KinesisLogRecordExporter,
    "metrics": KinesisMetricExporter,
}


@pytest.fixture
def kinesis() -> FakeKinesis:
    return FakeKinesis({"telemetry": 4}, enforce_limits=False)


@pytest.fixture
def make_exporter(kinesis: FakeKinesis) -> Iterator[Callable[..., Any]]:
    """Return what makes the exporter of a signal, on a Kinesis without a network; each is shut down."""
    made = []

    def make(signal: str, *, kinesis: FakeKinesis = kinesis, **options: Any) -> Any:
        exporter = EXPORTERS[signal]("telemetry", transport=lambda _config: FakeTransport(kinesis), **options)
        made.append(exporter)
        return exporter

    yield make
    for exporter in made:
        exporter.shutdown()


def emit(signal: str, exporter: Any, count: int) -> Callable[[], None]:
    """Make `count` spans, log records or metrics through the SDK's own processors; return what shuts it down."""
    if signal == "traces":
        traces = TracerProvider(shutdown_on_exit=False)
        traces.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=10 * count + 512))
        tracer = traces.get_tracer("tests")
        for number in range(count):
            with tracer.start_as_current_span("parent", attributes={"number": number}), tracer.start_span("child"):
                pass
        return traces.shutdown
    if signal == "logs":
        logs = LoggerProvider(shutdown_on_exit=False)
        logs.add_log_record_processor(BatchLogRecordProcessor(exporter, max_queue_size=10 * count + 512))
        logger = logs.get_logger("tests")
        for number in range(count):
            logger.emit(body=f"line {number}", attributes={"number": number})
        return logs.shutdown
    reader = PeriodicExportingMetricReader(exporter)
    metrics = MeterProvider([reader], shutdown_on_exit=False)
    meter = metrics.get_meter("tests")
    for number in range(count):
        meter.create_counter(f"counter_{number}").add(number)
    return metrics.shutdown
