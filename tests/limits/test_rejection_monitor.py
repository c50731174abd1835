"""The monitor signals backpressure above 5 % of rejections in the last minute, and ends it well below."""

import math

import pytest
from hypothesis import given, strategies as st

from kpl_core.errors import ConfigError
from kpl_core.limits import RejectionMonitor


def test_exactly_five_percent_is_not_backpressure():
    monitor = RejectionMonitor()
    for _ in range(95):
        monitor.record(True, 0.0)
    for _ in range(5):
        assert not monitor.record(False, 0.0)
    assert monitor.rejected_share(0.0) == 0.05
    assert monitor.record(False, 0.0)


def test_the_callback_is_called_once_at_the_start_and_once_at_the_end():
    told: list[bool] = []
    monitor = RejectionMonitor(on_change=told.append)
    for _ in range(90):
        monitor.record(True, 0.0)
    for _ in range(10):
        monitor.record(False, 1.0)
    assert told == [True]
    assert not monitor.is_ready(1.0)

    for _ in range(1_000):
        monitor.record(True, 2.0)
    assert told == [True, False]
    assert monitor.is_ready(2.0)


def test_between_the_thresholds_nothing_changes():
    told: list[bool] = []
    monitor = RejectionMonitor(raise_above=0.10, clear_below=0.02, on_change=told.append)
    for _ in range(94):
        monitor.record(True, 0.0)
    for _ in range(6):
        monitor.record(False, 0.0)
    assert told == []
    for _ in range(6):
        monitor.record(False, 0.0)
    assert told == [True]
    for _ in range(200):
        monitor.record(True, 0.0)
    assert 0.02 < monitor.rejected_share(0.0) < 0.10
    assert told == [True]


def test_decisions_older_than_a_minute_do_not_count():
    monitor = RejectionMonitor()
    for _ in range(20):
        monitor.record(False, 100.0)
    assert monitor.has_backpressure(159.9)

    assert not monitor.has_backpressure(161.0)
    assert monitor.rejected_share(161.0) == 0.0


def test_the_signal_ends_with_time_and_calls_the_callback():
    told: list[bool] = []
    monitor = RejectionMonitor(on_change=told.append, min_requests=1)
    monitor.record(False, 0.0)

    assert monitor.is_ready(1_000.0)
    assert told == [True, False]


def test_an_instant_before_the_latest_counts_as_the_latest():
    monitor = RejectionMonitor()
    monitor.record(True, 100.0)
    monitor.record(False, 50.0)

    assert monitor.rejected_share(150.0) == 0.5
    assert monitor.rejected_share(0.0) == 0.5


def test_memory_is_constant_at_any_rate():
    monitor = RejectionMonitor()
    for number in range(20_000):
        monitor.record(True, number / 100)

    assert len(monitor._steps) <= 62  # noqa: SLF001 - its memory, seen from inside


@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=80))
def test_the_window_covers_sixty_to_sixty_one_seconds(decisions):
    monitor = RejectionMonitor()
    seen: list[tuple[float, bool]] = []
    now = 0.0
    for wait, granted in decisions:
        now += wait
        seen.append((now, granted))
        monitor.record(granted, now)
        share = monitor.rejected_share(now)
        windows = [[granted for at, granted in seen if at >= now - seconds] for seconds in (60.0, 61.0)]
        rejected = [sum(not granted for granted in window) for window in windows]
        assert rejected[0] / len(windows[1]) <= share <= rejected[1] / len(windows[0])


@pytest.mark.parametrize(("raise_above", "clear_below"), [(-0.1, None), (1.0, None), (0.05, 0.06), (math.nan, 0.0)])
def test_thresholds_must_be_in_order(raise_above, clear_below):
    with pytest.raises(ConfigError, match="raise_above is"):
        RejectionMonitor(raise_above=raise_above, clear_below=clear_below)


def test_one_rejection_in_an_idle_minute_is_not_backpressure():
    monitor = RejectionMonitor()
    assert not monitor.record(False, 0.0)
    assert monitor.is_ready(0.0)
    assert monitor.rejected_share(0.0) == 1.0
    for _ in range(18):
        assert not monitor.record(False, 1.0)
    # The twentieth request of the minute.
    assert monitor.record(False, 1.0)


def test_the_signal_ends_when_the_requests_are_too_few():
    monitor = RejectionMonitor(min_requests=5)
    for second in range(5):
        monitor.record(False, float(second))
    assert monitor.has_backpressure(4.0)
    assert monitor.is_ready(62.0)


def test_the_minimum_of_requests_is_at_least_one():
    assert RejectionMonitor(min_requests=1).record(False, 0.0)
    with pytest.raises(ConfigError, match="min_requests is 0"):
        RejectionMonitor(min_requests=0)


@pytest.mark.parametrize("window_seconds", [0, -1, math.nan, math.inf])
def test_the_window_must_be_finite_and_positive(window_seconds):
    with pytest.raises(ConfigError, match="window_seconds is"):
        RejectionMonitor(window_seconds=window_seconds)


@pytest.mark.parametrize("now", [math.inf, -math.inf, math.nan, "1", None])
def test_an_instant_that_is_no_finite_number_is_a_value_error_and_counts_nothing(now):
    monitor = RejectionMonitor(min_requests=1)
    monitor.record(False, 1.0)
    with pytest.raises(ValueError, match=r"now is .*; it must be .* .seconds."):
        monitor.record(False, now)
    with pytest.raises(ValueError, match="now is"):
        monitor.has_backpressure(now)
    assert monitor.rejected_share(1.0) == 1.0
    assert monitor.record(True, 2.0)
