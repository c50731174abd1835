"""The refill rate falls under pressure within its band, follows a step without oscillation, and recovers."""

import math
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kpl_core.limits import AdaptiveRefill, TokenBucketLimiter

BASE = 100.0


WINDOW = 10.0


class ByWindow:
    """Gives one report to each window. The first window gets its report twice, because a report must end it."""

    def __init__(self, adaptive: AdaptiveRefill) -> None:
        self._adaptive = adaptive
        self._now = 0.0

    def update(self, latency_seconds: float, refused: float, dead_letter_depth: float) -> float:
        if self._now == 0.0:
            self._adaptive.update(latency_seconds, refused, dead_letter_depth, self._now)
        self._now += WINDOW
        return self._adaptive.update(latency_seconds, refused, dead_letter_depth, self._now)

    @property
    def pressure(self) -> float:
        return self._adaptive.pressure

    @property
    def refused_share(self) -> float:
        return self._adaptive.refused_share


def refill(**references: float) -> tuple[TokenBucketLimiter, ByWindow]:
    limiter = TokenBucketLimiter(1_000, BASE)
    given_references = {"target_latency_seconds": 0.2, "allowed_refused_share": 0.05, "dead_letter_capacity": 1_000}
    return limiter, ByWindow(AdaptiveRefill(limiter, window_seconds=WINDOW, **(given_references | references)))


@pytest.mark.parametrize("refused_every", [50, 100, 200])
def test_refusals_fed_one_by_one_count_as_the_share_of_a_window(refused_every):
    limiter = TokenBucketLimiter(1_000, BASE)
    adaptive = AdaptiveRefill(limiter, target_latency_seconds=0.2, allowed_refused_share=0.01)
    # A hundred answers a second, at half of the target's latency.
    rates = [adaptive.update(0.1, number % refused_every == 0, 0, number / 100) for number in range(1, 20_000)]
    # The pressure is the share of refusals divided by 1 %: 2, 1 and 1/2.
    goal = BASE * (1.0 + 0.2 * (1.0 - 100 / refused_every))
    assert min(rates[2_000:]) >= min(goal, 110.0) - 1.0
    assert rates[-1] == pytest.approx(goal, abs=1.0)
    # One change in a window of ten seconds.
    assert len(set(rates)) <= 20


def test_without_pressure_the_rate_is_the_base_rate():
    limiter, adaptive = refill()

    assert adaptive.pressure == 1.0
    assert adaptive.update(0.2, 0.0, 0) == BASE
    assert limiter.refill_rate == BASE


@pytest.mark.parametrize(
    ("latency", "refused", "depth", "rate"),
    [
        (0.0, 0.0, 0, 120.0),  # idle
        (0.1, 0.0, 0, 110.0),  # twice as fast as the target
        (0.3, 0.0, 0, 90.0),  # 1.5 times as slow as the target
        (0.4, 0.0, 0, 80.0),
        (60.0, 1.0, 10**6, 80.0),  # never less
        (0.0, 0.05, 0, 100.0),
        (0.0, 0.075, 0, 90.0),
        (0.0, 0.0, 1_500, 90.0),
        (0.1, 0.075, 1_200, 90.0),  # the largest decides
    ],
)
def test_the_largest_signal_of_pressure_decides(latency, refused, depth, rate):
    _, adaptive = refill()

    assert adaptive.update(latency, refused, depth) == pytest.approx(rate)


def test_reports_are_smoothed():
    _, adaptive = refill()
    adaptive.update(0.2, False, 0)

    # One answer that is twice as slow as the target moves the average by a fifth of the difference.
    assert adaptive.update(0.4, False, 0) == pytest.approx(96.0)
    assert adaptive.update(0.4, False, 0) == pytest.approx(92.8)


