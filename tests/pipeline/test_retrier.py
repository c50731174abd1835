"""The table in effect: attempts, expiry and delays."""

import pytest

from kpl_core.pipeline.retrier import BackoffQueue, Retrier
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.put_records import PutRecordsEntry, RequestFailure
from kpl_core.records.record_result import Attempt, RecordResult
from tests.pipeline.books import (
    BOTH,
    CURABLE,
    EVERY,
    INCURABLE,
    LOWER,
    SUCCESS,
    THROTTLED,
    UPPER,
    Books,
    failure,
    past,
    refused,
    results,
    stored,
)
from tests.support.material import kinesis_record, shard_id


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.parametrize("predicted", [shard_id(0), None])
def test_success_where_predicted_or_without_a_prediction_finishes(mode, predicted):
    books = Books(mode=mode)
    record = books.record(*LOWER[:3], predicted_shard=predicted)
    retries = books.answer(record, stored(0, "77"))
    assert results(record) == [RecordResult(True, shard_id(0), "77", (SUCCESS,))] * 3
    assert (retries.resend, retries.reaggregate, books.refreshes) == ([], [], [])
    assert (books.ledger.delivered, books.ledger.delivered_bytes) == (3, record.user_bytes)
    assert books.is_closed


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.parametrize("code", [THROTTLED, *CURABLE])
def test_a_failed_request_is_retried_whole_with_code_and_message(mode, code):
    books = Books(mode=mode)
    records = [books.record(*LOWER[:2]), books.record(*UPPER[:2])]
    retries = books.answer(records, RequestFailure(code, "why"))
    assert [record for _, record in retries.resend] == records
    for record in records:
        assert results(record) == [None, None]
        assert past(record) == (failure(code, "why"),)
    assert books.buffer_limit.outstanding_records == 4


@pytest.mark.parametrize("mode", EVERY)
def test_a_throttled_request_fails_every_user_record_if_the_caller_prefers_it(mode):
    books = Books(mode=mode, fail_if_throttled=True)
    records = [books.record(*LOWER[:2]), books.record(*UPPER[:1])]
    retries = books.answer(records, RequestFailure(THROTTLED, "slow down"))
    assert retries.resend == []
    expected = RecordResult(False, None, None, (failure(THROTTLED, "slow down"),))
    assert [*results(records[0]), *results(records[1])] == [expected] * 3
    assert books.ledger.failed == {THROTTLED: 3}
    assert books.is_closed


@pytest.mark.parametrize("mode", EVERY)
def test_a_partial_answer_retries_exactly_what_was_refused(mode):
    books = Books(mode=mode)
    records = [books.record(key) for key in LOWER[:4]]
    retries = books.answer(records, [stored(0, "1"), refused(), stored(0, "2"), refused("InternalFailure", "oops")])
    assert [record for _, record in retries.resend] == [records[1], records[3]]
    assert [result.successful for record in records for result in results(record) if result] == [True, True]
    assert retries.throttled == {shard_id(0): 1}
    assert retries.sent == {shard_id(0): 4}
    assert books.buffer_limit.outstanding_records == 2


@pytest.mark.parametrize("mode", EVERY)
def test_a_throttled_record_fails_alone_if_the_caller_prefers_it(mode):
    books = Books(mode=mode, fail_if_throttled=True)
    first, second, third = (books.record(key) for key in LOWER[:3])
    retries = books.answer([first, second, third], [refused(), stored(), refused("InternalFailure")])
    assert [result.error_code for result in results(first) if result] == [THROTTLED]
    assert [record for _, record in retries.resend] == [third]


@pytest.mark.parametrize("code", [*INCURABLE, "ValidationException"])
def test_what_no_retry_can_cure_fails_at_once_but_not_in_the_kpls_mode(code):
    books = Books()
    record = books.record()
    retries = books.answer(record, RequestFailure(code, "no"))
    attempts = 1
    if code == "InvalidSignatureException":  # signed again once
        assert [record for _, record in retries.resend] == [record]
        assert not retries.request_failed
        books.answer(record, RequestFailure(code, "no"))
        attempts = 2
    assert results(record) == [RecordResult(False, None, None, (failure(code, "no"),) * attempts)]
    assert books.is_closed
    compatible = Books(mode="kpl_compatible")
    record = compatible.record()
    assert compatible.answer(record, RequestFailure(code, "no")).resend
    assert results(record) == [None]


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("by", [-1, 1])
def test_an_answer_with_another_count_is_a_failed_request(mode, by):
    books = Books(mode=mode)
    records = [books.record(key) for key in LOWER[:3]]
    retries = books.answer(records, [stored()] * (3 + by))
    assert [record for _, record in retries.resend] == records
    (attempt,) = past(records[0])
    assert attempt.error_code == "RecordCountMismatch"
    assert attempt.error_message == f"3 records were sent, the answer has {3 + by}"
    assert books.ledger.delivered == 0


