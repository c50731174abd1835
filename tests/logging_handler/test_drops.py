"""What a handler loses is bounded, counted by reason, and reported in the stream and on stderr."""

import errno
import io
import re
import sys
import threading
from collections import Counter

import pytest

from kpl_core import BlockingProducer, Config
from kpl_core.background.process_end import NEEDS_SPARE_THREADS
from kpl_core.testing import ErrorAnswer, FakeKinesis, Hang
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.consumers import log_records
from tests.support.waiting import wait_until


def told(kinesis: FakeKinesis) -> Counter[str]:
    """Return what all notices in the stream say together, by reason."""
    reasons: Counter[str] = Counter()
    for each in log_records(kinesis):
        if "dropped_records" in each:
            assert each["dropped_records"] == sum(each["dropped_by_reason"].values())
            reasons.update(each["dropped_by_reason"])
    return reasons


def test_arguments_that_do_not_fit_are_counted_and_never_raised(make, logger, capsys):
    handler = make()
    logger.addHandler(handler)
    logger.info("%d", "no number")
    assert handler.counts().dropped == {"FormatError": 1}
    assert "--- Logging error ---" in capsys.readouterr().err


class Endless:
    def __str__(self) -> str:
        return str(self)

    __repr__ = __str__


def test_neither_a_closed_stderr_nor_a_message_without_end_makes_emit_raise(make, logger, monkeypatch):
    handler = make()
    logger.addHandler(handler)
    logger.info(Endless())
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    logger.info("%d", "no number")
    handler.close()
    assert handler.counts().dropped == {"FormatError": 2}


@pytest.mark.parametrize("effect", [Hang(), ErrorAnswer("ServiceUnavailable", status=503)], ids=["hang", "refusal"])
def test_close_prints_the_exact_loss_once(make, kinesis, logger, capsys, effect):
    kinesis.faults.add(effect)
    handler = make(close_timeout=0.5, max_queue_records=100)
    logger.addHandler(handler)
    for number in range(5_000):
        logger.info("line %d", number)
    handler.close()
    handler.close()
    # What is said holds at the deadline; on a busy machine the thread may come to its own end a little later.
    assert handler._sender is not None  # noqa: SLF001
    assert handler._sender.join(30)  # noqa: SLF001
    counts = handler.counts()
    assert counts.emitted == 5_000
    assert counts.buffered == 0
    assert counts.dropped_total == 5_000 - counts.delivered == 5_000
    said = capsys.readouterr().err
    assert said.count("log records were lost") == 1
    assert "5,000 of 5,000 log records were lost" in said


def test_drops_are_reported_in_the_stream_by_reason(make, kinesis, logger, capsys):
    handler = make(max_queue_records=50, overflow="drop_newest")
    logger.addHandler(handler)
    with handler._lock:  # noqa: SLF001 - nothing is taken meanwhile
        for number in range(200):
            logger.info("line %d", number)
    handler.close()
    counts = handler.counts()
    assert counts.dropped == {"Full": 150}
    assert counts.delivered == 50
    notices = [each for each in log_records(kinesis) if "dropped_records" in each]
    assert [(each["dropped_records"], each["dropped_by_reason"]) for each in notices] == [(150, {"Full": 150})]
    assert notices[0]["message"] == "150 log records were dropped"


def test_block_waits_for_room_and_loses_nothing(make, kinesis, logger):
    handler = make(max_queue_records=10, overflow="block(30)")
    logger.addHandler(handler)
    for number in range(500):
        logger.info("line %d", number)
    handler.close()
    assert handler.counts().delivered == 500


def test_block_gives_up_after_its_time(make, kinesis, logger, capsys):
    kinesis.faults.add(Hang())
    handler = make(
        max_queue_records=2, overflow="block(0.01)", close_timeout=0.2, config=Config(max_outstanding_records=1)
    )
    logger.addHandler(handler)
    for number in range(20):
        logger.info("line %d", number)
    assert handler.counts().dropped["Full"] >= 1


def test_a_sender_that_cannot_start_is_printed_and_counted(make, logger, capsys, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    handler = make(transport=None)
    logger.addHandler(handler)
    logger.info("first")
    assert handler._sender is not None  # noqa: SLF001
    assert handler._sender.join(30)  # noqa: SLF001
    logger.info("second")
    assert handler.counts().dropped == {"SenderFailed": 2}
    assert "nothing can be sent: no region is configured" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["ExitSafeLoop", "threading.Thread"])
def test_emit_raises_nothing_without_free_files_or_threads_and_the_next_record_tries_again(
    make, kinesis, logger, capsys, monkeypatch, where
):
    failures = {"ExitSafeLoop": OSError(errno.EMFILE, "Too many open files"), "threading.Thread": RuntimeError("none")}

    def fails(*_arguments: object, **_options: object) -> None:
        raise failures[where]

    handler = make()
    logger.addHandler(handler)
    with monkeypatch.context() as patched:
        target = "ExitSafeLoop" if where == "ExitSafeLoop" else "threading.Thread.start"
        patched.setattr(f"kpl_core.background.sender.{target}", fails)
        logger.info("lost")
    logger.info("arrives")
    handler.close()
    lost = 0 if NEEDS_SPARE_THREADS and where == "threading.Thread" else 1
    assert handler.counts().delivered == 2 - lost
    assert handler.counts().dropped.get("SenderFailed", 0) == lost


