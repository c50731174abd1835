"""Finding the invalid record of a request, and finding out that it is no single one."""

import math

import pytest
from hypothesis import given, strategies as st

from kpl_core.options.config import Config
from kpl_core.options.stage_rules import collection_rules
from kpl_core.pipeline.collector import Collector
from kpl_core.pipeline.send_queue import PATIENCE_SECONDS, WITNESSES, Bisection, SendingPause, SendQueue
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.put_records import RequestFailure
from tests.pipeline.books import LOWER, Books, results, stored
from tests.support.material import kinesis_record

INVALID = RequestFailure("ValidationException", "1 validation error detected")


def ask_all(books: Books, records: list[KinesisRecord], guilty: set[int]) -> int:
    """Answer as a service to which the records at these places are invalid; return how many requests it took."""
    guilty_ids = {id(records[index]) for index in guilty}
    sent: list[KinesisRecord] | None = records
    requests = 0
    while sent:
        requests += 1
        bad = any(id(record) in guilty_ids for record in sent)
        books.answer(sent, INVALID if bad else [stored()] * len(sent))
        sent = books.retrier.bisection.take()
    return requests


# Records of a request, all of them invalid: requests until that is known.
WHOLLY_INVALID = [(1, 1), (2, 3), (3, 5), (4, 7), (16, 11), (100, 16), (500, 20)]


@pytest.mark.parametrize(("count", "requests"), WHOLLY_INVALID)
def test_a_request_that_is_invalid_as_a_whole_is_given_up_after_a_stated_number(count: int, requests: int) -> None:
    books = Books()
    records = [books.record(LOWER[0]) for _ in range(count)]
    assert ask_all(books, records, set(range(count))) == requests
    failed = [result for record in records for result in results(record) if result is not None]
    assert [result.error_code for result in failed] == ["ValidationException"] * count
    unasked = [result for result in failed if "not sent alone" in (result.error_message or "")]
    assert len(unasked) == max(0, count - WITNESSES)
    assert books.is_closed


@given(st.integers(1, 80), st.data())
def test_few_invalid_records_are_found_and_no_other_record_fails(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), max_size=WITNESSES - 1))
    books = Books()
    records = [books.record(LOWER[0]) for _ in range(count)]
    requests = ask_all(books, records, guilty)
    assert requests <= 1 + 2 * len(guilty) * math.ceil(math.log2(max(2, count)))
    for index, record in enumerate(records):
        assert [result is not None and result.successful for result in results(record)] == [index not in guilty]
    assert books.is_closed


@given(st.sets(st.integers(0, 31), max_size=32))
def test_invalid_records_all_over_a_request_differ_from_an_invalid_request_by_their_neighbours(
    pairs: set[int],
) -> None:
    """However many are guilty: as long as of each two neighbours one is not, no innocent record fails."""
    books = Books()
    records = [books.record(LOWER[0]) for _ in range(64)]
    guilty = {2 * pair + pair % 2 for pair in pairs}
    ask_all(books, records, guilty)
    for index, record in enumerate(records):
        assert [result is not None and result.successful for result in results(record)] == [index not in guilty]
    assert books.is_closed


def test_another_request_that_is_stored_speaks_against_giving_up() -> None:
    books = Books()
    records = [books.record(LOWER[0]) for _ in range(8)]
    books.answer(records, INVALID)
    while piece := books.retrier.bisection.take():
        books.answer(piece, INVALID)
        books.answer(books.record(LOWER[1]), stored())
    # Each was asked alone.
    messages = [result.error_message for record in records for result in results(record) if result is not None]
    assert messages == ["1 validation error detected"] * 8


def test_a_piece_that_fails_otherwise_leaves_the_bisection_and_lets_the_next_one_go() -> None:
    books = Books()
    records = [books.record(LOWER[0]) for _ in range(4)]
    books.answer(records, INVALID)
    piece = books.retrier.bisection.take()
    assert piece == records[:2]
    retries = books.answer(piece, RequestFailure("InternalFailure", "oops"))
    assert [record for _, record in retries.resend] == records[:2]
    assert books.retrier.bisection.take() == records[2:]


def test_a_record_that_was_in_no_company_is_no_witness() -> None:
    books = Books()
    records = [books.record(LOWER[0]) for _ in range(4)]
    books.answer(records, INVALID)
    for _ in range(WITNESSES):
        books.answer(books.record(LOWER[1]), INVALID)
    assert books.retrier.bisection.take() == records[:2]


def test_the_records_of_a_second_refused_request_are_sent_in_their_order():
    bisection = Bisection()
    first, second = ([kinesis_record() for _ in range(4)] for _ in range(2))
    bisection.split(first)
    bisection.split(second)
    pieces = []
    while piece := bisection.take():
        pieces.append(piece)
        bisection.returned(piece)
    assert pieces == [first[:2], first[2:], second[:2], second[2:]]


def test_what_waits_expires_two_seconds_after_its_time_and_its_neighbours_stay() -> None:
    bisection = Bisection()
    records = [kinesis_record(expires_at=10.0 + index) for index in range(4)]
    bisection.split(records)
    assert bisection.next_wakeup() == -math.inf
    assert bisection.next_wakeup(may_send=False) == 10.0 + PATIENCE_SECONDS
    assert bisection.take_expired(11.9) == []
    assert bisection.take_expired(13.0) == records[:2]
    assert bisection.next_wakeup(may_send=False) == 12.0 + PATIENCE_SECONDS
    assert bisection.take() == records[2:]
    assert bisection.next_wakeup() == math.inf
    assert bisection.take_expired(math.inf) == []


def test_a_piece_leaves_at_once_although_collected_records_wait():
    collector, bisection = Collector(collection_rules(Config())), Bisection()
    queue = SendQueue(collector, bisection, SendingPause(float))
    collector.add(kinesis_record(expires_at=5.0), 0.0)
    waits_until = queue.next_wakeup(may_send=True)
    assert 0.0 < waits_until < math.inf
    bisection.split([kinesis_record(expires_at=9.0) for _ in range(2)])
    assert queue.next_wakeup(may_send=True) == -math.inf


def test_no_record_joins_a_probe_or_a_piece():
    collector, bisection = Collector(collection_rules(Config())), Bisection()
    pause = SendingPause(float)
    queue = SendQueue(collector, bisection, pause)
    collector.add(kinesis_record(), 0.0)
    assert queue.free_places(1.0) > 0
    pause.is_failing = True
    assert queue.free_places(1.0) == 0
    pause.is_failing = False
    bisection.split([kinesis_record() for _ in range(2)])
    assert queue.free_places(1.0) == 0
