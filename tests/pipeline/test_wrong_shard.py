"""The table in effect: records stored in another shard than predicted, and requests that are invalid."""

import math

import pytest
from hypothesis import given, strategies as st

from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.put_records import RequestFailure
from kpl_core.records.record_result import RecordResult
from kpl_core.records.user_record import UserRecord
from tests.pipeline.books import BOTH, CHILDREN, EVERY, LOWER, PARENT, SUCCESS, UPPER, Books, past, results, stored
from tests.support.material import deliveries_of, kinesis_record, shard_id


def test_a_single_record_on_another_shard_is_right_by_construction():
    books = Books()
    record = books.record(LOWER[0])
    books.answer(record, stored(1))
    assert [result.successful for result in results(record) if result] == [True]
    assert books.shard_map.refresh_wanted
    assert books.refreshes == [math.inf]


def test_a_shard_that_the_map_does_not_have_is_news_although_the_map_came_after_the_request_left():
    """Without a request for a newer map the outcome was held for 2 s in vain, and all of it was stored twice."""
    books = Books()
    books.shard_map.update(PARENT, 1.5)
    books.answer(books.record(*LOWER), stored(1), started_at=1.0, now=2.0)
    assert books.shard_map.refresh_wanted
    books.shard_map.update(CHILDREN, 2.5)
    books.answer(books.record(*LOWER), stored(1), started_at=2.2, now=3.0)
    assert not books.shard_map.refresh_wanted


def test_a_map_that_came_without_the_shard_is_asked_for_again():
    """It was listed before the shard was; taken for the newest, it led what had missed astray once more."""
    books = Books()
    books.answer(books.record(*LOWER), stored(1), now=2.0)
    books.shard_map.update(PARENT, 2.5)
    assert books.retrier.shards_changed(2.5).finished == []
    assert books.shard_map.refresh_wanted, "else it waited for 2 s in vain, and all of it was stored twice"
    books.shard_map.update(CHILDREN, 2.75)
    retries = books.retrier.shards_changed(2.75)
    assert (len(retries.finished), retries.reaggregate) == (1, [])
    assert not books.shard_map.refresh_wanted


def test_a_map_that_still_lacks_the_shard_when_the_time_is_over_is_asked_for_again():
    books = Books()
    books.answer(books.record(*LOWER), stored(1), now=2.0)
    books.shard_map.update(PARENT, 2.5)
    assert len(books.retrier.overdue(4.0).reaggregate) == 8
    assert books.shard_map.refresh_wanted
    books.shard_map.update(PARENT, 4.5)
    books.retrier.shards_changed(4.5)
    assert not books.shard_map.refresh_wanted, "nothing waits for it any more"


@pytest.mark.parametrize("mode", EVERY)
def test_all_inside_the_actual_shard_finishes_and_refreshes(mode):
    books = Books(mode=mode)
    books.shard_map.update(CHILDREN, 0.5)
    record = books.record(*LOWER)
    books.answer(record, stored(1))
    assert [result.shard_id for result in results(record) if result] == [shard_id(1)] * 8
    assert books.refreshes == [1.0]
    assert books.is_closed


@pytest.mark.parametrize("explicit", ["0", str(CHILDREN[0].ending_hash_key)])
@pytest.mark.parametrize("mode", BOTH)
def test_the_bounds_of_a_range_are_inside(mode, explicit):
    books = Books(mode=mode)
    books.shard_map.update(CHILDREN, 0.5)
    records = [UserRecord("k", b"", explicit), UserRecord("k", b"", "5")]
    record = kinesis_record(*records, predicted_shard=shard_id(0))
    books.buffer_limit.reserve(size_bytes=record.user_bytes)
    books.buffer_limit.reserve(size_bytes=0)
    books.generations.retain(0)
    books.answer(record, stored(1))
    assert all(result is not None and result.successful for result in results(record))


