"""The handler's sender when a part of it fails, and what a flush waits for."""

import logging
import threading
import time
from typing import Any

import pytest

from kpl_core import BlockingProducer, Config, Delivery, Producer
from kpl_core.testing import FakeTransport
from kpl_integrations.logging_handler import JsonFormatter, KinesisHandler
from kpl_integrations.logging_handler.formatter import LargeLine
from kpl_integrations.logging_handler.sender import LogSender
from tests.support.consumers import log_records
from tests.support.waiting import wait_until


def fail(*_arguments, **_options):
    raise RuntimeError


async def fail_async(*_arguments, **_options):
    raise RuntimeError


@pytest.mark.parametrize("notice", [fail, lambda *_: b"x" * 20_000_000], ids=["raises", "is too large"])
def test_a_notice_that_cannot_be_put_stops_neither_the_sender_nor_a_close(make, kinesis, logger, monkeypatch, notice):
    noticed: list[int] = []

    def make_notice(_handler, _dropped):
        noticed.append(handler.counts().delivered)
        return notice()

    monkeypatch.setattr(KinesisHandler, "_make_notice", make_notice)
    handler = make(notice_seconds=0.05, close_timeout=20.0)
    logger.addHandler(handler)
    logger.info("%d", "no number")
    for number in range(3):
        logger.info("record %d", number)
        wait_until(lambda: noticed[-1:] == [number + 1], "a notice after the delivery", seconds=5.0)  # noqa: B023
    started_at = time.monotonic()
    handler.close()
    assert time.monotonic() - started_at < 5.0
    assert handler.counts().dropped == {"FormatError": 1}
    assert len(log_records(kinesis)) == 3


def test_an_empty_queue_is_looked_at_every_20_ms_before_the_sender_is_idle(make, logger, monkeypatch):
    """Not without a pause: that would take a whole processor from the application."""
    looked_at: list[float] = []
    drain = LogSender.drain

    def noted(sender: LogSender, producer: Producer) -> int:
        looked_at.append(time.monotonic())
        return drain(sender, producer)

    monkeypatch.setattr(LogSender, "drain", noted)
    handler = make()
    logger.addHandler(handler)
    logger.info("first")
    wait_until(lambda: handler._sender.is_idle, "an idle sender", seconds=20.0)  # noqa: SLF001
    looked_at.clear()
    logger.info("second")
    wait_until(lambda: looked_at and handler._sender.is_idle, "an idle sender again", seconds=20.0)  # noqa: SLF001
    assert looked_at[-1] - looked_at[0] >= 5 * 0.02


