"""Everything expires at one instant: in slices, so that the event loop goes on, and all at that instant."""

import math
from collections.abc import Callable

import pytest

from kpl_core.options.config import Config
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.put_records import RequestFailure
from kpl_core.records.user_record import UserRecord
from tests.support.material import even_shards

COUNT = 12_000
# Of every stage that expires records one slice, a few times a turn of the loop.
MOST_AT_ONCE = 2_500
OUTAGE = RequestFailure("InternalFailure", "oops")

Put = Callable[[StreamPipeline, int], object]


def plain(pipeline: StreamPipeline, number: int) -> object:
    return pipeline.put(f"k{number % 500}", bytes(100), 0.0)


def in_flows(pipeline: StreamPipeline, number: int) -> object:
    return pipeline.put_record(UserRecord(f"k{number % 500}", bytes(1_000), flow=f"f{number % 300}"), 0.0)


SCENES: dict[str, tuple[Config, Put]] = {
    "single records of one shard": (Config(aggregation_enabled=False), plain),
    "aggregated": (Config(), plain),
    "in flows": (Config(fairness=FairnessPolicy()), in_flows),
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("shards", [1, 32])
def test_what_expires_at_one_instant_leaves_in_slices_at_that_instant(scene: str, shards: int) -> None:
    config, put = SCENES[scene]
    limit = BufferLimit(max_records=100_000, max_bytes=10**9)
    pipeline = stream_parts("s", config, limit, now=0.0, chance=lambda: 0.5).pipeline
    pipeline.shards_changed(even_shards(shards), 0.0)
    for number in range(COUNT):
        put(pipeline, number)
        if number % 100 == 0:
            pipeline.poll(0.0, 0)
    now, turns, done = 0.0, 0, 0
    while now < math.inf:
        poll = pipeline.poll(now, 1_000)
        for request in poll.requests:
            pipeline.request_completed(request, OUTAGE, now)
        finished = pipeline.statistics().failed.get("Expired", 0)
        assert finished - done <= MOST_AT_ONCE
        assert finished == done or 30.0 <= now <= 30.1
        done, turns = finished, turns + 1
        # An answer may have changed when the next poll is due.
        now = pipeline.poll(now, 0).wakeup if poll.requests else poll.wakeup
        assert turns < 2_000
    assert done == COUNT
    assert limit.outstanding_records == 0


def test_expired_records_leave_before_anything_is_admitted_however_many_they_are() -> None:
    pipeline = stream_parts(
        "s",
        Config(aggregation_enabled=False, record_ttl_ms=1_000),
        BufferLimit(max_records=100_000, max_bytes=10**9),
        now=0.0,
        chance=lambda: 0.5,
    ).pipeline
    pipeline.shards_changed(even_shards(1), 0.0)
    for number in range(5_000):
        plain(pipeline, number)
    now = 0.0
    sent = 0
    # The next poll is late.
    for now in [5.0] * 40:
        for request in pipeline.poll(now, 1_000).requests:
            sent += len(request.records)
    # Records admitted before are sent. Of those that waited for tokens none is, although there are tokens now.
    assert sent <= 1_000
    assert pipeline.statistics().failed["Expired"] >= 4_000


class Waiter:
    """Waits for a delivery, as a callback of each record of a write-ahead spool does."""

    def __init__(self, delivery: ResultHandle) -> None:
        self.delivery, self.looked = delivery, -1
        self.set()

    def set(self) -> None:
        self.looked += 1
        outcome = self.delivery.follow()
        if not outcome.settled:
            outcome.waiters = [*(outcome.waiters or ()), self]


def test_the_waiters_of_an_aggregated_record_look_twice_when_one_of_its_user_records_expires() -> None:
    """They looked once for each of its user records: a hundred thousand times for a record of three hundred."""
    config = Config(record_ttl_ms=1_000)
    limit = BufferLimit(max_records=1_000, max_bytes=10**6)
    pipeline = stream_parts("s", config, limit, now=0.0, chance=lambda: 0.5).pipeline
    pipeline.shards_changed(even_shards(1), 0.0)
    first = pipeline.put("first", b"a", 0.0)
    waiters = [Waiter(pipeline.put(f"k{number}", b"a", 0.05)) for number in range(300)]
    assert {waiter.delivery.outcome for waiter in waiters} == {first.outcome}
    for now in (0.1, 1.02):
        _ = pipeline.poll(now, 0)
    assert first.done
    assert not any(waiter.delivery.done for waiter in waiters)
    assert {waiter.looked for waiter in waiters} == {2}
