"""The handler's sender when a part of it fails, and what a flush waits for."""

import threading
import time

import pytest

from kpl_core import BlockingProducer, Config, Producer
from kpl_core.testing import FakeTransport
from kpl_integrations.logging_handler import KinesisHandler
from tests.logging_handler.log_stream import log_records
from tests.programs.running_program import wait_until


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
        wait_until(lambda: noticed[-1:] == [number + 1], lambda: "a notice after the delivery", seconds=5.0)  # noqa: B023
    started_at = time.monotonic()
    handler.close()
    assert time.monotonic() - started_at < 5.0
    assert handler.counts().dropped == {"FormatError": 1}
    assert len(log_records(kinesis)) == 3


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
        wait_until(lambda: handler.counts().buffered >= 2_000, lambda: "a full queue")
        started_at = time.monotonic()
        handler.flush()
        assert time.monotonic() - started_at < 10.0
    finally:
        is_flushed.set()
        thread.join()
