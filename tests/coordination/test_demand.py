import math

import pytest

from kpl_core.coordination.demand import DemandMeter, Usage

LIMIT = (1000.0, 1e6)


def usage(offered: float, waiting: float = 0.0, sent: float = 0.0, throttled: float = 0.0) -> Usage:
    return Usage(LIMIT, (offered, offered * 10), (waiting, waiting * 10), sent, throttled)


def test_demand_is_the_offered_load():
    meter = DemandMeter(5.0, usage(0), 0.0)
    for second in range(1, 11):
        meter.measure(usage(100 * second), float(second))
    assert meter.demand == pytest.approx((100.0, 1000.0))


def test_waiting_units_count_as_leaving_within_one_interval():
    meter = DemandMeter(5.0, usage(0), 0.0)
    for second in range(1, 11):
        meter.measure(usage(100 * second, waiting=900), float(second))
    assert meter.demand == pytest.approx((100.0 + 900 / 5, 1000.0 + 9000 / 5))


def test_while_units_wait_demand_is_two_and_a_half_times_the_consumption():
    meter = DemandMeter(5.0, usage(0), 0.0)
    for second in range(1, 11):
        # Callers put as fast as there is room, so the offered load equals the consumption.
        meter.measure(usage(100 * second + 1, waiting=1), float(second))
    assert meter.demand == pytest.approx((250.0, 2500.0), rel=0.01)
    # A rate that has just risen counts at once, less the error of a count.
    meter.measure(usage(1_401, waiting=1), 11.0)
    assert meter.demand == pytest.approx((950.0, 9_500.0), rel=0.01)


def test_units_that_expire_while_waiting_give_no_negative_demand():
    meter = DemandMeter(5.0, usage(0), 0.0)
    meter.measure(usage(500, waiting=500), 1.0)
    meter.measure(usage(0), 2.0)
    assert meter.demand == (0.0, 0.0)


def test_small_records_that_take_the_place_of_expired_large_ones_give_no_negative_demand():
    meter = DemandMeter(5.0, Usage(LIMIT, (100.0, 1e6), (100.0, 1e6)), 0.0)
    meter.measure(Usage(LIMIT, (100.0, 1e6), (100.0, 1e6)), 1.0)
    meter.measure(Usage(LIMIT, (150.0, 500.0)), 7.0)
    assert meter.demand == (pytest.approx(50.0 / 6.0), 0.0)


def test_a_burst_is_visible_at_once():
    meter = DemandMeter(5.0, usage(0), 0.0)
    for second in range(1, 6):
        meter.measure(usage(0), float(second))
    meter.measure(usage(1000), 6.0)
    # Less the error of such a count.
    assert meter.demand[0] == pytest.approx(1000.0 - math.sqrt(1000.0))
    meter.measure(usage(1000), 7.0)
    assert meter.demand[0] == pytest.approx(200.0)


def test_units_waiting_at_the_start_are_demand():
    assert DemandMeter(5.0, usage(0, waiting=500), 0.0).demand == (500.0, 5000.0)


def test_two_measurements_at_one_instant_count_once():
    meter = DemandMeter(5.0, usage(0), 0.0)
    meter.measure(usage(100), 0.0)
    assert meter.demand == (0.0, 0.0)


def test_counts_are_returned_until_they_have_been_reported():
    meter = DemandMeter(5.0, usage(0), 0.0)
    meter.measure(usage(10, sent=10, throttled=3), 1.0)
    assert meter.counts() == (10, 3)
    reported = meter.usage
    meter.measure(usage(10, sent=12, throttled=3), 2.0)
    assert meter.counts() == (12, 3)
    meter.counted(reported)
    assert meter.counts() == (2, 0)


def test_idle_since_is_the_time_of_the_last_offered_load():
    meter = DemandMeter(5.0, usage(0), 0.0)
    for second in range(1, 20):
        meter.measure(usage(min(second, 3)), float(second))
    assert meter.idle_since == 7.0  # five seconds of memory after the last record


def test_the_demand_for_bytes_is_measured_from_the_bytes():
    meter = DemandMeter(5.0, Usage(LIMIT, (0.0, 0.0), (0.0, 0.0), 0.0, 0.0), 0.0)
    for second in range(1, 5):
        meter.measure(Usage(LIMIT, (100.0 * second, 5_000.0 * second), (0.0, 0.0), 0.0, 0.0), float(second))
    meter.measure(Usage(LIMIT, (500.0, 20_000.0), (0.0, 0.0), 0.0, 0.0), 5.0)
    # None in the last second, and 20,000 in the whole interval.
    assert meter.demand == pytest.approx((100.0, 4_000.0))
    meter.measure(Usage(LIMIT, (600.0, 60_000.0), (0.0, 0.0), 0.0, 0.0), 6.0)
    # Most of it in the last second, in which 100 records have an error of 10.
    assert meter.demand == pytest.approx((100.0, 36_000.0))


def test_chance_in_a_short_observation_does_not_raise_the_demand():
    """Three records within 20 ms of one that sends 100 a second were a demand of 150."""
    meter = DemandMeter(1.0, usage(0), 0.0)
    for tenth in range(1, 21):
        meter.measure(usage(10 * tenth), tenth / 10.0)
    meter.measure(usage(203), 2.02)
    assert meter.demand[0] == pytest.approx(100.0, rel=0.02)