def test_just_outside_a_range_is_outside():
    books = Books()
    books.shard_map.update(CHILDREN, 0.5)
    outside = str(CHILDREN[0].ending_hash_key + 1)
    record = kinesis_record(UserRecord("k", b"", "5"), UserRecord("k", b"", outside))
    books.generations.retain(0)
    assert len(books.answer(record, stored(1)).reaggregate) == 2


def test_for_a_kcl_one_user_record_outside_makes_all_of_them_travel_again():
    books = Books()
    books.shard_map.update(CHILDREN, 0.5)
    keys = [*LOWER[:3], UPPER[0]]
    record = books.record(*keys)
    retries = books.answer(record, stored(1))
    # Not as one aggregate, which would miss again: each is aggregated again by the present map.
    assert retries.resend == []
    assert [detached.user_record.partition_key for detached in retries.reaggregate] == keys
    for detached in retries.reaggregate:
        assert detached.history is not None
        assert detached.history.attempt.error_code == "Wrong Shard"
        assert "stored in shardId-000000000001, predicted shardId-000000000000" in (
            detached.history.attempt.error_message or ""
        )
    assert retries.finished == [record]
    assert books.refreshes == [1.0]
    assert books.ledger.delivered == 0


@pytest.mark.parametrize("mode", ["per_user_record", "kpl_compatible"])
def test_the_seed_retries_only_those_outside(mode):
    books = Books(mode=mode)
    books.shard_map.update(CHILDREN, 0.5)
    record = books.record(LOWER[0], UPPER[0], LOWER[1], UPPER[1])
    retries = books.answer(record, stored(1, "5"))
    assert [detached.user_record.partition_key for detached in retries.reaggregate] == UPPER[:2]
    assert [detached.history.attempt.error_code for detached in retries.reaggregate if detached.history] == [
        "Wrong Shard"
    ] * 2
    inside = RecordResult(True, shard_id(1), "5", (SUCCESS,))
    assert results(record) == [inside, None, inside, None]
    assert books.refreshes == [1.0]
    assert books.buffer_limit.outstanding_records == 2


@pytest.mark.parametrize("mode", ["per_user_record", "kpl_compatible"])
def test_the_seed_retries_everything_on_a_shard_it_does_not_know(mode):
    books = Books(mode=mode)
    record = books.record(LOWER[0], UPPER[0])
    assert len(books.answer(record, stored(1)).reaggregate) == 2
    single = books.record(LOWER[0])
    retries = books.answer(single, stored(1))
    assert retries.resend == [(2.0, single)], "it waits for no backoff"
    assert past(single)[-1].error_code == "Wrong Shard"


def test_the_seed_lets_what_is_outside_and_expired_fail_with_both_attempts():
    books = Books(mode="kpl_compatible")
    books.shard_map.update(CHILDREN, 0.5)
    record = books.record(UPPER[0], UPPER[1], arrivals=(0.0, 10.0))
    retries = books.answer(record, stored(1), started_at=29.0, now=31.0)
    assert [detached.user_record.partition_key for detached in retries.reaggregate] == [UPPER[1]]
    expired = results(record)[0]
    assert expired is not None
    assert [each.error_code for each in expired.attempts] == ["Wrong Shard", "Expired"]


def test_consumers_that_do_not_look_at_ranges_get_it_once():
    books = Books(mode="range_blind")
    record = books.record(LOWER[0], UPPER[0])
    assert books.answer(record, stored(1)).reaggregate == []
    assert all(result is not None and result.successful for result in results(record))
    assert books.shard_map.refresh_wanted


@pytest.mark.parametrize("mode", BOTH)
def test_a_late_answer_from_before_the_last_refresh_refreshes_nothing(mode):
    books = Books(mode=mode)
    books.shard_map.update(CHILDREN, 1.5)
    books.answer(books.record(*LOWER[:3]), stored(1), started_at=1.0)
    assert not books.shard_map.refresh_wanted