def test_records_that_no_sender_took_are_reported_at_the_close(make, logger, capsys, monkeypatch):
    def fails(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    handler = make()
    logger.addHandler(handler)
    monkeypatch.setattr("kpl_core.background.sender.ExitSafeLoop", fails)
    logger.info("lost")
    handler.close()
    assert "1 of 1 log records were lost (1 SenderFailed)" in capsys.readouterr().err


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest", "drop_lowest_level"])
def test_drops_of_an_outage_are_reported_in_the_stream_when_it_is_over(make, kinesis, logger, capsys, overflow):
    fault = kinesis.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    config = Config(record_ttl_ms=300, retry_backoff_cap_ms=50, max_outstanding_records=200)
    handler = make(config=config, max_queue_records=100, overflow=overflow, notice_seconds=0.05, close_timeout=30)
    logger.addHandler(handler)
    for number in range(1_000):
        logger.info("line %d", number)
    wait_until(lambda: handler.counts().dropped.get("Expired", 0) > 0, "something expired")
    kinesis.faults.remove(fault)
    handler.close()
    counts = handler.counts()
    assert counts.buffered == 0
    assert counts.emitted == counts.delivered + counts.dropped_total == 1_000
    assert told(kinesis) == Counter(counts.dropped)


def test_a_notice_that_does_not_arrive_is_repeated(make, kinesis, logger, capsys):
    fault = kinesis.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    config = Config(record_ttl_ms=100, retry_backoff_cap_ms=50)
    handler = make(config=config, notice_seconds=0.02, close_timeout=30)
    logger.addHandler(handler)
    logger.info("lost")
    wait_until(lambda: handler.counts().dropped_total > 0, "the line is lost")
    requests = fault.fired
    # Notices of it have failed too, by now.
    wait_until(lambda: fault.fired > requests + 20, "further requests")
    kinesis.faults.remove(fault)
    handler.close()
    assert told(kinesis) == Counter(handler.counts().dropped)
    assert handler.counts().dropped_total == 1


@pytest.mark.long
def test_records_that_a_close_gives_up_are_reported_in_the_stream(make, kinesis, logger, capsys):
    fault = kinesis.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    config = Config(max_outstanding_records=100, retry_backoff_cap_ms=50)
    # What is left when the queue is given up, 40 % of it, must do for the rest on a busy machine too.
    handler = make(config=config, close_timeout=8)
    logger.addHandler(handler)
    for number in range(1_000):
        logger.info("line %d", number)
    closing = threading.Thread(target=handler.close)
    closing.start()
    wait_until(lambda: handler.counts().dropped_total > 0, "the queue given up")
    kinesis.faults.remove(fault)
    closing.join()
    counts = handler.counts()
    assert counts.dropped["Shutdown"] > 0
    assert counts.delivered == 1_000 - counts.dropped_total > 0
    assert told(kinesis) == Counter(counts.dropped)
    assert capsys.readouterr().err.count("log records were lost") == 1


def test_formatting_errors_are_reported_in_the_stream(make, kinesis, logger, capsys):
    handler = make()
    logger.addHandler(handler)
    logger.info("%d", "no number")
    logger.info("well")
    handler.close()
    assert told(kinesis) == {"FormatError": 1}


def test_the_report_of_a_loss_has_the_cause_of_the_last_failed_request(make, kinesis, logger, capsys):
    kinesis.faults.add(ErrorAnswer("ServiceUnavailable", message="down\nand its request", status=503))
    handler = make(close_timeout=0.3)
    logger.addHandler(handler)
    logger.info("lost")
    handler.close()
    # Unknown: a request was under way when the time was over.
    lost = r"1 log records were lost \(1 (Shutdown|Unknown)\); the last request failed: ServiceUnavailable: down\n$"
    assert re.search(lost, capsys.readouterr().err)


def test_records_logged_after_a_shared_producer_closed_are_counted_as_lost(make, kinesis, logger, capsys):
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        handler = make(producer=producer)
        logger.addHandler(handler)
        logger.info("first")
        handler.flush()
    for _ in range(3):
        logger.info("too late")
    handler.close()
    counts = handler.counts()
    assert (counts.delivered, counts.dropped, counts.buffered) == (1, {"Shutdown": 3}, 0)
    assert "3 of 4 log records were lost (3 Shutdown)" in capsys.readouterr().err


def test_records_that_a_shared_producer_still_has_when_the_handler_closes_are_counted_as_unknown(
    make, kinesis, logger, capsys
):
    """The handler gives up waiting. The application's producer goes on, and delivers them after the outage."""
    outage = kinesis.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        handler = make(producer=producer, close_timeout=0.3)
        logger.addHandler(handler)
        for number in range(3):
            logger.info("record %d", number)
        handler.close()
        counts = handler.counts()
        assert (counts.delivered, counts.dropped) == (0, {"Unknown": 3})
        assert "3 of 3 log records were lost (3 Unknown)" in capsys.readouterr().err
        kinesis.faults.remove(outage)
        assert producer.flush(20.0).buffered == 0
    assert len(log_records(kinesis)) == 3


def test_a_handler_of_a_closed_shared_producer_starts_no_sender(make, kinesis, logger, capsys):
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        pass
    handler = make(producer=producer)
    logger.addHandler(handler)
    logger.info("too late")
    handler.close()
    assert handler.counts().dropped == {"Shutdown": 1}
    assert "1 of 1 log records were lost (1 Shutdown); its BlockingProducer was not open" in capsys.readouterr().err


def test_a_handler_that_could_format_nothing_does_not_blame_its_producer(make, kinesis, logger, capsys):
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        handler = make(producer=producer)
        logger.addHandler(handler)
        logger.info("%d", "no number")
        handler.close()
    assert "1 of 1 log records were lost (1 FormatError)\n" in capsys.readouterr().err
