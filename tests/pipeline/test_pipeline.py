"""One stream's pipeline, step by step with literal times: put, wake, flush, close."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kpl_core.errors import BufferFull, InvalidUserRecord
from kpl_core.pipeline import lane
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.record_result import INTERNAL
from kpl_core.records.user_record import UserRecord
from tests.support.material import shard_id
from tests.support.stream import CHILDREN, LOWER, PARENT, THROTTLED, UPPER, Stream, held

# Put


def test_user_records_travel_together_by_shard_until_the_first_is_100_ms_old():
    stream = Stream(CHILDREN)
    for key in (LOWER[0], UPPER[0], LOWER[1], UPPER[1]):
        stream.put(key)
    assert stream.due(0.0999) == []
    assert stream.wakeup(0.0999) == 0.1
    request = stream.only(0.125)
    assert sorted(held(request)) == [(shard_id(1), LOWER[:2]), (shard_id(2), UPPER[:2])]


def test_a_kinesis_record_waits_a_little_for_company_from_other_shards():
    stream = Stream(CHILDREN)
    stream.put(LOWER[0], now=0.0)
    stream.put(UPPER[0], now=0.01)
    assert stream.due(0.11) == []
    (first, second) = stream.only(0.125).records
    assert first.deadline < second.deadline


def test_while_the_map_is_unknown_every_user_record_travels_alone_and_limited():
    stream = Stream(rate_limit_records_per_sec_per_shard=3.0, adaptive_rate=False)
    for key in LOWER[:4]:
        stream.put(key)
    request = stream.only(0.1)
    assert held(request) == [(None, [key]) for key in LOWER[:3]]
    assert stream.pipeline.statistics().limited == 1


def test_a_map_that_comes_aggregates_what_waits():
    stream = Stream()
    deliveries = [stream.put(key) for key in LOWER[:4]]
    stream.pipeline.shards_changed(PARENT, 0.02)
    request = stream.only(0.125)
    assert held(request) == [(shard_id(0), LOWER[:4])]
    stream.pipeline.request_completed(request, stream.stored(request), 0.2)
    assert all(delivery.done for delivery in deliveries)


@pytest.mark.parametrize("others", [{"explicit_hash_key": "5"}, {"tier": "normal"}, {"metadata": {"a": 1}}])
def test_both_ways_to_put_lead_to_the_same_aggregated_record(others: dict[str, Any]):
    stream = Stream(PARENT)
    stream.put("k", b"1")
    stream.put("k", b"2", **others)
    assert [len(record.arrivals) for record in stream.only(0.2).records] == [2]


def test_an_explicit_hash_key_decides_the_shard():
    stream = Stream(CHILDREN)
    stream.put(LOWER[0], explicit_hash_key=str(2**128 - 1))
    assert [record.predicted_shard for record in stream.only(0.2).records] == [shard_id(2)]


@pytest.mark.parametrize(
    ("arguments", "others", "error"),
    [
        (("", b"x"), {}, InvalidUserRecord),
        (("k" * 257, b"x"), {}, InvalidUserRecord),
        (("\ud800", b"x"), {}, InvalidUserRecord),
        ((5, b"x"), {}, TypeError),
        ((b"k", b"x"), {}, TypeError),
        ((["k"], b"x"), {}, TypeError),
        (("k", "text"), {}, TypeError),
        (("k", None), {}, TypeError),
        (("k", bytes(1024 * 1024)), {}, InvalidUserRecord),
        (("k", b"x"), {"explicit_hash_key": "-1"}, InvalidUserRecord),
        (("k", b"x"), {"explicit_hash_key": str(2**128)}, InvalidUserRecord),
        (("k", b"x"), {"explicit_hash_key": "abc"}, InvalidUserRecord),
        (("k", b"x"), {"explicit_hash_key": 5}, TypeError),
        (("k", b"x"), {"tier": "urgent"}, InvalidUserRecord),
        (("k", "text"), {"tier": "bulk"}, TypeError),
        (("", b"x"), {"metadata": {}}, InvalidUserRecord),
        (("k", bytes(1024 * 1024)), {"metadata": {}}, InvalidUserRecord),
    ],
)
def test_a_bad_user_record_is_refused_alone_and_reserves_nothing(arguments, others, error):
    stream = Stream(PARENT)
    good = [stream.put("k", b"1")]
    with pytest.raises(error):
        stream.put(*arguments, **others)
    good.append(stream.put("k", b"2"))
    assert stream.buffer_limit.outstanding_records == 2
    assert stream.pipeline.statistics().accepted == 2
    stream.finish(0.2)
    assert all(delivery.done for delivery in good)


def test_a_full_buffer_refuses_and_reserves_nothing():
    stream = Stream(PARENT)
    stream.buffer_limit.reserve(size_bytes=10**8 - 10)
    stream.put("k", b"12345678")
    ways: list[dict[str, Any]] = [{}, {"tier": "bulk"}]
    for others in ways:
        with pytest.raises(BufferFull):
            stream.put("k", b"12345678", **others)
    assert stream.buffer_limit.outstanding_records == 2


def test_the_largest_record_the_stream_takes_passes():
    stream = Stream(PARENT)
    stream.put("k", bytes(1024 * 1024 - 1))
    assert [record.size_bytes for record in stream.only(0.2).records] == [1024 * 1024]


@pytest.mark.parametrize("others", [{}, {"explicit_hash_key": "5"}, {"tier": "bulk"}, {"flow": "f"}], ids=repr)
def test_a_bytearray_may_be_reused_after_the_put(others: dict[str, Any]):
    stream = Stream(PARENT)
    buffer = bytearray(b"before")
    stream.put("k", buffer, **others)  # type: ignore[arg-type] # bytes-like is documented
    buffer[:] = b"after!"
    (record,) = stream.only(0.2).records
    assert record.data == b"before"


# Waking


def test_only_a_put_that_wants_attention_earlier_than_promised_says_so():
    stream = Stream(PARENT)
    pipeline = stream.pipeline
    pipeline.attention = False
    assert stream.wakeup(0.0) == math.inf
    stream.put("k")
    assert pipeline.attention
    pipeline.attention = False
    assert stream.wakeup(0.0) == 0.1
    stream.put("k", now=0.01)
    assert not pipeline.attention
    stream.put("k", b"x" * 60_000, now=0.01)
    stream.put("k", b"x" * 300_000, now=0.01)
    assert pipeline.attention


def test_nothing_to_do_is_nothing_to_wake_for():
    stream = Stream(PARENT)
    assert stream.wakeup(5.0) == math.inf
    stream.put("k", now=5.0)
    stream.finish(5.0)
    assert stream.wakeup(6.0) == math.inf


def test_without_a_place_for_a_request_it_sleeps_until_something_expires():
    stream = Stream(PARENT, record_ttl_ms=5_000)
    stream.put("k")
    for now in (0.1, 1.0):
        stream.poll(now, 0)
    assert stream.poll(1.0, 0).wants_more
    # A record that was admitted in time may wait in the collector 10 ms past its time to live.
    assert stream.wakeup(1.0) == pytest.approx(5.01)
    stream.poll(5.03, 0)
    assert stream.pipeline.statistics().failed == {"Expired": 1}


# Flush and close


def test_a_flush_sends_at_once_what_waits_for_company():
    stream = Stream(CHILDREN, record_max_buffered_time_ms=60_000)
    for key in (LOWER[0], UPPER[0]):
        stream.put(key)
    generation = stream.pipeline.flush(1.0)
    request = stream.only(1.0)
    assert len(request.records) == 2
    assert not stream.pipeline.is_flushed(generation)
    stream.pipeline.request_completed(request, stream.stored(request), 1.5)
    assert stream.pipeline.is_flushed(generation)


def test_a_flush_is_as_quick_for_records_that_wait_for_tokens_or_come_back():
    """Admitted after the flush, a record waited for others until its deadline of a minute."""
    stream = Stream(
        PARENT,
        chance=1.0,
        aggregation_enabled=False,
        record_max_buffered_time_ms=60_000,
        record_ttl_ms=600_000,
        rate_limit_records_per_sec_per_shard=1.0,
        adaptive_rate=False,
    )
    for key in LOWER[:3]:
        stream.put(key)
    generation = stream.pipeline.flush(0.0)
    stream.pipeline.request_completed(stream.only(0.0), [THROTTLED], 0.5)
    # Tokens at 1.0, 2.0 and 3.0, and 50 ms for other records each.
    assert stream.finish(0.5) <= 3.06
    assert stream.pipeline.is_flushed(generation)


def test_a_flush_does_not_wait_for_what_comes_after_it():
    stream = Stream(PARENT)
    stream.put("k")
    generation = stream.pipeline.flush(0.0)
    request = stream.only(0.0)
    stream.put("k")
    stream.pipeline.request_completed(request, stream.stored(request), 0.05)
    assert stream.pipeline.is_flushed(generation)
    assert stream.pipeline.statistics().buffered == 1


def test_a_flush_of_nothing_is_done():
    stream = Stream(PARENT)
    assert stream.pipeline.is_flushed(stream.pipeline.flush(0.0))


def test_a_forced_drain_sends_everything_without_tokens():
    stream = Stream(PARENT, rate_limit_records_per_sec_per_shard=1.0, aggregation_enabled=False)
    for key in LOWER[:5]:
        stream.put(key)
    assert [len(request.records) for request in stream.due(0.2)] == [1]
    stream.pipeline.drain_force(0.3)
    assert [len(request.records) for request in stream.due(0.3)] == [4]


def test_what_is_left_at_the_end_has_failed_for_the_right_reason():
    stream = Stream(PARENT, chance=1.0, retry_backoff_base_ms=5_000, aggregation_max_count=2)
    unanswered = stream.put("k", b"in flight")
    stream.only(0.125)
    backing_off = stream.put("k", b"backing off", now=0.125)
    stream.pipeline.request_completed(stream.only(0.3), [THROTTLED], 0.4)
    elsewhere = [stream.put(key, now=0.4) for key in LOWER[:2]]
    stream.shards = CHILDREN
    request = stream.only(0.6)
    stream.pipeline.request_completed(request, stream.stored(request), 0.7)
    still_open = stream.put("k", b"open", now=0.7)
    stream.pipeline.abandon(0.8)
    codes = [
        result.error_code
        for delivery in (unanswered, backing_off, *elsewhere, still_open)
        if (result := delivery.peek()) is not None
    ]
    assert codes == ["Unknown", "Shutdown", "Unknown", "Unknown", "Shutdown"]
    assert stream.pipeline.statistics().buffered == 0
    assert stream.buffer_limit.outstanding_records == 0
    result = backing_off.peek()
    assert result is not None
    assert [attempt.error_code for attempt in result.attempts] == [THROTTLED.error_code, "Shutdown"]


def test_an_answer_that_comes_after_the_end_changes_nothing():
    stream = Stream(PARENT)
    delivery = stream.put("k")
    request = stream.only(0.125)
    stream.pipeline.abandon(0.2)
    before = delivery.peek()
    stream.pipeline.request_completed(request, stream.stored(request), 0.3)
    assert delivery.peek() == before
    assert stream.pipeline.statistics().delivered == 0


def alone(**options) -> Stream:
    return Stream(PARENT, aggregation_enabled=False, **options)


def test_single_user_records_wait_a_moment_to_go_on_together():
    stream = alone()
    stream.wakeup(0.0)
    stream.put("a", now=1.0)
    assert stream.pipeline.attention
    assert stream.wakeup(1.0) == 1.025
    stream.pipeline.attention = False
    stream.put("b", now=1.02)
    stream.put("c", now=1.021)
    assert not stream.pipeline.attention
    assert stream.pipeline.statistics().aggregating == 2
    stream.poll(1.025, 0)
    assert stream.pipeline.statistics().collected == 3


def test_single_user_records_go_on_at_once_when_they_fill_a_request():
    stream = alone(collection_max_count=10)
    for number in range(10):
        stream.put(f"k{number}", now=1.0)
    assert stream.pipeline.statistics().collected == 10
    assert stream.poll(1.0, 0).wants_more


@pytest.mark.parametrize("ttl_ms", [100, 1_000])
@pytest.mark.parametrize("aggregation", [True, False])
def test_a_record_that_would_wait_until_it_expires_leaves_in_time(ttl_ms, aggregation):
    """With no more time to live than the buffered time, each record expired on a stream that was well."""
    stream = Stream(PARENT, record_ttl_ms=ttl_ms, record_max_buffered_time_ms=1_000, aggregation_enabled=aggregation)
    deliveries = [stream.put("k", now=number / 1_000) for number in range(3)]
    for request in stream.due(ttl_ms / 1_000):
        stream.pipeline.request_completed(request, stream.stored(request), ttl_ms / 1_000)
    results = [delivery.peek() for delivery in deliveries]
    assert [result is not None and result.successful for result in results] == [True] * 3


@pytest.mark.parametrize("options", [{"record_max_buffered_time_ms": 0}, {"ordering": "per_key"}])
def test_single_user_records_that_may_not_wait_go_on_one_by_one(options):
    stream = alone(**options)
    stream.put("a", now=1.0)
    assert stream.pipeline.statistics().collected == 1


def test_a_record_of_a_batch_that_cannot_be_put_has_failed_and_leaves_its_room():
    stream = Stream(PARENT)
    pipeline, limit = stream.pipeline, stream.pipeline.stages.buffer_limit
    limit.reserve(size_bytes=5)
    result = pipeline.fail_put("k", b"data", "7", "f", 0.0, MemoryError("no memory")).peek()
    assert result is not None
    assert (result.error_code, result.error_message) == (INTERNAL, "MemoryError('no memory')")
    assert (limit.outstanding_records, limit.outstanding_bytes) == (0, 0)
    assert (pipeline.statistics().accepted, dict(pipeline.statistics().failed)) == (1, {INTERNAL: 1})
    assert pipeline.attention
    assert pipeline.is_flushed(pipeline.flush(0.0))


def test_a_record_that_cannot_be_closed_for_want_of_memory_is_closed_later(monkeypatch):
    """The put that filled it has succeeded, so it is neither failed nor counted twice."""
    stream = Stream(PARENT, aggregation_max_count=2)
    stream.put("k", b"1", now=0.0)
    short = [MemoryError()]

    def made(*fields: Any) -> KinesisRecord:
        if short:
            raise short.pop()
        return KinesisRecord(*fields)

    monkeypatch.setattr(lane, "KinesisRecord", made)
    stream.put("k", b"2", now=0.0)
    assert (short, stream.pipeline.statistics().accepted) == ([], 2)
    stream.put("k", b"3", now=0.0)
    stream.finish(1.0)
    counts = stream.pipeline.statistics()
    assert (counts.accepted, counts.delivered, stream.pipeline.stages.buffer_limit.outstanding_records) == (3, 3, 0)


@pytest.mark.parametrize(
    ("options", "may_wait"),
    [
        ({}, True),
        ({"aggregation_enabled": False}, False),
        ({"aggregation_max_count": 1}, False),
        ({"aggregation_max_count": 100}, False),
    ],
    ids=str,
)
def test_a_record_waits_in_a_batch_only_if_it_is_appended_there(options, may_wait):
    assert (Stream(PARENT, **options).pipeline.entrance is not None) is may_wait


def test_what_waits_in_the_batch_is_put_before_a_record_is_asked_whom_it_would_join(monkeypatch):
    """It may close the Kinesis record of the earlier one."""
    stream = Stream(PARENT)
    earlier, pipeline = stream.put("k", b"1", now=0.5), stream.pipeline
    record = UserRecord("k", b"3")
    assert pipeline.reaggregator.arrival_with(record, earlier) == 0.5
    monkeypatch.setattr(pipeline.reaggregator, "_batch", SimpleNamespace(drain=lambda: pipeline.flush(1.0)))
    assert pipeline.reaggregator.arrival_with(record, earlier) is None
