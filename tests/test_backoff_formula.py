"""Exponential backoff: its bounds, its jitter, and the numbers of each of its users."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kpl_core.backoff_formula import ExponentialBackoff

seconds = st.floats(1e-3, 1e6)
failures = st.integers(1, 10**9)
chances = st.floats(0.0, 1.0, exclude_max=True)
factors = st.floats(1.0, 10.0)
jitters = st.sampled_from(["full", "equal"])


@st.composite
def backoffs(draw) -> ExponentialBackoff:
    base = draw(seconds)
    return ExponentialBackoff(
        base_seconds=base, cap_seconds=draw(st.floats(base, 1e9)), factor=draw(factors), jitter=draw(jitters)
    )


@given(backoffs(), failures, chances)
def test_a_wait_is_never_negative_and_never_above_the_cap(backoff, failures, chance):
    wait = backoff.seconds(failures, lambda: chance)
    assert 0.0 <= wait <= backoff.longest_seconds(failures) <= backoff.cap_seconds
    assert math.isfinite(wait)


@given(backoffs(), failures, chances)
def test_equal_jitter_waits_at_least_half_of_the_longest_wait(backoff, failures, chance):
    if backoff.jitter == "equal":
        assert backoff.seconds(failures, lambda: chance) >= backoff.longest_seconds(failures) / 2


@given(backoffs(), st.integers(1, 200))
def test_the_longest_wait_starts_at_the_base_and_never_falls(backoff, count):
    longest = [backoff.longest_seconds(n) for n in range(1, count + 1)]
    assert longest[0] == backoff.base_seconds
    for before, after in pairwise(longest):
        assert before <= after
        assert after == backoff.cap_seconds or after == pytest.approx(before * backoff.factor)


@given(backoffs(), failures, chances, chances)
def test_a_larger_random_number_never_gives_a_shorter_wait(backoff, failures, one, other):
    low, high = sorted((one, other))
    assert backoff.seconds(failures, lambda: low) <= backoff.seconds(failures, lambda: high)


@pytest.mark.parametrize(
    ("failures", "longest"), [(1, 0.05), (2, 0.1), (3, 0.2), (7, 3.2), (8, 5.0), (100, 5.0), (10**9, 5.0)]
)
def test_full_jitter_draws_between_zero_and_the_doubling_wait(failures, longest):
    backoff = ExponentialBackoff(base_seconds=0.05, cap_seconds=5.0)
    assert backoff.seconds(failures, lambda: 0.0) == 0.0
    assert backoff.seconds(failures, lambda: 0.5) == pytest.approx(longest / 2)
    assert backoff.seconds(failures, lambda: 1.0) == pytest.approx(longest)


def test_listing_shards_backs_off_by_half_more_each_time_up_to_30_seconds():
    backoff = ExponentialBackoff(base_seconds=1.0, cap_seconds=30.0, factor=1.5, jitter="equal")
    longest = [backoff.longest_seconds(n) for n in range(1, 11)]
    assert longest == pytest.approx([1, 1.5, 2.25, 3.375, 5.0625, 7.59375, 11.390625, 17.0859375, 25.62890625, 30])
    assert backoff.seconds(2, lambda: 0.0) == 0.75
    assert backoff.seconds(2, lambda: 0.5) == 1.125
