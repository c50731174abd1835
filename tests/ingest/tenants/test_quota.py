import math

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.tenants import QuotaState, Tenant, TenantQuota


def test_a_tenant_without_rates_is_never_limited():
    quota = TenantQuota(Tenant(id="a"))
    assert quota.try_take(10**9, 10**12, 0.0) is None
    assert quota.states(1, 1, 0.0) == ()


def test_records_and_bytes_are_taken_together_or_not_at_all():
    quota = TenantQuota(Tenant(id="a", records_per_second=10, bytes_per_second=100))
    assert quota.try_take(1, 100, 0.0) is None
    assert quota.try_take(1, 50, 0.0) == pytest.approx(0.5)
    # The rejected request took no records: nine are left, and they need no bytes.
    assert quota.try_take(9, 0, 0.0) is None
    assert quota.try_take(1, 0, 0.0) == pytest.approx(0.1)


def test_the_burst_is_burst_seconds_times_the_rate():
    quota = TenantQuota(Tenant(id="a", records_per_second=10, burst_seconds=3))
    assert quota.try_take(30, 0, 0.0) is None
    assert quota.try_take(1, 0, 0.0) == pytest.approx(0.1)


def test_a_request_above_the_burst_passes_at_a_full_quota_and_leaves_a_debt():
    quota = TenantQuota(Tenant(id="a", records_per_second=10))
    assert quota.try_take(50, 0, 0.0) is None
    assert quota.try_take(1, 0, 0.0) == pytest.approx(4.1)


def test_the_bytes_of_a_rejected_request_are_taken_from_the_byte_rate_only():
    quota = TenantQuota(Tenant(id="a", records_per_second=10, bytes_per_second=100))
    quota.charge(250, 0.0)
    assert quota.try_take(1, 50, 0.0) == pytest.approx(2.0)
    assert quota.try_take(10, 50, 2.0) is None
    without = TenantQuota(Tenant(id="a", records_per_second=10))
    without.charge(10**9, 0.0)
    assert without.try_take(10, 10**6, 0.0) is None


def test_one_rejected_request_costs_a_minute_of_the_rate_at_most():
    quota = TenantQuota(Tenant(id="a", bytes_per_second=100))
    quota.charge(10**9, 0.0)
    assert quota.try_take(1, 1, 0.0) == pytest.approx(59.01)


def test_a_rate_below_one_record_a_second_still_admits_one_record():
    quota = TenantQuota(Tenant(id="a", records_per_second=0.1))
    assert quota.try_take(1, 0, 0.0) is None
    assert quota.try_take(1, 0, 0.0) == pytest.approx(10.0)


def test_states_have_the_values_of_the_header_fields():
    quota = TenantQuota(Tenant(id="a", records_per_second=10, bytes_per_second=1000, burst_seconds=2))
    assert quota.try_take(15, 1000, 0.0) is None
    assert quota.states(1, 1, 0.0) == (QuotaState("records", 20, 2, 5, 0), QuotaState("bytes", 2000, 2, 1000, 0))
    assert [state.ready_in for state in quota.states(10, 1, 0.0)] == [0.5, 0.5]


def test_waits_are_planned_with_the_part_that_a_process_may_claim():
    quota = TenantQuota(Tenant(id="a", records_per_second=100))
    quota.claimable_part = 0.5
    quota.set_rates(1.0, 1.0, 0.0)
    assert quota.slowdown == 2.0
    assert quota.seconds_for(20, 0) == pytest.approx(0.4)
    assert quota.try_take(20, 0, 0.0) is None
    # It is 19 records in debt, and must save one.
    assert quota.states(20, 0, 0.0)[0].ready_in == pytest.approx(0.4)
    quota.set_rates(80.0, 1.0, 0.0)
    assert quota.seconds_for(20, 0) == pytest.approx(0.25)


@given(
    st.floats(0.5, 1000),
    st.floats(0.1, 10),
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 5)), min_size=1, max_size=50),
)
def test_a_tenant_gets_at_most_its_burst_and_rate_and_is_admitted_after_the_returned_wait(rate, burst, requests):
    quota = TenantQuota(Tenant(id="a", records_per_second=rate, burst_seconds=burst))
    now = taken = largest = 0.0
    for records, pause in requests:
        now += pause
        wait = quota.try_take(records, 0, now)
        if wait is not None:
            # Adding a wait to a large instant may lose its last digit.
            now += wait + 1e-9 * (1 + now)
            assert quota.try_take(records, 0, now) is None
        taken += records
        largest = max(largest, records)
        assert taken <= max(1.0, rate * burst) + largest + rate * now + 1e-6
        for state in quota.states(1, 0, now):
            assert 0 <= state.remaining <= max(1, math.ceil(rate * burst))
            assert state.limit >= 1
            assert state.window_seconds >= burst
