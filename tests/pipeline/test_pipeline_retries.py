"""What comes back: refused, expired, invalid, or of a shard that is no more."""

from collections import deque

import pytest

from kpl_core.records.put_records import RequestFailure
from tests.support.material import even_shards, hash_key, keys_in, shard_id, shard_of, split
from tests.support.stream import CHILDREN, LOWER, PARENT, THROTTLED, UPPER, Stream, held

# Retry


def test_a_refused_record_comes_back_after_its_backoff_and_no_sooner():
    stream = Stream(PARENT, chance=1.0)
    delivery = stream.put("k")
    stream.pipeline.request_completed(stream.only(0.125), [THROTTLED], 0.2)
    assert stream.pipeline.statistics().backing_off == 1
    assert stream.wakeup(0.2) == 0.25
    assert stream.due(0.249) == []
    request = stream.only(0.3)
    stream.pipeline.request_completed(request, stream.stored(request), 0.4)
    result = delivery.peek()
    assert result is not None
    assert [attempt.error_code for attempt in result.attempts] == [THROTTLED.error_code, None]


def test_new_records_do_not_wait_for_one_that_backs_off():
    stream = Stream(PARENT, chance=1.0, retry_backoff_base_ms=5_000)
    stream.put("k")
    stream.pipeline.request_completed(stream.only(0.125), [THROTTLED], 0.2)
    stream.put("k", now=0.2)
    assert len(stream.only(0.4).records) == 1


def test_in_order_new_records_of_the_shard_do_wait_for_it():
    stream = Stream(PARENT, chance=1.0, retry_backoff_base_ms=5_000, ordering="per_key")
    stream.put("k", b"first")
    stream.pipeline.request_completed(stream.only(0.125), [THROTTLED], 0.2)
    stream.put("k", b"second", now=0.2)
    assert stream.due(5.0) == []
    first = stream.only(5.3)
    assert [record.data for record in first.records] == [b"first"]
    assert stream.due(5.4) == []
    stream.pipeline.request_completed(first, stream.stored(first), 5.5)
    assert [record.data for record in stream.only(5.6).records] == [b"second"]


def test_after_a_reshard_in_order_no_record_waits_for_one_that_waits_itself():
    """A record taken back out of a request was still counted as on its way: its shard stood still until it expired."""
    shards = even_shards(2)
    stream = Stream(shards, ordering="per_key", aggregation_enabled=False)
    lower = keys_in(shards[0], 3)
    for key in lower:
        stream.put(key)
    stream.poll(0.01, 0)
    stream.shards = split(shards, shard_id(1))
    stream.pipeline.shards_changed(stream.shards, 0.02)
    assert stream.finish(0.02) < 1.0


def test_in_order_a_new_map_comes_into_use_while_several_closed_shards_have_much_to_send():
    """One of them was always on its way under its old prediction, so the map was never used."""
    before = even_shards(2)
    stream = Stream(before, ordering="per_key", aggregation_enabled=False, collection_max_count=1)
    for number in range(10):
        for shard in before:
            stream.put(keys_in(shard, 1)[0], str(number).encode())
    on_their_way = deque(stream.due(0.01))
    assert len(on_their_way) == 2
    stream.shards = split(split(before, shard_id(0)), shard_id(1))
    stream.pipeline.shards_changed(stream.shards, 0.01)
    for _ in range(2):
        first = on_their_way.popleft()
        stream.pipeline.request_completed(first, stream.stored(first), 0.02)
        on_their_way += stream.due(0.03)
    assert set(stream.pipeline.shard_map.open_shards) == {shard.shard_id for shard in stream.shards}
    assert {record.predicted_shard for request in on_their_way for record in request.records} <= {
        shard.shard_id for shard in stream.shards
    }


# Reshards


def test_a_record_whose_shard_closed_while_it_backed_off_is_aggregated_by_the_new_map():
    """Under its old prediction it was stored in one child, and dropped there by every KCL."""
    stream = Stream(PARENT)
    for key in (LOWER[0], UPPER[0]):
        stream.put(key)
    request = stream.only(0.125)
    stream.pipeline.shards_changed(CHILDREN, 0.15)
    stream.pipeline.request_completed(request, [THROTTLED], 0.2)
    assert sorted(held(stream.only(1.0))) == [(shard_id(1), LOWER[:1]), (shard_id(2), UPPER[:1])]


