import logging
import sys
from types import FrameType

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.logging_handler.entry import ENTRY_BYTES, entry_size
from kpl_integrations.logging_handler.level_queue import EVICTED, FULL, OVERFLOW_RULES, LevelQueue

LEVELS = st.sampled_from([logging.DEBUG, logging.INFO, 25, logging.WARNING, logging.ERROR, logging.CRITICAL])
SIZES = st.integers(0, 400)
STEPS = st.lists(st.one_of(st.tuples(LEVELS, SIZES), st.integers(1, 5)), max_size=80)
RULES = st.sampled_from(sorted(OVERFLOW_RULES))


def queue_of(rule: str, *, max_records: int = 1_000, max_bytes: int = 1_000_000) -> LevelQueue:
    return LevelQueue(max_records=max_records, max_bytes=max_bytes, rule=OVERFLOW_RULES[rule])


def put(queue: LevelQueue, data: bytes, level: int) -> bool:
    return queue.put(data, entry_size(data), level)


def taken(queue: LevelQueue) -> list[object]:
    return [entry for _, entry in queue.take(1_000)]


@given(RULES, STEPS, st.integers(1, 8), st.integers(100, 2_000))
def test_every_record_is_refused_evicted_taken_or_queued_and_the_bounds_hold(rule, steps, max_records, max_bytes):
    queue = queue_of(rule, max_records=max_records, max_bytes=max_bytes)
    offered = 0
    for step in steps:
        if isinstance(step, int):
            queue.take(step)
        else:
            level, size = step
            offered += 1
            put(queue, bytes(size), level)
        assert offered == queue.accepted + queue.dropped[FULL]
        assert queue.accepted == queue.taken + queue.dropped[EVICTED] + len(queue)
        assert len(queue) == max_records - queue.free_records
        assert 0 <= queue.free_bytes <= max_bytes
    queue.take(10_000)
    assert (queue.free_records, queue.free_bytes) == (max_records, max_bytes)


@given(RULES, STEPS, st.integers(0, 79), st.integers(1, 8))
def test_a_watch_ends_when_everything_has_left_that_was_queued_at_its_start(rule, steps, watched_from, max_records):
    """Later records of a higher level leave first, and later ones may be evicted at the end: none of them counts."""
    queue = queue_of(rule, max_records=max_records)
    is_drained, watched = queue.watch_drained(), set()
    for number, step in enumerate(steps):
        if number == watched_from:
            is_drained, watched = queue.watch_drained(), queued(queue)
        if isinstance(step, int):
            queue.take(step)
        else:
            put(queue, str(number).encode(), step[0])
        if is_drained():
            assert not watched & queued(queue)
    queue.take(1_000)
    assert is_drained()


def queued(queue: LevelQueue) -> set[object]:
    return {entry for each in queue._classes for entry in each.entries}  # noqa: SLF001


@given(RULES, st.lists(LEVELS, max_size=60), st.integers(1, 6))
def test_an_error_stays_while_a_lower_level_is_queued(rule, levels, max_records):
    queue = queue_of(rule, max_records=max_records)
    errors = [bytes([number]) for number, level in enumerate(levels) if level >= logging.ERROR]
    for number, level in enumerate(levels):
        put(queue, bytes([number]), level)
    left = [entry for is_highest, entry in queue.take(100) if is_highest]
    assert len(left) == min(len(errors), max_records)


def test_drop_oldest_evicts_the_oldest():
    queue = queue_of("drop_oldest", max_records=2)
    assert [put(queue, data, logging.INFO) for data in (b"1", b"2", b"3")] == [True, True, True]
    assert taken(queue) == [b"2", b"3"]
    assert queue.dropped == {EVICTED: 1}


def test_drop_newest_refuses_the_new_record_unless_it_is_an_error():
    queue = queue_of("drop_newest", max_records=2)
    assert [put(queue, data, logging.INFO) for data in (b"1", b"2", b"3")] == [True, True, False]
    assert put(queue, b"error", logging.ERROR)
    assert taken(queue) == [b"error", b"1"]
    assert queue.dropped == {FULL: 1, EVICTED: 1}


def test_drop_lowest_level_evicts_debug_before_info_before_warning():
    queue = queue_of("drop_lowest_level", max_records=3)
    for data, level in ((b"w", logging.WARNING), (b"d", logging.DEBUG), (b"i", logging.INFO)):
        put(queue, data, level)
    assert put(queue, b"w2", logging.WARNING)
    assert put(queue, b"w3", logging.WARNING)
    assert not put(queue, b"i2", logging.INFO)
    assert taken(queue) == [b"w", b"w2", b"w3"]


def test_no_record_is_evicted_for_one_that_would_not_fit_even_then():
    queue = queue_of("drop_oldest", max_bytes=2 * ENTRY_BYTES + 20)
    put(queue, b"first", logging.INFO)
    assert not put(queue, bytes(1_000), logging.ERROR)
    assert taken(queue) == [b"first"]


def test_errors_are_taken_first():
    queue = queue_of("drop_oldest")
    put(queue, b"info", logging.INFO)
    put(queue, b"error", logging.ERROR)
    assert queue.take(1) == [(True, b"error")]
    assert queue.take(1) == [(False, b"info")]


@pytest.mark.parametrize("level", [None, "INFO", [], {}])
def test_a_record_without_a_level_is_of_the_lowest_class(level):
    queue = queue_of("drop_oldest", max_records=2)
    assert put(queue, b"no level", level)
    assert put(queue, b"error", logging.ERROR)
    assert put(queue, b"another", logging.ERROR)
    assert taken(queue) == [b"error", b"another"]


class _SoftTimeLimit(Exception):  # noqa: N818 - as Celery's
    pass


@pytest.mark.parametrize("rule", OVERFLOW_RULES)
@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_a_signal_handler_that_raises_in_a_put_leaves_counts_and_room_right(rule: str, level: int):
    def is_interrupted_at(number: int) -> bool:
        """Put one more into a full queue, and raise at the begin or end of its call of this number."""
        queue = queue_of(rule, max_records=4)
        for _ in range(4):
            put(queue, b"first", logging.INFO)
        max_bytes = queue.free_bytes + 4 * entry_size(b"first")
        calls: list[str] = []

        def interrupt(frame: FrameType, event: str, called: object) -> None:
            # Where the interpreter runs signal handlers. The end of a generator is a call too, which raises nothing.
            is_generator = frame.f_code.co_name == "<genexpr>"
            if event in {"call", "c_return"} and called is not sys.setprofile and not is_generator:
                calls.append(event)
                if len(calls) == number:
                    raise _SoftTimeLimit

        sys.setprofile(interrupt)
        try:
            put(queue, b"later", level)
        except _SoftTimeLimit:
            pass
        finally:
            sys.setprofile(None)
        assert queue.accepted + queue.refused == len(queue) + queue.dropped.total()
        assert len(queue) == 4 - queue.free_records
        queue.take(4)
        assert (queue.free_records, queue.free_bytes) == (4, max_bytes)
        return len(calls) >= number

    number = 1
    while is_interrupted_at(number):
        number += 1
    assert number > 4
