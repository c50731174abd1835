"""What limiting a record costs does not depend on how many were limited before it, or wait beside it."""

import sys
from collections.abc import Callable
from types import FrameType

from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.shard_limiter import ShardLimiter
from kpl_core.records.kinesis_record import KinesisRecord
from tests.support.material import kinesis_record

RULES = ShardRules(records_per_second=1_000.0, bytes_per_second=1e9, burst_seconds=1.0, adaptive=True)


def calls_of(work: Callable[[], object]) -> int:
    """Count calls, of Python functions and of C's: the same on every machine, quiet or not."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def waiting(count: int) -> ShardLimiter:
    limiter = ShardLimiter(RULES, 0.0)
    for number in range(count):
        limiter.put(record(number))
    limiter.drain(0.0)
    return limiter


def record(number: int) -> KinesisRecord:
    return kinesis_record(sequence=number, deadline=number / 1_000, expires_at=30.0 + number / 1_000)


def hundred_more(limiter: ShardLimiter, start: int) -> Callable[[], None]:
    records = [record(start + number) for number in range(100)]

    def work() -> None:
        for number, each in enumerate(records):
            limiter.put(each)
            now = (number + 1) / 1_000
            limiter.drain(now)
            limiter.wakeup_at(now)
            limiter.answered(sent=1, throttled=0, now=now)

    return work


def test_the_cost_of_limiting_a_record_is_constant_in_the_records_that_wait() -> None:
    few, many = (calls_of(hundred_more(waiting(count), count)) for count in (1_000, 50_000))
    assert many < 1.1 * few


def test_the_cost_of_an_expiring_record_is_constant_in_the_records_that_wait() -> None:
    def expire(limiter: ShardLimiter) -> Callable[[], None]:
        def work() -> None:
            for number in range(100):
                limiter.drain(30.0 + number / 1_000)

        return work

    # The first thousand were admitted by the burst.
    few, many = (calls_of(expire(waiting(count))) for count in (2_000, 50_000))
    assert many < 1.1 * few