def test_a_record_stored_across_two_children_is_sent_again_apart_and_ends():
    """It went around until it expired: retried as one aggregate, it missed again each time."""
    stream = Stream(PARENT)
    deliveries = [stream.put(key) for key in (LOWER[0], UPPER[0])]
    request = stream.only(0.125)
    stream.pipeline.shards_changed(CHILDREN, 0.15)
    stream.shards = CHILDREN
    stream.pipeline.request_completed(request, stream.stored(request), 0.2)
    stream.finish(0.2)
    for delivery in deliveries:
        result = delivery.peek()
        assert result is not None
        assert result.successful
        assert [attempt.error_code for attempt in result.attempts] == ["Wrong Shard", None]


def test_a_map_that_says_the_same_disturbs_nothing():
    stream = Stream(PARENT)
    stream.put("k", now=0.0)
    stream.pipeline.shards_changed(PARENT, 0.05)
    stream.put("k", now=0.06)
    assert [len(record.arrivals) for record in stream.only(0.125).records] == [2]


def test_only_shards_that_changed_are_disturbed():
    shards = even_shards(2)
    stream = Stream(shards, aggregation_max_count=2)
    kept, moved = (keys_in(shard, 3) for shard in shards)
    for key in (*kept[:2], *moved[:2], kept[2]):
        stream.put(key)
    after = split(shards, shard_id(1))
    stream.pipeline.shards_changed(after, 0.01)
    stream.put(kept[0], now=0.02)
    records = {record.predicted_shard: record for request in stream.due(0.2) for record in request.records}
    assert shard_id(1) not in records
    # Four user records of the shard that stayed: two aggregates of two.
    assert stream.pipeline.statistics().in_flight == 6
    for shard, record in records.items():
        assert {shard_of(after, hash_key(each.partition_key)) for each in record.user_records()} == {shard}


def test_a_reshard_does_not_cut_a_backoff_short():
    shards = even_shards(2)
    stream = Stream(shards, chance=1.0, retry_backoff_base_ms=5_000)
    stream.put(keys_in(shards[0], 1)[0])
    stream.pipeline.request_completed(stream.only(0.125), [THROTTLED], 0.2)
    stream.pipeline.shards_changed(split(shards, shard_id(1)), 0.3)
    assert stream.due(5.1) == []
    assert len(stream.due(5.3)) == 1


def test_what_was_admitted_before_a_reshard_does_not_pay_twice():
    shards = even_shards(2)
    stream = Stream(shards, rate_limit_records_per_sec_per_shard=1.0, aggregation_enabled=False)
    stream.put(keys_in(shards[0], 1)[0])
    stream.pipeline.shards_changed(split(shards, shard_id(1)), 0.01)
    assert len(stream.due(0.2)) == 1


def test_a_success_on_an_unknown_shard_waits_for_the_map():
    stream = Stream(PARENT)
    deliveries = [stream.put(key) for key in LOWER[:2]]
    request = stream.only(0.125)
    stream.shards = CHILDREN
    stream.pipeline.request_completed(request, stream.stored(request), 0.2)
    assert stream.pipeline.statistics().held == 2
    assert stream.pipeline.shard_map.refresh_wanted
    stream.pipeline.shards_changed(CHILDREN, 0.5)
    assert [result.successful for delivery in deliveries if (result := delivery.peek())] == [True, True]


def test_without_a_map_a_held_success_is_sent_again_after_two_seconds():
    stream = Stream(PARENT)
    for key in LOWER[:2]:
        stream.put(key)
    request = stream.only(0.125)
    stream.shards = CHILDREN
    stream.pipeline.request_completed(request, stream.stored(request), 0.2)
    assert stream.wakeup(0.2) == 2.2
    assert stream.due(2.19) == []
    stream.poll(2.2, 0)
    assert stream.pipeline.statistics().held == 0
    assert len(stream.due(2.4)) == 1


def test_while_no_newer_map_can_be_had_what_missed_its_shard_travels_alone_and_ends():
    """Aggregated by the map that had misled it, it was stored again every two seconds until it expired."""
    stream = Stream(PARENT)
    deliveries = [stream.put(key) for key in (LOWER[0], UPPER[0], LOWER[1])]
    stream.shards = CHILDREN
    stream.finish(0.0)
    for delivery in deliveries:
        result = delivery.peek()
        assert result is not None
        assert result.successful
        assert [attempt.error_code for attempt in result.attempts] == ["Wrong Shard", None]
    assert stream.now < 3.0
    assert stream.pipeline.shard_map.refresh_wanted


