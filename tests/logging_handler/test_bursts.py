"""Bursts: what is logged at full speed arrives, memory stays bounded, and large lines cost their caller little."""

import json
import logging
import time
from typing import Any

import pytest

from kpl_core import decode
from kpl_core.testing import FakeKinesis, FakeTransport, Hang
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.logging_handler import KinesisHandler
from tests.support.running_program import run
from tests.support.waiting import wait_until

MIB = 1024 * 1024
LINE = "%09d " + "x" * 200


def stored_count(fake: FakeKinesis, _now: float) -> int:
    inside = [decode(stored.data) for stored in fake.records("logs")]
    return sum(1 if records is None else len(records) for records in inside)


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "start", "options"),
    [
        (100_000, "cold", {}),
        (100_000, "warm", {}),
        (500_000, "cold", {"max_queue_bytes": 256 * MIB}),
        (500_000, "warm", {"overflow": "block(60)"}),
    ],
    ids=["cold", "warm", "large queue", "block"],
)
def test_a_burst_at_full_speed_arrives_whole_although_the_program_ends_behind_it(count, start, options):
    """The limits of 16 shards hold: 210 B a line are 29 MB, or 145 MB, as JSON."""
    with ThreadedLocalKinesis(LocalKinesis({"logs": 16})) as kinesis:
        more = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        arguments = kinesis.endpoint_url, str(count), start, json.dumps(options)
        ended = run("logging_handler/programs/log_burst.py", *arguments, more=more)
        arrived = kinesis.call(stored_count)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert arrived == count + (start == "warm")


@pytest.mark.long
def test_the_default_queue_holds_100_000_lines_and_is_bounded_by_bytes(make, kinesis, logger):
    kinesis.faults.add(Hang())
    handler = make()
    handler.close_timeout = 0.1
    logger.addHandler(handler)
    for number in range(100_000):
        logger.info(LINE, number)
    assert handler.counts().dropped_total == 0
    for number in range(200_000):
        logger.info(LINE, number)
    # 64 MiB of 385 bytes a line, and 2 MiB that are being sent.
    assert 160_000 < handler.counts().buffered < 190_000


def test_a_close_without_a_timeout_goes_on_while_records_are_delivered(make, kinesis, logger, monkeypatch):
    """Pauses of 0.15 s are short enough while there is something to deliver; a busy machine makes them longer."""
    monkeypatch.setattr("kpl_integrations.logging_handler.options._PATIENCE_SECONDS", 1.5)
    handler = make(transport=lambda _config: FakeTransport(kinesis, latency_seconds=0.15), max_sending_bytes=10_000)
    logger.addHandler(handler)
    for number in range(500):
        logger.info(LINE, number)
    started_at = time.monotonic()
    handler.close()
    assert time.monotonic() - started_at > 1.5
    assert (handler.counts().delivered, handler.counts().dropped_total) == (500, 0)


def test_a_close_with_a_timeout_ends_in_time_although_records_are_delivered(make, kinesis, logger, capsys):
    handler = make(
        transport=lambda _config: FakeTransport(kinesis, latency_seconds=0.1),
        max_sending_bytes=10_000,
        close_timeout=0.5,
    )
    logger.addHandler(handler)
    for number in range(5_000):
        logger.info(LINE, number)
    started_at = time.monotonic()
    handler.close()
    assert time.monotonic() - started_at < 0.5 + 2.0
    assert 0 < handler.counts().delivered < 5_000


TEXTS = {
    "letters": "x" * 3_000_000,
    "1 MB": "x" * 1_100_000,
    "lines": "a line of text\n" * 200_000,
    "escapes": 'a"b\\' * 750_000,
    "umlauts": "äöü" * 500_000,
}


@pytest.mark.parametrize("oversize", ["truncate", "split"])
@pytest.mark.parametrize("json_format", ["plain", "ecs", "otel"])
def test_a_line_of_1_to_3_mb_costs_its_caller_less_than_5_ms(make, kinesis, logger, oversize, json_format):
    kinesis.faults.add(Hang())
    handler = make(oversize=oversize, json_format=json_format, close_timeout=0.1)
    logger.addHandler(handler)
    for text in TEXTS.values():
        for extra in ({}, {"order": 7, "tags": ["a", "b"]}):
            costs = []
            for _ in range(3):
                started = time.thread_time()
                logger.info("%s", text, extra=extra)
                costs.append(time.thread_time() - started)
            assert min(costs) < 0.005


def test_large_lines_of_a_full_queue_are_taken_one_mebibyte_at_a_time(make, kinesis, logger):
    """What was taken and finds no room in the producer waits outside of the queue's bound."""
    kinesis.faults.add(Hang())
    handler: KinesisHandler = make(max_queue_bytes=20 * MIB, close_timeout=0.1)
    logger.addHandler(handler)
    for _ in range(100):
        logger.info("x" * 500_000)
        time.sleep(0.001)
    counts: Any = None

    def is_full() -> bool:
        nonlocal counts
        counts = handler.counts()
        return bool(counts.dropped_total)

    wait_until(is_full, "a full queue")
    # 41 lines in the queue, 4 in the producer, and at most 3 between the two.
    assert counts.buffered <= 41 + 4 + 3


def test_a_line_larger_than_the_queue_is_truncated_at_once(make, kinesis, logger):
    handler = make(max_queue_bytes=2 * MIB)
    logger.addHandler(handler)
    logger.info("x" * 3_000_000)
    handler.close()
    assert handler.counts().delivered == 1


def test_a_root_logger_of_a_custom_formatter_marks_what_it_truncates(make, kinesis, logger):
    handler = make()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.info("x" * 1_500_000)
    handler.close()
    (stored,) = kinesis.records("logs")
    fields = json.loads(stored.data)
    assert (fields["original_bytes"], fields["message"][:7]) == (1_500_005, "INFO xx")
