"""The sizing rules, and the warning of one of them."""

import math

import pytest

from kpl_core.limits import HeadroomWarning, capacity_for, refill_for


def test_a_capacity_absorbs_thirty_seconds_of_overload():
    assert capacity_for(200) == 6_000
    assert capacity_for(0.5) == 15
    assert capacity_for(33.4, storm_seconds=10) == 334
    assert capacity_for(0.01) == 1


def test_a_refill_above_the_stated_limit_is_allowed_with_a_warning():
    with pytest.warns(HeadroomWarning, match="150/s exceeds the downstream's stated limit of 100/s by 50%"):
        assert refill_for(100) == 150


@pytest.mark.parametrize(("headroom", "rate"), [(1.0, 100.0), (0.8, 80.0)])
def test_a_refill_within_the_stated_limit_gives_no_warning(headroom, rate):
    assert refill_for(100, headroom=headroom) == rate


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_sizes_must_be_finite_and_positive(bad):
    for size in (
        lambda: capacity_for(bad),
        lambda: capacity_for(1, storm_seconds=bad),
        lambda: refill_for(bad),
        lambda: refill_for(1, headroom=bad),
    ):
        with pytest.raises(ValueError, match="must be a finite number above 0"):
            size()
