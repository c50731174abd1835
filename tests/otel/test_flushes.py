"""A flush or a synchronous export returns after Kinesis has answered, and says what became of the data."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.otel import KinesisLogRecordExporter, KinesisSpanExporter, kinesis_telemetry
from tests.otel.test_splitting import large_spans
from tests.support.processes import black_hole
from tests.support.telemetry import exported, impatient_exporter

SLOW = 0.2
# Does not end within a test.
SELDOM = 3_600_000
to_either_stream = pytest.mark.parametrize(("stream", "arrives"), [("telemetry", True), ("no-such-stream", False)])


@pytest.fixture
def set_globally(monkeypatch) -> Callable[[Any], None]:
    """Return what makes a provider the global one for a test, as a configuration by environment does."""

    def set_provider(provider: Any) -> None:
        if isinstance(provider, TracerProvider):
            monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        else:
            monkeypatch.setattr("opentelemetry._logs._internal._LOGGER_PROVIDER", provider)

    return set_provider


def slowly(kinesis: FakeKinesis) -> Callable[[object], FakeTransport]:
    return lambda _config: FakeTransport(kinesis, latency_seconds=SLOW)


def make_spans(provider: TracerProvider, count: int) -> None:
    for number in range(count):
        provider.get_tracer("tests").start_span(f"span {number}").end()


@to_either_stream
def test_a_flush_of_the_global_tracer_provider_tells_whether_kinesis_has_the_spans(
    kinesis, set_globally, stream, arrives
):
    provider = TracerProvider(shutdown_on_exit=False)
    set_globally(provider)
    exporter = KinesisSpanExporter(stream, transport=slowly(kinesis))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SELDOM))
    make_spans(provider, 20)
    assert provider.force_flush() is arrives
    assert exporter.counts().delivered == (20 if arrives else 0)
    provider.shutdown()


@to_either_stream
def test_a_flush_of_the_global_logger_provider_tells_whether_kinesis_has_the_records(
    kinesis, set_globally, stream, arrives
):
    provider = LoggerProvider(shutdown_on_exit=False)
    set_globally(provider)
    exporter = KinesisLogRecordExporter(stream, transport=slowly(kinesis))
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter, schedule_delay_millis=SELDOM))
    provider.get_logger("tests").emit(body="line")
    assert provider.force_flush() is arrives
    assert exporter.counts().pending == 0
    provider.shutdown()


def test_a_flush_of_the_providers_of_kinesis_telemetry_tells_whether_kinesis_has_the_data(kinesis):
    for stream, arrives in (("telemetry", True), ("no-such-stream", False)):
        telemetry = kinesis_telemetry(stream, transport=slowly(kinesis))
        make_spans(telemetry.tracer_provider, 5)
        telemetry.logger_provider.get_logger("tests").emit(body="line")
        telemetry.meter_provider.get_meter("tests").create_counter("counter").add(1)
        for provider in (telemetry.tracer_provider, telemetry.logger_provider, telemetry.meter_provider):
            assert provider.force_flush() is arrives
        telemetry.shutdown()


def test_a_flush_of_another_provider_waits_for_kinesis_too(kinesis):
    """The SDK's own result is True even if spans were lost, so the exporter waits inside the flush."""
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = KinesisSpanExporter("telemetry", transport=slowly(kinesis))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SELDOM))
    make_spans(provider, 20)
    provider.force_flush()
    assert len(list(exported(kinesis, "telemetry", "traces"))) == 20
    provider.shutdown()


def test_a_flush_of_a_provider_takes_no_longer_than_its_timeout(set_globally):
    with black_hole() as url:
        provider = TracerProvider(shutdown_on_exit=False)
        set_globally(provider)
        exporter = KinesisSpanExporter("telemetry", region="us-east-1", endpoint_url=url, shutdown_timeout_millis=100)
        processor = BatchSpanProcessor(exporter, schedule_delay_millis=SELDOM)
        provider.add_span_processor(processor)
        for flush in (provider.force_flush, processor.force_flush):
            make_spans(provider, 5)
            began = time.monotonic()
            is_flushed = flush(300)
            assert time.monotonic() - began < 1.0
            assert is_flushed is (flush == processor.force_flush)
        provider.shutdown()


def test_exporters_can_be_made_while_a_flush_of_the_global_provider_begins(kinesis, set_globally):
    provider = TracerProvider(shutdown_on_exit=False)
    set_globally(provider)
    made = [KinesisSpanExporter("telemetry", transport=slowly(kinesis)) for _ in range(100)]
    switch_seconds = sys.getswitchinterval()
    with ThreadPoolExecutor(1) as threads:
        sys.setswitchinterval(1e-6)
        try:
            making = threads.submit(
                lambda: [KinesisSpanExporter("telemetry", transport=slowly(kinesis)) for _ in range(1_000)]
            )
            while not making.done():
                assert provider.force_flush() is True
        finally:
            sys.setswitchinterval(switch_seconds)
    assert len(made + making.result()) == 1_100


@pytest.mark.parametrize(
    ("stream", "result"), [("telemetry", SpanExportResult.SUCCESS), ("no-such-stream", SpanExportResult.FAILURE)]
)
def test_a_synchronous_export_returns_the_result(kinesis, stream, result):
    exporter = KinesisSpanExporter(stream, transport=slowly(kinesis), synchronous=True)
    for count in (1, 2):
        assert exporter.export(large_spans(5, 10)) is result
        assert exporter.counts().exported == 5 * count
        assert exporter.counts().pending == 0
    exporter.shutdown()


def test_a_synchronous_export_fails_after_its_timeout():
    with black_hole() as url:
        exporter = impatient_exporter(url, synchronous=True)
        began = time.monotonic()
        assert exporter.export(large_spans(5, 10)) is SpanExportResult.FAILURE
        assert time.monotonic() - began < 1.0
        exporter.shutdown()
