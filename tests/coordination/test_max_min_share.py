"""Water-filling, compared with an independent oracle that raises all levels step by step."""

import math

import pytest
from hypothesis import given, strategies as st

from kpl_core.coordination.max_min_share import (
    HEADROOM,
    LEAST_HEADROOM,
    SPARE_OF_ALL,
    TRICKLE,
    fair_level,
    shares,
    water_level,
)

rates = st.floats(min_value=0, max_value=1e6)
weights = st.floats(min_value=0.01, max_value=100)
workers = st.lists(st.tuples(rates, weights), min_size=1, max_size=30)
limits = st.floats(min_value=1, max_value=1e6)


def poured(wants: list[float], weights: list[float], limit: float) -> list[float]:
    """Raise the level of all workers until a want is met or the limit is used up, and repeat."""
    granted = [0.0] * len(wants)
    left = limit
    while True:
        open_ = [i for i, want in enumerate(wants) if granted[i] < want - 1e-12 * max(1.0, want)]
        if not open_ or left <= 1e-9 * limit:
            return granted
        rises = [(wants[i] - granted[i]) / weights[i] for i in open_]
        rise = min(left / sum(weights[i] for i in open_), *rises)
        for i in open_:
            granted[i] += rise * weights[i]
        left -= rise * sum(weights[i] for i in open_)


@given(workers, limits)
def test_the_water_level_agrees_with_the_oracle(drawn, limit):
    wants, heavy = [want for want, _ in drawn], [weight for _, weight in drawn]
    level = water_level(wants, heavy, limit)
    got = [min(want, weight * level) for want, weight in drawn]
    assert got == pytest.approx(poured(wants, heavy, limit), rel=1e-6, abs=1e-6 * limit)


def test_if_all_wants_fit_the_level_is_the_highest_mark():
    assert water_level([6.0, 2.0, 1.0], [3.0, 4.0, 5.0], 100.0) == 2.0
    assert water_level([6.0, 2.0, 1.0], [3.0, 3.0, 3.0], 100.0) == 2.0


def test_a_light_worker_beside_many_heavy_ones_has_what_they_leave():
    heavy, wants = [1e6] * 1_001, [1.0] * 1_001
    heavy[1::3], heavy[2::3] = [1e6 / 3] * 334, [1e6 / 7] * 333
    level = water_level([*wants, 1e6], [*heavy, 1e-6], 2_001.0)
    assert 1e-6 * level == pytest.approx(1_000.0)


@given(workers, limits)
def test_the_shares_add_up_to_the_limit_if_it_is_wanted(drawn, limit):
    wants, heavy = [want for want, _ in drawn], [weight for _, weight in drawn]
    granted = shares(limit, wants, heavy)
    unused = max(0.0, limit - sum(want * HEADROOM for want in wants))
    assert limit - (1 - SPARE_OF_ALL) * unused - 1e-9 * limit <= sum(granted) <= limit * (1 + 1e-9)
    if sum(wants) >= limit:
        assert sum(granted) == pytest.approx(limit, rel=1e-9)
    assert min(granted) > 0


@given(workers, limits)
def test_no_share_can_grow_without_reducing_a_smaller_one(drawn, limit):
    wants, heavy = [want for want, _ in drawn], [weight for _, weight in drawn]
    granted = shares(limit, wants, heavy)
    trickle = TRICKLE * limit / sum(heavy)
    for share, want, weight in zip(granted, wants, heavy, strict=True):
        if share < want * LEAST_HEADROOM * (1 - 1e-6):
            level = share / weight
            assert all(
                other / other_weight <= level * (1 + 1e-6) + trickle
                for other, other_weight in zip(granted, heavy, strict=True)
            )


@given(workers, limits)
def test_equal_wants_and_weights_get_equal_shares(drawn, limit):
    want, weight = drawn[0]
    granted = shares(limit, [want, want, *(w for w, _ in drawn)], [weight, weight, *(w for _, w in drawn)])
    assert granted[0] == pytest.approx(granted[1])


def test_one_hot_worker_gets_the_unused_shares_of_nineteen_idle_ones():
    granted = shares(1000.0, [5000.0] + [0.0] * 19, [1.0] * 20)
    assert granted[0] > 950
    assert granted[1] == pytest.approx(TRICKLE * 1000 / 20)


def test_an_infinite_demand_is_allowed():
    assert shares(1000.0, [math.inf, math.inf], [3.0, 1.0]) == pytest.approx([750.0, 250.0])


def test_a_small_demand_has_headroom():
    # The wants, 125 each, and three quarters of the other 750.
    assert shares(1000.0, [100.0, 100.0], [1.0, 1.0]) == pytest.approx([406.25, 406.25])


def test_a_backlog_has_what_others_leave_above_a_small_headroom():
    """With 25 % for each of seven workers, 825 of 1,000 were used."""
    hot, *others = shares(1000.0, [5000.0] + [100.0] * 7, [1.0] * 8)
    assert others == pytest.approx([108.0] * 7)
    assert hot == pytest.approx(244.0)


@given(workers, limits, st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_no_headroom_is_divided_while_a_demand_is_not_met(drawn, limit, drawn_tiers):
    wants, heavy = [want for want, _ in drawn], [weight for _, weight in drawn]
    granted = shares(limit, wants, heavy, drawn_tiers[: len(drawn)])
    trickle = TRICKLE * limit / sum(heavy)
    least = [max(want * LEAST_HEADROOM, trickle * weight) for want, weight in drawn]
    assert sum(granted) <= limit * (1 + 1e-9)
    if any(share < most * (1 - 1e-6) for share, most in zip(granted, least, strict=True)):
        assert all(share <= most * (1 + 1e-6) for share, most in zip(granted, least, strict=True))


def test_of_a_limit_that_nobody_wants_most_stays_unassigned():
    # A worker with a burst gets that at once. The trickle, 40, and 15 % of the other 960 are divided.
    assert shares(1000.0, [0.0, 0.0], [1.0, 1.0]) == pytest.approx([92.0, 92.0])


def test_a_demand_within_the_trickle_counts_as_none():
    assert shares(1000.0, [1.0, 0.0], [1.0, 1.0]) == pytest.approx([92.0, 92.0])


def test_a_higher_tier_is_served_first_and_a_lower_one_keeps_a_trickle():
    critical, bulk = shares(1000.0, [900.0, 900.0], [1.0, 1.0], [0, 2])
    assert critical == pytest.approx(972.0)
    assert bulk == pytest.approx(28.0)


def test_a_lower_tier_gets_what_a_higher_one_leaves():
    critical, bulk = shares(1000.0, [100.0, 5000.0], [1.0, 1.0], [0, 2])
    assert critical == pytest.approx(108.0)
    assert bulk == pytest.approx(892.0)


def test_no_workers_get_no_shares():
    assert shares(1000.0, [], []) == []
    assert fair_level(1000.0, []) == 1000.0
    assert fair_level(1000.0, [1.0, 3.0]) == 250.0