def test_records_that_travel_alone_without_a_map_are_aggregated_when_one_comes():
    stream = Stream(PARENT, record_max_buffered_time_ms=1_000)
    for key in (*LOWER[:2], *UPPER[:2]):
        stream.put(key)
    request = stream.only(1.1)
    stream.shards = CHILDREN
    stream.pipeline.request_completed(request, stream.stored(request), 1.2)
    assert stream.due(3.25) == []
    assert stream.pipeline.statistics().collected == 4
    stream.pipeline.shards_changed(CHILDREN, 3.3)
    assert sorted(held(stream.only(4.5))) == [(shard_id(1), LOWER[:2]), (shard_id(2), UPPER[:2])]


def test_the_kpls_preset_aggregates_even_then():
    stream = Stream(PARENT, consumer="per_user_record")
    for key in (LOWER[0], UPPER[0]):
        stream.put(key)
    request = stream.only(0.125)
    stream.shards = CHILDREN
    stream.pipeline.request_completed(request, stream.stored(request), 0.2)
    assert held(stream.only(0.5)) == [(shard_id(0), [LOWER[0], UPPER[0]])]


# Expiry


def test_a_record_with_less_time_left_than_its_wait_leaves_in_time():
    """Aggregated again 0.3 s before it expired, a record waited 0.5 s, and was never sent."""
    stream = Stream(PARENT, record_max_buffered_time_ms=1_000, record_ttl_ms=1_000)
    deliveries = [stream.put(key) for key in (LOWER[0], UPPER[0])]
    request = stream.only(0.6)
    stream.shards = CHILDREN
    stream.pipeline.request_completed(request, stream.stored(request), 0.65)
    stream.pipeline.shards_changed(CHILDREN, 0.7)
    stream.finish(0.7)
    for delivery in deliveries:
        result = delivery.peek()
        assert result is not None
        assert [attempt.error_code for attempt in result.attempts] == ["Wrong Shard", None]


def test_what_waits_for_tokens_expires_and_its_neighbours_go_on():
    stream = Stream(
        PARENT, rate_limit_records_per_sec_per_shard=0.1, burst_seconds=10.0, record_ttl_ms=2_000, adaptive_rate=False
    )
    stream.put("k", b"takes the only token", now=0.0)
    assert len(stream.due(0.2)) == 1
    old, young = stream.put("k", b"old", now=0.5), stream.put("k", b"young", now=0.55)
    stream.poll(1.0, 0)
    assert stream.pipeline.statistics().limited == 2
    stream.poll(2.5, 0)
    result = old.peek()
    assert result is not None
    assert [attempt.error_code for attempt in result.attempts] == ["Expired"]
    assert not young.done


def test_a_time_to_live_that_ends_before_the_deadline_ends_there():
    stream = Stream(PARENT, record_max_buffered_time_ms=60_000, record_ttl_ms=1_000)
    stream.put("k")
    # Half of it is for the way; but no request may leave.
    assert stream.wakeup(0.0) == 0.5
    assert stream.wakeup(0.5) == 0.55
    assert stream.wakeup(0.55) == pytest.approx(1.05)
    stream.poll(1.06, 0)
    assert stream.pipeline.statistics().failed == {"Expired": 1}


def test_thirty_years_to_live_do_not_overflow():
    stream = Stream(PARENT, record_ttl_ms=1e12)
    delivery = stream.put("k", now=1e6)
    stream.finish(1e6)
    assert delivery.done


# Bisection


def test_a_request_refused_as_invalid_costs_only_the_guilty_record():
    stream = Stream(even_shards(8), aggregation_enabled=False)
    deliveries = {key: stream.put(key) for key in (*LOWER, *UPPER)}
    requests = stream.due(0.2)
    sent = 0
    while requests:
        request = requests.pop()
        sent += 1
        if LOWER[3] in [record.partition_key for record in request.records]:
            failure = RequestFailure("ValidationException", "1 validation error detected")
            stream.pipeline.request_completed(request, failure, 0.3)
        else:
            stream.pipeline.request_completed(request, stream.stored(request), 0.3)
        requests += stream.due(0.3)
    assert sent <= 9
    failed = {key for key, delivery in deliveries.items() if (result := delivery.peek()) and not result.successful}
    assert failed == {LOWER[3]}