class Unencodable(JsonFormatter):
    """Its large lines raise in the sender's thread."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def line(self, record: logging.LogRecord) -> bytes | LargeLine:
        line = super().line(record)
        if isinstance(line, LargeLine):
            line.encode = self.fail  # type: ignore[method-assign]
        return line

    def fail(self) -> bytes:
        message = f"no JSON for {'A' * 40}"
        raise self.error(message)


def test_a_line_whose_formatter_raises_in_the_sender_is_counted_reported_and_harms_no_other(
    make, kinesis, logger, capsys
):
    handler = make()
    handler.setFormatter(Unencodable(ValueError))
    logger.addHandler(handler)
    with handler._lock:  # noqa: SLF001 - the sender takes all lines together
        for number in range(20):
            logger.info("x" * 100_000 if number in {5, 15} else "line %d", *[] if number in {5, 15} else [number])
    handler.close()
    counts = handler.counts()
    assert (counts.emitted, counts.delivered, counts.dropped) == (20, 18, {"FormatError": 2})
    assert len([each for each in log_records(kinesis) if each["message"].startswith("line")]) == 18
    said = capsys.readouterr().err
    assert said.count("a log record is lost (FormatError): ValueError: no JSON for ***; reported once a minute") == 1
    assert "2 of 20 log records were lost (2 FormatError)" in said


def test_a_formatter_that_ends_the_senders_thread_leaves_no_line_uncounted(make, logger, capsys):
    handler = make()
    handler.setFormatter(Unencodable(SystemExit))
    logger.addHandler(handler)
    with handler._lock:  # noqa: SLF001 - as above
        for number in range(20):
            logger.info("x" * 100_000 if number == 5 else "line %d", *[] if number == 5 else [number])
    assert handler._sender is not None  # noqa: SLF001
    assert handler._sender.join(30)  # noqa: SLF001
    counts = handler.counts()
    assert (counts.emitted, counts.buffered) == (20, 0)
    assert counts.delivered + counts.dropped_total == 20
    assert counts.dropped["FormatError"] == 1
    assert "nothing can be sent: SystemExit: no JSON for ***" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["random", "logger"])
def test_a_line_whose_put_fails_is_counted_reported_and_stops_no_other(make, kinesis, logger, capsys, monkeypatch, key):
    put_nowait = Producer.put_nowait

    def put(producer: Producer, stream: str, **record: Any) -> Delivery:
        if b"line 5" in record["data"]:
            fail()
        return put_nowait(producer, stream, **record)

    monkeypatch.setattr(Producer, "put_nowait", put)
    handler = make(partition_key=key)
    logger.addHandler(handler)
    with handler._lock:  # noqa: SLF001 - as above
        for number in range(10):
            logger.info("line %d", number)
    handler.close()
    counts = handler.counts()
    assert (counts.emitted, counts.delivered, counts.dropped) == (10, 9, {"SenderFailed": 1})
    assert "a log record is lost (SenderFailed): RuntimeError" in capsys.readouterr().err


def test_a_close_that_fails_ends_the_thread_at_once(make, logger, monkeypatch):
    handler = make(close_timeout=20.0)
    logger.addHandler(handler)
    logger.info("delivered")
    handler.flush()
    monkeypatch.setattr(Producer, "flush", fail_async)
    started_at = time.monotonic()
    handler.close()
    assert time.monotonic() - started_at < 5.0
    assert "kpl-log-sender" not in {thread.name for thread in threading.enumerate()}


def test_a_report_of_losses_that_raises_stalls_no_close(make, kinesis, logger, monkeypatch):
    report = KinesisHandler._report_loss  # noqa: SLF001

    def fail_in_the_sender(handler):
        if threading.current_thread() is not threading.main_thread():
            fail()
        report(handler)

    monkeypatch.setattr(KinesisHandler, "_report_loss", fail_in_the_sender)
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        handler = make(producer=producer, transport=None, close_timeout=20.0)
        logger.addHandler(handler)
        logger.info("delivered")
        handler.flush()
        started_at = time.monotonic()
        handler.close()
        assert time.monotonic() - started_at < 5.0


def test_a_flush_ends_while_another_thread_logs_more_than_the_producer_takes(make, kinesis, logger):
    """It waits for what was queued before, not until nothing is queued."""
    handler = make(
        transport=lambda _config: FakeTransport(kinesis, latency_seconds=0.02),
        max_sending_bytes=200_000,
        max_queue_records=2_000,
        close_timeout=20.0,
    )
    logger.addHandler(handler)
    is_flushed = threading.Event()

    def log_on() -> None:
        while not is_flushed.is_set():
            logger.info("%s", "x" * 500)

    thread = threading.Thread(target=log_on)
    thread.start()
    try:
        wait_until(lambda: handler.counts().buffered >= 2_000, "a full queue")
        started_at = time.monotonic()
        handler.flush()
        assert time.monotonic() - started_at < 10.0
    finally:
        is_flushed.set()
        thread.join()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("wait", [KinesisHandler.flush, KinesisHandler.close])
def test_a_signal_handler_may_wait_in_the_middle_of_a_log_call(make, kinesis, logger, wait, shared):
    """The call has the lock of the queue, which the sender needs."""
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        handler = make(producer=producer, transport=None) if shared else make()
        logger.addHandler(handler)
        logger.info("before")
        with handler._lock:  # noqa: SLF001 - where `emit` may be interrupted
            started_at = time.monotonic()
            wait(handler)
            assert time.monotonic() - started_at < 4.0
        assert handler.counts().delivered == 1