@pytest.mark.parametrize("entry", [PutRecordsEntry(), PutRecordsEntry("", shard_id(0), "", "")])
def test_an_entry_without_a_sequence_number_or_an_error_is_no_success(entry):
    books = Books()
    record = books.record()
    assert books.answer(record, entry).resend
    assert past(record)[-1].error_code == "Internal"


def test_some_endpoints_send_an_empty_error_code_with_a_success():
    books = Books()
    record = books.record()
    books.answer(record, PutRecordsEntry("49", shard_id(0), "", ""))
    assert [result.successful for result in results(record) if result] == [True]


# Attempts and expiry


def test_every_pass_is_one_attempt_and_the_result_keeps_them_all():
    books = Books()
    record = books.record(arrivals=(0.0,))
    books.answer(record, refused("InternalFailure", "first"), started_at=0.0, now=5.0)
    books.answer(record, RequestFailure("Internal", "second"), started_at=11.0, now=18.0)
    books.answer(record, stored(0, "7"), started_at=20.0, now=21.0)
    assert results(record) == [
        RecordResult(
            True,
            shard_id(0),
            "7",
            (
                failure("InternalFailure", "first", started_at=0.0, ended_at=5.0),
                failure("Internal", "second", started_at=11.0, ended_at=18.0),
                Attempt(True, None, None, 20.0, 21.0),
            ),
        )
    ]


@pytest.mark.parametrize("mode", BOTH)
def test_a_failure_after_the_time_to_live_adds_a_second_attempt_expired(mode):
    books = Books(mode=mode)
    record = books.record(arrivals=(0.0,))
    retries = books.answer(record, refused(THROTTLED, "slow"), started_at=29.0, now=31.0)
    assert (retries.resend, retries.reaggregate) == ([], [])
    (result,) = results(record)
    assert result is not None
    assert [(each.error_code, each.started_at, each.ended_at) for each in result.attempts] == [
        (THROTTLED, 29.0, 31.0),
        ("Expired", 31.0, 31.0),
    ]
    assert books.ledger.failed == {"Expired": 1}
    assert books.is_closed


def test_expiring_while_waiting_is_one_attempt():
    books = Books()
    record = books.record(*LOWER[:2], arrivals=(0.0, 0.5))
    assert books.retrier.expire(record, 30.5) == []
    for result in results(record):
        assert result is not None
        assert [each.error_code for each in result.attempts] == ["Expired"]
        assert "30.500 s after put" in (result.error_message or "")
    assert books.is_closed


def expired_text(books: Books, record: KinesisRecord, now: float) -> str:
    books.retrier.expire(record, now)
    (result,) = results(record)
    assert result is not None
    assert result.error_code == "Expired"
    return result.error_message or ""


def test_an_expired_record_quotes_its_last_real_error():
    books = Books()
    record = books.record(arrivals=(0.0,))
    for failed in (refused(THROTTLED, "slow"), RequestFailure("Internal", "Connect call failed")):
        books.answer(record, failed, started_at=1.0, now=2.0)
    text = expired_text(books, record, 30.5)
    assert text == (
        "not delivered within its time to live, 30.500 s after put; the last attempt: Internal: Connect call failed"
    )


def test_an_expired_record_that_was_never_sent_quotes_what_happened_to_others_meanwhile():
    books = Books()
    first, second, third = (books.record(arrivals=(at,)) for at in (0.0, 1.0, 5.0))
    books.answer(first, RequestFailure("Internal", "x" * 1_000), started_at=1.0, now=2.0)
    assert expired_text(books, second, 31.5).endswith(
        f"; it was not sent; meanwhile others of its stream failed: Internal: {'x' * 300}..."
    )
    # The failure was over before this one was put.
    assert expired_text(books, third, 35.5) == "not delivered within its time to live, 30.500 s after put"