def test_rejections_are_averaged_to_a_share():
    _, adaptive = refill()
    for number in range(200):
        adaptive.update(0.0, number % 20 == 0, 0)

    assert adaptive.refused_share == pytest.approx(0.05, abs=0.05)
    _, constant = refill()
    assert constant.refused_share == 0.0
    constant.update(0.0, True, 0)
    assert constant.refused_share == 1.0


signs = st.tuples(st.floats(0, 10), st.floats(0, 1), st.floats(0, 10_000))


@given(signs, st.integers(0, 2), signs)
def test_a_step_of_a_signal_is_followed_in_ten_reports_without_overshoot(before, which, other):
    after = tuple(other[sign] if sign == which else before[sign] for sign in range(3))
    _, adaptive = refill()
    start = [adaptive.update(*before) for _ in range(100)][-1]
    rates = [adaptive.update(*after) for _ in range(200)]
    goal = rates[-1]

    low, high = min(start, goal), max(start, goal)
    assert all(low - 1e-6 <= rate <= high + 1e-6 for rate in rates)
    assert all(abs(rate - goal) <= 0.05 * BASE for rate in rates[9:])
    assert all(0.8 * BASE <= rate <= 1.2 * BASE for rate in rates)


@given(signs, signs)
def test_pressure_falls_to_no_less_than_half_when_another_signal_becomes_the_largest(before, after):
    # A known weakness: each signal is smoothed before the maximum is taken, so one falls while the other rises.
    _, adaptive = refill()
    for _ in range(100):
        adaptive.update(*before)
    start = adaptive.pressure
    pressures = [adaptive.update(*after) and adaptive.pressure for _ in range(200)]

    assert min(pressures) >= min(start, pressures[-1]) / 2
    assert max(pressures) <= max(start, pressures[-1]) + 1e-9


@given(st.floats(0, 10), st.floats(0, 10))
def test_one_signal_alone_approaches_its_value_from_one_side(before, after):
    _, adaptive = refill()
    for _ in range(100):
        adaptive.update(before, False, 0)
    rates = [adaptive.update(after, False, 0) for _ in range(50)]

    steps = [later - earlier for earlier, later in pairwise(rates)]
    assert all(step >= -1e-9 for step in steps) or all(step <= 1e-9 for step in steps)


def test_one_answer_of_a_minute_affects_the_rate_only_briefly():
    _, adaptive = refill()
    for _ in range(50):
        adaptive.update(0.2, False, 0)
    assert adaptive.update(60.0, False, 0) == pytest.approx(80.0)

    assert [adaptive.update(0.2, False, 0) for _ in range(10)][-1] >= 97.0


@pytest.mark.parametrize(
    "name", ["target_latency_seconds", "allowed_refused_share", "dead_letter_capacity", "window_seconds"]
)
@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_references_must_be_finite_and_positive(name, bad):
    with pytest.raises(ValueError, match=f"{name} is"):
        AdaptiveRefill(TokenBucketLimiter(1_000, BASE), **({"target_latency_seconds": 0.2} | {name: bad}))


@pytest.mark.parametrize("report", [(-1, 0, 0), (math.nan, 0, 0), (0, 1.5, 0), (0, -0.1, 0), (0, 0, math.inf)])
def test_an_invalid_report_changes_nothing(report):
    limiter, adaptive = refill()
    adaptive.update(0.3, False, 0)

    with pytest.raises(ValueError, match="latency_seconds, refused and dead_letter_depth are"):
        adaptive.update(*report)
    assert limiter.refill_rate == pytest.approx(90.0)
    assert adaptive.update(0.3, False, 0) == pytest.approx(90.0)


def test_a_window_of_a_million_answers_takes_the_memory_of_one():
    adaptive = AdaptiveRefill(TokenBucketLimiter(100, 100), target_latency_seconds=0.1)
    adaptive.update(0.1, False, 0, 0.0)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            adaptive.update(0.1, False, 0, 1.0)
        # An entry for each would take 2 MB. The interpreter keeps up to 2,000 freed tuples, which are 128 KB.
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
