"""A pipeline whose requests fail as a whole: what leaves, which runner wakes, what expires."""

import math

from kpl_core.records.put_records import PutRecordsRequest, RequestFailure
from tests.support.stream import THROTTLED, Stream

FAILURE = RequestFailure("InternalFailure", "oops")


def failing(**options: float | bool) -> Stream:
    """A stream whose last two requests have failed at 1.0; the next may leave at 3.0, and then each 4 s later."""
    stream = Stream(
        None,
        retry_backoff_base_ms=4_000,
        retry_backoff_cap_ms=8_000,
        **{"aggregation_enabled": False, "collection_max_count": 10, **options},
    )
    stream.pipeline.shards_changed(stream.shards, 0.0)
    for key in ("first", "second"):
        stream.put(key, now=0.5)
        stream.pipeline.flush(0.5)
        fail(stream, stream.only(0.9), 1.0)
    return stream


def fail(stream: Stream, request: PutRecordsRequest, now: float) -> None:
    stream.pipeline.request_completed(request, FAILURE, now)


def test_only_a_probe_leaves_and_the_next_one_later() -> None:
    stream = failing()
    for number in range(35):
        stream.put(f"k{number}", now=1.5)
    assert stream.due(2.999) == []
    assert stream.wakeup(2.999) == 3.0
    assert len(stream.only(3.0).records) == 10
    assert stream.due(6.999) == []
    assert len(stream.due(7.0)) == 1


def test_an_answer_lets_everything_leave_at_once() -> None:
    stream = failing()
    for number in range(35):
        stream.put(f"k{number}", now=1.5)
    probe = stream.only(3.0)
    stream.pipeline.request_completed(probe, stream.stored(probe), 3.2)
    # And the two that failed: their own backoff was over at 3.0.
    assert sum(len(request.records) for request in stream.due(3.4)) == 27


def test_an_error_no_retry_can_cure_is_an_answer() -> None:
    stream = failing()
    for number in range(15):
        stream.put(f"k{number}", now=1.5)
    stream.pipeline.request_completed(stream.only(3.0), RequestFailure("AccessDeniedException", "no"), 3.1)
    assert len(stream.due(3.2)) == 1


def test_throttled_records_are_no_failure_of_a_request() -> None:
    stream = Stream(retry_backoff_base_ms=4_000)
    for now in (1.0, 2.0, 3.0):
        stream.put("k", now=now)
        request = stream.only(now + 0.1)
        stream.pipeline.request_completed(request, [THROTTLED] * len(request.records), now + 0.2)
    stream.put("k", now=3.5)
    assert len(stream.due(3.6)) == 1


def test_records_expire_on_time_while_requests_fail() -> None:
    stream = failing(record_ttl_ms=1_200)
    deliveries = [stream.put(f"k{number}", now=1.5) for number in range(100)]
    probed = sum(len(request.records) for request in stream.due(2.705))
    assert probed == 50
    assert not any(delivery.done for delivery in deliveries)
    # What has its tokens waits a little longer, as it would for other records.
    assert round(stream.wakeup(2.705), 6) == 2.71
    assert stream.due(2.711) == []
    results = [delivery.peek() for delivery in deliveries]
    assert [result.error_code for result in results if result] == ["Expired"] * (100 - probed)
    # Its end is looked at once more; then there is nothing to wait for.
    assert stream.due(3.1) == []
    assert stream.wakeup(3.1) == math.inf


def test_a_probe_leaves_before_a_record_expires_that_was_put_during_the_longest_pause() -> None:
    """A pause longer than the time to live would fail records that were never sent, after the outage was over."""
    stream = failing(record_ttl_ms=1_200)
    for number in range(9):
        put_at = max(1.5, stream.now)
        stream.put(f"k{number}", now=put_at)
        (probe, *_) = stream.due(put_at + 0.6)
        fail(stream, probe, stream.now)


def test_puts_wake_no_runner_while_requests_fail_once_the_limiter_is_paused() -> None:
    stream = failing()
    looks = 0
    for number in range(200):
        stream.put(f"k{number}", now=1.5 + number / 1_000)
        if stream.pipeline.attention:
            stream.pipeline.attention = False
            looks += 1
            assert stream.due(1.5 + number / 1_000) == []
    assert looks <= 3
    counts = stream.pipeline.statistics()
    # They wait where no tokens are spent.
    assert counts.limited >= 190
    assert counts.limited + counts.collected + counts.aggregating == 200


def test_what_waits_to_leave_meanwhile_is_bounded_by_one_request() -> None:
    stream = failing(record_max_buffered_time_ms=60_000)
    for number in range(200):
        stream.put(f"k{number}", now=1.5)
        if stream.pipeline.attention:
            stream.pipeline.attention = False
            assert stream.due(1.5) == []
    assert stream.pipeline.statistics().collected <= 11
