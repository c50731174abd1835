import pytest
from hypothesis import given, strategies as st

from kpl_core.coordination.lease_table import FLOOR, next_estimate


@pytest.mark.parametrize(
    ("estimate", "throttled", "intervals", "then"),
    [
        (1.0, 0, 1, 1.0),
        (1.0, 10, 1, 1.0),  # 1 % is tolerated
        (1.0, 11, 1, 0.85),
        (0.5, 11, 0, 0.5),  # no time has passed
        (0.5, 500, 7, 0.425),  # one interval at a time
        (0.5, 0, 1, 0.6),
        (0.95, 0, 1, 1.0),
        (0.05, 1000, 1, 0.05),
    ],
)
def test_throttling_lowers_the_estimate_and_its_absence_raises_it(estimate, throttled, intervals, then):
    assert next_estimate(estimate, sent=1000, throttled=throttled, intervals=intervals) == pytest.approx(then)


@given(st.floats(0.05, 1), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 10))
def test_the_estimate_stays_between_5_and_100_percent(estimate, sent, throttled, intervals):
    assert FLOOR <= next_estimate(estimate, sent=sent, throttled=throttled, intervals=intervals) <= 1


@given(st.floats(0.05, 1), st.floats(0, 1e4), st.lists(st.floats(0.01, 0.5), min_size=4, max_size=4))
def test_many_small_steps_equal_one_large_step(estimate, throttled, parts):
    parts = [part / sum(parts) for part in parts]
    small = estimate
    for part in parts:
        small = next_estimate(small, sent=1000, throttled=throttled, intervals=part)
    assert small == pytest.approx(next_estimate(estimate, sent=1000, throttled=throttled, intervals=1))
