"""Endpoints that do not answer: what is reported and counted, and how long it takes."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from kpl_core import Config, ConfigError, Producer, SpoolOptions
from kpl_core.background import process_end
from kpl_core.background.stderr_report import StderrReport
from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.otel import KinesisSpanExporter, kinesis_telemetry
from kpl_integrations.otel.sender import Shipment, TelemetrySender
from tests.otel.conftest import EXPORTERS, emit
from tests.otel.test_splitting import large_spans
from tests.support.durability_scene import set_writable
from tests.support.processes import black_hole, refusing
from tests.support.telemetry import impatient_exporter
from tests.support.waiting import wait_until

# A busy machine may hold up one measurement, hardly three.
TRIES = 3


def seconds(call):
    started = time.monotonic()
    value = call()
    return time.monotonic() - started, value


@pytest.mark.parametrize("signal", EXPORTERS)
@pytest.mark.parametrize("endpoint", [black_hole, refusing])
def test_with_a_dead_endpoint_a_flush_returns_false_in_time_and_a_shutdown_counts_the_loss(endpoint, signal):
    with endpoint() as url:
        exporter = EXPORTERS[signal]("telemetry", region="us-east-1", endpoint_url=url, shutdown_timeout_millis=500)
        emit(signal, exporter, 50)()
        counts = exporter.counts()
    # The SDK's own shutdown, which is all that `emit` did, ended what was begun.
    assert counts.exported == counts.lost_total > 0
    assert set(counts.lost) <= {"Unknown", "Shutdown"}


@pytest.mark.parametrize("endpoint", [black_hole, refusing])
def test_a_flush_of_half_a_second_takes_half_a_second_with_every_dead_endpoint(endpoint):
    with endpoint() as url:
        exporter = KinesisSpanExporter("telemetry", region="us-east-1", endpoint_url=url, shutdown_timeout_millis=300)
        exporter.export(large_spans(5, 10))
        tries = [seconds(lambda: exporter.force_flush(500)) for _ in range(TRIES)]
        assert [arrived for _, arrived in tries] == [False] * TRIES
        assert min(took for took, _ in tries) <= 0.6
        assert exporter.counts().pending == 5
        took, _ = seconds(lambda: exporter.shutdown(timeout_millis=30_000))
        assert took < 1.5
        counts = exporter.counts()
    assert (counts.exported, counts.delivered, counts.pending, counts.lost_total) == (5, 0, 0, 5)


def test_a_first_export_after_the_end_of_the_main_thread_is_delivered_where_no_thread_can_be_started(
    kinesis: FakeKinesis, monkeypatch: pytest.MonkeyPatch
):
    def refuse(thread: threading.Thread) -> None:
        message = "can't create new thread at interpreter shutdown"
        raise RuntimeError(message)

    monkeypatch.setattr(process_end, "NEEDS_SPARE_THREADS", True)
    exporter = KinesisSpanExporter("telemetry", transport=lambda _config: FakeTransport(kinesis))
    spans = large_spans(5, 10)
    with monkeypatch.context() as late:
        late.setattr(threading.Thread, "start", refuse)
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        assert exporter.force_flush(5_000) is True
    exporter.shutdown()
    assert (exporter.counts().delivered, exporter.counts().lost_total) == (5, 0)


def test_the_exporter_reports_a_loss_that_the_sdk_reports_as_success(kinesis: FakeKinesis):
    exporter = KinesisSpanExporter("no-such-stream", transport=lambda _config: FakeTransport(kinesis))
    spans = TracerProvider(shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter)
    spans.add_span_processor(processor)
    for _ in range(100):
        spans.get_tracer("tests").start_span("span").end()
    assert processor.force_flush() is True
    assert exporter.force_flush(5_000) is False
    assert exporter.counts().lost == {"ResourceNotFoundException": 100}
    # The loss is reported once.
    assert exporter.force_flush(5_000) is True
    spans.shutdown()


def test_a_full_buffer_makes_one_export_wait_and_the_next_fail_at_once():
    with black_hole() as url:
        exporter = impatient_exporter(url, max_buffer_bytes=20_000)
        spans = large_spans(1, 15_000)
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        waited, refused = seconds(lambda: exporter.export(spans))
        at_once = min(seconds(lambda: exporter.export(spans))[0] for _ in range(TRIES))
        assert refused is SpanExportResult.FAILURE
        assert at_once < 0.2 <= waited
        assert exporter.counts().lost == {"Full": 1 + TRIES}
        exporter.shutdown()
    assert exporter.counts().exported == 2 + TRIES


def test_an_export_that_waits_for_room_is_taken_when_room_comes(kinesis: FakeKinesis):
    exporter = KinesisSpanExporter(
        "telemetry", transport=lambda _config: FakeTransport(kinesis, latency_seconds=0.02), max_buffer_bytes=20_000
    )
    for _ in range(10):
        assert exporter.export(large_spans(1, 15_000)) is SpanExportResult.SUCCESS
    assert exporter.force_flush(10_000)
    exporter.shutdown()
    assert exporter.counts().delivered == 10


def test_exports_above_the_producers_own_bound_do_not_wait_for_its_deadline(kinesis: FakeKinesis):
    config = Config(max_outstanding_records=1, record_max_buffered_time_ms=60_000)
    exporter = KinesisSpanExporter("telemetry", transport=lambda _config: FakeTransport(kinesis), config=config)
    for _ in range(5):
        exporter.export(large_spans(1, 10))
    wait_until(lambda: exporter.counts().delivered >= 4, lambda: f"4 delivered of {exporter.counts()}")
    exporter.shutdown()


def test_what_came_before_the_producer_was_open_is_put_in_steps(kinesis: FakeKinesis):
    """All of it was put in one step of the loop, in which no request left and no timer ran."""
    steps = []

    class Watched(TelemetrySender):
        def drain(self, producer: Producer) -> None:
            before = producer.report().accepted
            super().drain(producer)
            steps.append(producer.report().accepted - before)

    sender = Watched(
        "telemetry",
        max_bytes=1_000_000,
        make_producer=lambda: Producer(transport=FakeTransport(kinesis)),
        report=StderrReport("telemetry", "spans"),
    )
    for number in range(1_000):
        assert sender.offer(Shipment(str(number), b"span", 1), deadline=0.0)
    sender.start(None)
    assert sender.flush(10.0)
    sender.close(10.0)
    assert (max(steps), sum(steps)) == (250, 1_000)


@pytest.mark.parametrize("signal", EXPORTERS)
def test_a_flush_of_all_signals_reports_a_loss_of_each_signal_once(kinesis: FakeKinesis, signal):
    telemetry = kinesis_telemetry("no-such-stream", transport=lambda _config: FakeTransport(kinesis))
    assert telemetry.force_flush(30_000) is True
    if signal == "traces":
        telemetry.tracer_provider.get_tracer("tests").start_span("span").end()
    elif signal == "logs":
        telemetry.logger_provider.get_logger("tests").emit(body="line")
    else:
        telemetry.meter_provider.get_meter("tests").create_counter("counter").add(1)
    assert telemetry.force_flush(30_000) is False
    assert telemetry.counts()[signal].lost == {"ResourceNotFoundException": 1}
    telemetry.shutdown()


@pytest.mark.long
def test_a_flush_of_all_signals_takes_half_a_second_although_an_export_waits_for_room():
    with black_hole() as url:
        telemetry = kinesis_telemetry(
            "telemetry",
            config=Config(
                region="us-east-1", endpoint_url=url, aws_access_key_id="local", aws_secret_access_key="local"
            ),
            max_buffer_bytes=20_000,
            timeout_millis=3_000,
            shutdown_timeout_millis=200,
        )
        tracer = telemetry.tracer_provider.get_tracer("tests")
        for _ in range(1_200):
            tracer.start_span("span", attributes={"text": "x" * 200}).end()
        tries = [seconds(lambda: telemetry.force_flush(500)) for _ in range(TRIES)]
        assert [arrived for _, arrived in tries] == [False] * TRIES
        assert min(took for took, _ in tries) <= 0.6
        telemetry.shutdown()


def test_a_logging_filter_that_raises_keeps_no_item_pending_when_the_sender_cannot_start(monkeypatch):
    def fail_in_the_sender(_record):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError
        return True

    monkeypatch.setattr(logging.getLogger("kpl_integrations.otel"), "filters", [fail_in_the_sender])
    exporter = KinesisSpanExporter("telemetry", transport=_cannot_open)
    exporter.export(large_spans(5, 10))
    wait_until(lambda: not exporter.counts().pending, "nothing pending", seconds=5.0)
    assert exporter.counts().lost == {"SenderFailed": 5}
    exporter.shutdown()


def _cannot_open(_config: Config) -> FakeTransport:
    message = "no credentials"
    raise ConfigError(message)


def test_a_close_that_fails_ends_the_thread_at_once(kinesis: FakeKinesis, monkeypatch):
    async def fail(_producer, _timeout=None, **_):
        raise RuntimeError

    exporter = KinesisSpanExporter("telemetry", transport=lambda _config: FakeTransport(kinesis))
    exporter.export(large_spans(5, 10))
    assert exporter.force_flush(10_000)
    monkeypatch.setattr(Producer, "close", fail)
    took, _ = seconds(lambda: exporter.shutdown(timeout_millis=20_000))
    assert took < 5.0
    assert exporter.counts().delivered == 5


def test_items_that_a_spool_refuses_are_lost_by_name_until_it_stores_again(
    kinesis: FakeKinesis, tmp_path: Path, caplog
):
    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", failure="refuse", commit_interval_ms=1.0)
    exporter = KinesisSpanExporter(
        "telemetry", config=Config(spool=spool), transport=lambda _config: FakeTransport(kinesis)
    )
    exporter.export(large_spans(1, 10))
    assert exporter.force_flush(5_000) is True
    sender: Any = exporter.signal_exporter._sender  # noqa: SLF001 - to make its file read-only
    producer = sender._background.producer  # noqa: SLF001 - as above
    set_writable(producer.spool, writable=False).result()
    for _ in range(3):
        exporter.export(large_spans(5, 10))
        assert exporter.force_flush(5_000) is False
    set_writable(producer.spool, writable=True).result()
    wait_until(lambda: not producer.unready(), "a spool that stores")
    exporter.export(large_spans(2, 10))
    assert exporter.force_flush(5_000) is True
    exporter.shutdown()
    assert (exporter.counts().delivered, exporter.counts().lost) == (3, {"NotSpooled": 15})
    assert [record for record in caplog.records if record.name == "asyncio"] == []
