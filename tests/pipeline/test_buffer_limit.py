import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kpl_core.errors import BufferFull
from kpl_core.pipeline.buffer_limit import BufferLimit


def test_records_are_bounded():
    limit = BufferLimit(max_records=2, max_bytes=1_000)
    limit.reserve(size_bytes=1)
    limit.reserve(size_bytes=1)
    assert not limit.has_room(size_bytes=1)
    with pytest.raises(BufferFull):
        limit.reserve(size_bytes=1)
    limit.release(records=1, size_bytes=1)
    limit.reserve(size_bytes=1)


def test_a_bound_may_be_any_number():
    limit = BufferLimit(max_records=10**19, max_bytes=10**30)
    limit.reserve(size_bytes=7)
    assert (limit.outstanding_records, limit.outstanding_bytes) == (1, 7)


def test_bytes_are_bounded():
    limit = BufferLimit(max_records=10, max_bytes=100)
    limit.reserve(size_bytes=60)
    assert limit.has_room(size_bytes=40)
    assert not limit.has_room(size_bytes=41)
    with pytest.raises(BufferFull):
        limit.reserve(size_bytes=41)
    limit.reserve(size_bytes=40)


def test_a_refused_reservation_takes_nothing():
    limit = BufferLimit(max_records=1, max_bytes=100)
    limit.reserve(size_bytes=70)
    with pytest.raises(BufferFull):
        limit.reserve(size_bytes=10)
    assert (limit.outstanding_records, limit.outstanding_bytes) == (1, 70)


def test_the_refusal_says_how_full_it_is_and_what_to_do():
    limit = BufferLimit(max_records=1_000, max_bytes=2_000)
    limit.reserve(size_bytes=1_999)
    with pytest.raises(BufferFull, match=r"1 of 1,000 records and 1,999 of 2,000 bytes .* await put\(\)") as refused:
        limit.reserve(size_bytes=2)
    assert (refused.value.outstanding_records, refused.value.outstanding_bytes) == (1, 1_999)


def test_a_record_above_the_whole_bound_passes_alone_or_its_caller_would_never_return():
    limit = BufferLimit(max_records=10, max_bytes=100)
    limit.reserve(size_bytes=500)
    assert not limit.has_room(size_bytes=1)
    limit.release(records=1, size_bytes=500)
    limit.reserve(size_bytes=1)
    assert not limit.has_room(size_bytes=500)


def test_room_for_several_records_is_asked_for_at_once():
    limit = BufferLimit(max_records=3, max_bytes=100)
    assert limit.has_room(size_bytes=100, records=3)
    assert not limit.has_room(size_bytes=1, records=4)


def test_it_shows_both_counts():
    limit = BufferLimit(max_records=3, max_bytes=100)
    limit.reserve(size_bytes=7)
    assert repr(limit) == "<BufferLimit 1/3 records, 7/100 bytes>"


class AnyUse(RuleBasedStateMachine):
    """After any reservations and releases the counts are those of a plain list, and stay within the bounds."""

    def __init__(self):
        super().__init__()
        self.limit = BufferLimit(max_records=5, max_bytes=100)
        self.held: list[int] = []

    @rule(size=st.integers(0, 120))
    def reserve(self, size):
        fits = len(self.held) < 5 and (sum(self.held) + size <= 100 or not self.held)
        assert self.limit.has_room(size_bytes=size) == fits
        if fits:
            self.limit.reserve(size_bytes=size)
            self.held.append(size)
        else:
            with pytest.raises(BufferFull):
                self.limit.reserve(size_bytes=size)

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 5))
    def release(self, count):
        left, self.held = self.held[:count], self.held[count:]
        self.limit.release(records=len(left), size_bytes=sum(left))

    @invariant()
    def nothing_is_lost(self):
        assert self.limit.outstanding_records == len(self.held) <= 5
        assert self.limit.outstanding_bytes == sum(self.held)
        assert sum(self.held) <= 100 or len(self.held) == 1


TestAnyUse = AnyUse.TestCase


@given(st.lists(st.integers(0, 10**9), max_size=50))
def test_all_released_is_all_free(sizes):
    limit = BufferLimit(max_records=100, max_bytes=10**12)
    for size in sizes:
        limit.reserve(size_bytes=size)
    limit.release(records=len(sizes), size_bytes=sum(sizes))
    assert (limit.outstanding_records, limit.outstanding_bytes) == (0, 0)


def test_the_error_of_a_full_buffer_counts_what_is_reserved_elsewhere_too():
    limit = BufferLimit(max_records=10, max_bytes=1_000)
    limit.reserve(records=4, size_bytes=300)
    full = limit.full(more_records=5, more_bytes=600)
    assert (full.outstanding_records, full.outstanding_bytes) == (9, 900)
    assert "9 of 10 records and 900 of 1,000 bytes" in str(full)