def test_a_success_on_an_unknown_shard_is_held_until_the_map_says_inside():
    books = Books()
    record = books.record(*LOWER[:2])
    retries = books.answer(record, stored(1, "9"))
    assert (retries.resend, retries.reaggregate, results(record)) == ([], [], [None, None])
    assert books.shard_map.refresh_wanted
    assert books.retrier.user_records_awaiting_map == 2
    books.shard_map.update(CHILDREN, 2.5)
    retries = books.retrier.shards_changed(2.5)
    assert results(record) == [RecordResult(True, shard_id(1), "9", (SUCCESS,))] * 2
    assert retries.reaggregate == []
    assert retries.finished == [record]
    assert books.retrier.user_records_awaiting_map == 0
    assert books.is_closed


def test_a_held_success_is_retried_when_the_map_says_outside():
    books = Books()
    record = books.record(LOWER[0], UPPER[0])
    books.answer(record, stored(1))
    books.shard_map.update(CHILDREN, 2.5)
    assert len(books.retrier.shards_changed(2.5).reaggregate) == 2
    assert books.retrier.user_records_awaiting_map == 0


def test_a_map_that_does_not_know_the_shard_yet_leaves_it_held():
    books = Books()
    record = books.record(*LOWER[:2])
    books.answer(record, stored(1))
    books.shard_map.update(PARENT, 2.5)
    assert books.retrier.shards_changed(2.5).finished == []
    assert results(record) == [None, None]


def test_without_a_map_after_two_seconds_it_counts_as_outside():
    books = Books()
    books.answer(books.record(*LOWER[:2]), stored(1), now=2.0)
    assert books.retrier.next_at == 4.0
    early = books.retrier.overdue(math.nextafter(4.0, 0.0))
    assert (early.reaggregate, early.finished) == ([], [])
    assert len(books.retrier.overdue(4.0).reaggregate) == 2
    assert books.retrier.next_at == math.inf


def test_what_is_held_can_be_taken_back_when_the_producer_closes():
    books = Books()
    record = books.record(*LOWER[:2])
    books.answer(record, stored(1))
    assert list(books.retrier.take_awaiting_map()) == [record]
    assert books.retrier.user_records_awaiting_map == 0


def test_a_refresh_is_asked_for_once_for_each_aggregated_record():
    books = Books(mode="kpl_compatible")
    books.shard_map.update(CHILDREN, 0.5)
    records = [books.record(*LOWER[:4], *UPPER[:4]) for _ in range(3)]
    books.answer(records, [stored(1), stored(2), stored(1)])
    assert len(books.refreshes) == 3


# Bisection


def test_a_validation_error_splits_the_request_in_halves_that_travel_alone():
    books = Books()
    records = [books.record(key) for key in LOWER[:5]]
    retries = books.answer(records, RequestFailure("ValidationException", "1 validation error detected"))
    assert (retries.resend, retries.finished) == ([], [])
    assert all(past(record)[-1].error_code == "ValidationException" for record in records)
    half = books.retrier.bisection.take()
    assert half == records[:2]
    # One at a time: its result decides which is sent next.
    assert books.retrier.bisection.take() is None
    books.answer(half, [stored()] * 2)
    assert books.retrier.bisection.take() == records[2:]


@given(st.integers(1, 60), st.data())
def test_only_the_guilty_record_fails_and_it_is_found_in_a_few_requests(count, data):
    books = Books()
    records = [books.record(LOWER[0]) for _ in range(count)]
    guilty = records[data.draw(st.integers(0, count - 1))]
    sent: list[KinesisRecord] | None = records
    requests = 0
    while sent:
        requests += 1
        if any(record is guilty for record in sent):
            books.answer(sent, RequestFailure("ValidationException", "bad"))
        else:
            books.answer(sent, [stored()] * len(sent))
        sent = books.retrier.bisection.take()
    assert requests <= 2 * math.ceil(math.log2(count)) + 1
    for record in records:
        (delivery,) = deliveries_of(record)
        assert isinstance(delivery, ResultHandle)
        result = delivery.peek()
        assert result is not None
        assert result.successful == (record is not guilty)
    assert books.is_closed
