"""What a handler keeps on disk: records without room, records that are too large, and what a close did not deliver."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kpl_core import BlockingProducer, Config, ConfigError, DeadLetterOptions, SpoolOptions
from kpl_core.durability.dead_letters import LetterReader
from kpl_core.durability.spool import DeadLetter, LetterFilter, Spool
from kpl_core.testing import ErrorAnswer, FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.logging_handler import KinesisHandler
from tests.support.consumers import log_records, user_records
from tests.support.durability_scene import set_writable
from tests.support.waiting import wait_until

LINES = 3_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs.spool"


@pytest.fixture
def make(kinesis: FakeKinesis, path: Path) -> Iterator[Callable[..., KinesisHandler]]:
    made: list[KinesisHandler] = []

    def make_handler(**options: Any) -> KinesisHandler:
        defaults = {"transport": lambda config: FakeTransport(kinesis), "close_timeout": 20}
        if "config" not in options:
            defaults["spool_path"] = str(path)
        handler = KinesisHandler("logs", **{**defaults, **options})
        made.append(handler)
        return handler

    yield make_handler
    for handler in made:
        handler.close()


def log_lines(logger: logging.Logger, handler: KinesisHandler, *, wait: bool) -> None:
    """Log lines, and wait between them until the sender has emptied the queue, so that none is evicted."""
    for number in range(LINES):
        logger.info("line %d", number)
        if wait and not number % 100:
            wait_until(lambda: handler._queue.free_records > 500, "room")  # noqa: SLF001


def letters(path: Path) -> list[DeadLetter]:
    with LetterReader(path) as reader:
        found = [stored.letter for page in reader.pages(LetterFilter()) for stored in page]
    assert None not in found, "a letter is damaged"
    return [letter for letter in found if letter is not None]


@pytest.mark.parametrize("overflow", ["spool", "dlq"])
def test_records_without_room_in_an_outage_are_kept_on_disk_and_none_is_dropped(
    make, kinesis, logger, path, capsys, overflow
):
    fault = kinesis.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    # Room for a few hundred records only, in memory and on the way.
    handler = make(overflow=overflow, max_queue_records=1_000, max_sending_bytes=40_000)
    logger.addHandler(handler)
    log_lines(logger, handler, wait=True)
    wait_until(lambda: handler.counts().kept > LINES // 2, "most lines kept")
    if overflow == "dlq":
        kept = [json.loads(letter.data)["message"] for letter in letters(path) if letter.reason == "rate_limited"]
        assert len(kept) > LINES // 2
        assert set(kept) <= {f"line {number}" for number in range(LINES)}
    kinesis.faults.remove(fault)
    handler.close()
    counts = handler.counts()
    assert (counts.emitted, counts.delivered + counts.kept, counts.dropped_total) == (LINES, LINES, 0)
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_spooled_records_are_delivered_when_the_outage_is_over(make, kinesis, logger):
    fault = kinesis.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    handler = make(overflow="spool", max_queue_records=1_000, max_sending_bytes=40_000)
    logger.addHandler(handler)
    log_lines(logger, handler, wait=True)
    wait_until(lambda: handler.counts().kept > 0, "some lines kept")
    kinesis.faults.remove(fault)
    wait_until(lambda: len(log_records(kinesis)) == LINES, lambda: f"{LINES} lines")
    handler.close()
    assert Counter(each["message"] for each in log_records(kinesis)) == Counter(f"line {n}" for n in range(LINES))
    counts = handler.counts()
    assert (counts.emitted, counts.delivered, counts.kept, counts.dropped_total) == (LINES, LINES, 0, 0)


def test_undelivered_records_stay_in_the_spool_for_the_next_handler(make, kinesis, logger, capsys, tmp_path):
    config = Config(spool=SpoolOptions(path=tmp_path / "logs.spool"))
    fault = kinesis.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    first = make(config=config, close_timeout=2)
    logger.addHandler(first)
    for number in range(50):
        logger.info("line %d", number)
    wait_until(lambda: fault.fired > 0, "a first request")
    first.close()
    counts = first.counts()
    assert (counts.kept, counts.delivered, counts.dropped_total, counts.buffered) == (50, 0, 0, 0)
    assert capsys.readouterr().err == ""
    kinesis.faults.remove(fault)
    second = make(config=config, close_timeout=20)
    logger.removeHandler(first)
    logger.addHandler(second)
    logger.info("after")
    wait_until(lambda: len(user_records(kinesis)) == 51, "51 records")
    second.close()
    assert second.counts().delivered == 1


@pytest.mark.parametrize("max_sending_bytes", [40_000, 4_000_000])
def test_without_an_outage_the_spool_stays_empty(make, kinesis, logger, max_sending_bytes):
    handler = make(overflow="spool", max_sending_bytes=max_sending_bytes, close_timeout=60)
    logger.addHandler(handler)
    log_lines(logger, handler, wait=False)
    handler.close()
    counts = handler.counts()
    assert (counts.delivered, counts.kept, counts.dropped_total) == (LINES, 0, 0)


def test_an_oversize_record_is_a_dead_letter_and_its_beginning_in_the_stream_names_it(make, kinesis, logger, path):
    handler = make(oversize="dlq")
    logger.addHandler(handler)
    logger.info("small")
    logger.info("x" * 2_000_000)
    handler.flush()
    counts = handler.counts()
    assert (counts.emitted, counts.delivered, counts.kept, counts.dropped_total) == (2, 1, 1, 0)
    handler.close()
    (stub,) = [each for each in log_records(kinesis) if "dead_letter" in each]
    (letter,) = letters(path)
    assert (letter.reason, letter.metadata) == ("oversize", {"dead_letter": stub["dead_letter"]})
    assert len(json.loads(letter.data)["message"]) == 2_000_000
    assert (stub["truncated"], stub["original_bytes"]) == (True, len(letter.data))


def test_a_dead_letter_without_room_is_counted_and_reported_in_the_stream(make, kinesis, logger, path):
    spool = SpoolOptions(path=path, max_dead_letter_bytes=1024 * 1024)
    handler = make(oversize="dlq", config=Config(spool=spool, dead_letters=DeadLetterOptions()))
    logger.addHandler(handler)
    logger.info("x" * 2_000_000)
    handler.close()
    assert handler.counts().dropped == {"NotKept": 1}
    assert [each["dropped_by_reason"] for each in log_records(kinesis) if "dropped_records" in each] == [{"NotKept": 1}]


def test_a_dead_letter_that_the_disk_refuses_is_counted_and_reported_in_the_stream(make, kinesis, logger, path):
    handler = make(oversize="dlq", config=Config(spool=SpoolOptions(path=path), dead_letters=DeadLetterOptions()))
    logger.addHandler(handler)
    logger.info("small")
    wait_until(lambda: handler.counts().delivered == 1, "the first line delivered")
    spool = handler._sender.background.producer.spool  # noqa: SLF001 - to make its file read-only
    set_writable(spool, writable=False).result()
    logger.info("x" * 2_000_000)
    wait_until(lambda: handler.counts().dropped == {"NotKept": 1}, "a count")
    handler.close()
    assert handler.counts().kept == 0
    assert [each["dropped_by_reason"] for each in log_records(kinesis) if "dropped_records" in each] == [{"NotKept": 1}]


def test_records_that_a_spool_refuses_are_counted_and_reported_when_it_stores_again(
    make, kinesis, logger, path, capsys, caplog
):
    spool = SpoolOptions(path=path, mode="write_ahead", failure="refuse", commit_interval_ms=1.0)
    handler = make(config=Config(spool=spool), notice_seconds=0.05)
    logger.addHandler(handler)
    logger.info("stored")
    wait_until(lambda: handler.counts().delivered == 1, "the first line delivered")
    file = handler._sender.background.producer.spool  # noqa: SLF001 - to make its file read-only
    set_writable(file, writable=False).result()
    for number in range(20):
        logger.info("refused %d", number)
        wait_until(lambda: handler.counts().dropped == {"NotSpooled": number + 1}, "a count")  # noqa: B023
    set_writable(file, writable=True).result()
    wait_until(lambda: any("dropped_records" in each for each in log_records(kinesis)), "a notice in the stream")
    logger.info("stored again")
    handler.close()
    counts = handler.counts()
    assert (counts.delivered, counts.dropped, counts.buffered) == (2, {"NotSpooled": 20}, 0)
    notices = [each["dropped_by_reason"] for each in log_records(kinesis) if "dropped_records" in each]
    assert sum(each["NotSpooled"] for each in notices) == 20
    # Neither the sender's loop nor the handler has raised.
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_close_while_the_spool_refuses_ends_in_time_and_prints_the_loss(make, logger, path, capsys, caplog):
    spool = SpoolOptions(path=path, mode="write_ahead", failure="refuse", commit_interval_ms=1.0)
    handler = make(config=Config(spool=spool))
    logger.addHandler(handler)
    logger.info("stored")
    wait_until(lambda: handler.counts().delivered == 1, "the first line delivered")
    set_writable(handler._sender.background.producer.spool, writable=False).result()  # noqa: SLF001 - as above
    logger.info("finds out")
    wait_until(lambda: handler.counts().dropped == {"NotSpooled": 1}, "a count")
    for number in range(20):
        logger.info("refused %d", number)
    handler.close()
    assert (handler.counts().delivered, handler.counts().dropped) == (1, {"NotSpooled": 21})
    assert "21 of 22 log records were lost" in capsys.readouterr().err
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_process_whose_file_is_locked_sends_without_it_and_prints_why(make, kinesis, logger, path, capsys):
    with Spool(SpoolOptions(path=path)):
        handler = make(overflow="spool")
        logger.addHandler(handler)
        logger.info("all the same")
        handler.close()
    assert handler.counts().delivered == 1
    assert "what cannot be delivered is lost, not kept: spool lock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overflow": "spool"}, "overflow is 'spool', and there is no file to keep records in; set spool_path"),
        ({"overflow": "dlq"}, "overflow is 'dlq'"),
        ({"oversize": "dlq"}, "oversize is 'dlq'"),
        ({"oversize": "dlq", "config": Config()}, "or in config dead_letters"),
        ({"overflow": "spool", "config": Config()}, "or in config spool"),
    ],
)
def test_keeping_records_without_a_file_raises_an_error(options, words):
    with pytest.raises(ConfigError, match=words):
        KinesisHandler("logs", **options)


def test_a_shared_producer_keeps_nothing_for_a_handler():
    with pytest.raises(ConfigError, match="needs a producer of the handler's own"):
        KinesisHandler("logs", producer=BlockingProducer(Config()), overflow="spool")