def test_the_neighbours_of_an_expired_user_record_go_on_without_an_attempt():
    books = Books()
    record = books.record(*LOWER[:3], arrivals=(0.0, 10.0, 20.0))
    left = books.retrier.expire(record, 31.0)
    assert [(detached.user_record.partition_key, detached.arrived_at) for detached in left] == [
        (LOWER[1], 10.0),
        (LOWER[2], 20.0),
    ]
    assert [detached.history for detached in left] == [None, None]
    assert results(record)[1:] == [None, None]
    assert books.ledger.failed == {"Expired": 1}
    assert books.buffer_limit.outstanding_records == 2


def test_after_a_failed_attempt_the_expired_have_two_attempts_and_their_neighbours_one():
    books = Books()
    record = books.record(*LOWER[:2], arrivals=(0.0, 10.0))
    retries = books.answer(record, refused(THROTTLED, "slow"), started_at=30.0, now=31.0)
    assert retries.resend == []
    (neighbour,) = retries.reaggregate
    assert neighbour.history is not None
    assert [each.error_code for each in neighbour.history.to_tuple()] == [THROTTLED]
    expired = results(record)[0]
    assert expired is not None
    assert [each.error_code for each in expired.attempts] == [THROTTLED, "Expired"]
    assert retries.finished == [record]


def test_time_to_live_counts_from_arrival_and_no_retry_resets_it():
    books = Books()
    record = books.record(arrivals=(0.0,))
    for now in (10.0, 20.0, 29.9):
        retries = books.answer(record, refused(), started_at=now - 1, now=now)
        assert len(retries.resend) == 1
        assert record.expires_at == 30.0
        assert record.deadline == min(now + 0.05, 30.0)
    assert books.answer(record, refused(), started_at=29.9, now=30.0).resend == []


# Delays


def test_a_refused_record_comes_back_after_a_jittered_exponential_backoff():
    books = Books(chance=0.5)
    record = books.record(arrivals=(0.0,))
    delays = []
    for now in (1.0, 2.0, 3.0, 4.0):
        ((at, _),) = books.answer(record, refused(), started_at=now, now=now).resend
        delays.append(at - now)
    assert delays == pytest.approx([0.025, 0.05, 0.1, 0.2])


def test_the_backoff_never_reaches_past_the_expiration():
    books = Books(chance=1.0, retry_backoff_base_ms=5_000, retry_backoff_cap_ms=5_000)
    record = books.record(arrivals=(0.0,))
    ((at, _),) = books.answer(record, refused(), started_at=28.0, now=28.0).resend
    assert at == record.expires_at == 30.0


def test_records_of_one_shard_refused_together_come_back_together():
    chances = iter([0.1, 0.9])
    books = Books()
    books.retrier = Retrier(books.config, books.shard_map, books.ledger, chance=lambda: next(chances))
    records = [books.record(LOWER[0]), books.record(LOWER[1]), books.record(LOWER[0], predicted_shard=shard_id(9))]
    retries = books.answer(records, [refused()] * 3)
    assert [round(at - 2.0, 6) for at, _ in retries.resend] == [0.005, 0.005, 0.045]


def test_a_failed_request_comes_back_at_one_instant():
    chances = iter([0.5])
    books = Books()
    books.retrier = Retrier(books.config, books.shard_map, books.ledger, chance=lambda: next(chances))
    records = [books.record(LOWER[0], predicted_shard=shard_id(number)) for number in range(3)]
    retries = books.answer(records, RequestFailure("Internal", "timeout"))
    assert {at for at, _ in retries.resend} == {2.025}


def test_a_backoff_queue_has_a_shard_until_its_last_record_has_left():
    queue = BackoffQueue()
    for at, shard in ((1.0, 0), (2.0, 0), (1.5, 1)):
        queue.add(kinesis_record(shard=shard_id(shard)), at)
    for now, has in ((0.5, (True, True)), (1.0, (True, True)), (1.5, (True, False)), (2.0, (False, False))):
        queue.take_due(now)
        assert (queue.has_shard(shard_id(0)), queue.has_shard(shard_id(1))) == has
