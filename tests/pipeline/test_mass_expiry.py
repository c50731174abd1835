"""Everything expires at one instant: in slices, so that the event loop goes on, and all at that instant."""

import math
from collections.abc import Callable

import pytest

from kpl_core.fairness.fair_pipeline import FairStreamPipeline
from kpl_core.options.config import Config
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.records.put_records import RequestFailure
from tests.pipeline.material import even_shards

COUNT = 12_000
# Of every stage that expires records one slice, a few times a turn of the loop.
MOST_AT_ONCE = 2_500
OUTAGE = RequestFailure("InternalFailure", "oops")

Put = Callable[[StreamPipeline, int], object]


def plain(pipeline: StreamPipeline, number: int) -> object:
    return pipeline.put(f"k{number % 500}", bytes(100), 0.0)


def in_flows(pipeline: StreamPipeline, number: int) -> object:
    return pipeline.put_any(f"k{number % 500}", bytes(1_000), 0.0, flow=f"f{number % 300}")


SCENES: dict[str, tuple[Config, type[StreamPipeline], Put]] = {
    "single records of one shard": (Config(aggregation_enabled=False), StreamPipeline, plain),
    "aggregated": (Config(), StreamPipeline, plain),
    "in flows": (Config(fairness=FairnessPolicy()), FairStreamPipeline, in_flows),
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("shards", [1, 32])
def test_what_expires_at_one_instant_leaves_in_slices_at_that_instant(scene: str, shards: int) -> None:
    config, kind, put = SCENES[scene]
    limit = BufferLimit(max_records=100_000, max_bytes=10**9)
    pipeline = kind("s", config, limit, now=0.0, chance=lambda: 0.5)
    pipeline.shards_changed(even_shards(shards), 0.0)
    for number in range(COUNT):
        put(pipeline, number)
        if number % 100 == 0:
            pipeline.next_wakeup(0.0)
    now, turns, done = 0.0, 0, 0
    while (now := max(now, pipeline.next_wakeup(now))) < math.inf:
        pipeline.advance(now)
        while pipeline.has_request(now) and (request := pipeline.next_request(now)) is not None:
            pipeline.request_completed(request, OUTAGE, now)
        finished = pipeline.statistics().failed.get("Expired", 0)
        assert finished - done <= MOST_AT_ONCE
        assert finished == done or 30.0 <= now <= 30.1
        done, turns = finished, turns + 1
        assert turns < 2_000
    assert done == COUNT
    assert limit.outstanding_records == 0


def test_expired_records_leave_before_anything_is_admitted_however_many_they_are() -> None:
    pipeline = StreamPipeline(
        "s",
        Config(aggregation_enabled=False, record_ttl_ms=1_000),
        BufferLimit(max_records=100_000, max_bytes=10**9),
        now=0.0,
        chance=lambda: 0.5,
    )
    pipeline.shards_changed(even_shards(1), 0.0)
    for number in range(5_000):
        plain(pipeline, number)
    now = 0.0
    sent = 0
    # Nobody looks for a long time.
    for now in [5.0] * 40:
        while (request := pipeline.next_request(now)) is not None:
            sent += len(request.records)
    # What was admitted before is sent; of those that waited for tokens none is, plenty though there are now.
    assert sent <= 1_000
    assert pipeline.statistics().failed["Expired"] >= 4_000
