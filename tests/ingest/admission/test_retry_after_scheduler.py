"""Retry times: one client after another, never too early, and bounded."""

import contextlib
import math
import random
from heapq import heappop, heappush

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.admission.admission import Admission
from kpl_integrations.ingest.admission.idempotency import IdempotencyWindow
from kpl_integrations.ingest.admission.refusals import (
    LONGEST_SECONDS,
    MOST_SLOTS,
    DrainRate,
    Refused,
    RetryAfterScheduler,
)
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.tenants import Tenant, TenantQuota


def no_jitter() -> float:
    return 0.0


def test_a_queue_that_does_not_drain_has_the_longest_wait():
    assert DrainRate(0.0).seconds_for(1) == LONGEST_SECONDS


def test_the_estimate_follows_the_drain_rate():
    drain = DrainRate(0.0)
    for second in range(1, 40):
        drain.observe(second * 100, float(second))
    assert math.isclose(drain.seconds_for(50), 0.5, rel_tol=0.05)
    for second in range(40, 60):
        drain.observe(3_900, float(second))
    assert drain.seconds_for(50) > 5


def test_clients_rejected_together_get_successive_times():
    slots = RetryAfterScheduler(no_jitter)
    waits = [slots.assign(1.0, ready_in=1.0, now=0.0) for _ in range(10)]
    assert waits == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_new_request_is_rejected_while_slots_are_reserved():
    slots = RetryAfterScheduler(no_jitter)
    assert not slots.is_reserved(0.0)
    assert slots.assign(1.0, ready_in=2.0, now=0.0) == 2
    assert slots.is_reserved(1.0)
    # The slot is due until a request has used it.
    assert not slots.is_reserved(2.1)
    assert len(slots.slots) == 1
    slots.take_due(2.1)
    assert len(slots.slots) == 0
    assert not slots.is_reserved(2.2)


def test_a_client_that_does_not_return_loses_its_slot():
    slots = RetryAfterScheduler(no_jitter)
    slots.assign(1.0, ready_in=1.0, now=0.0)
    slots.assign(1.0, ready_in=1.0, now=0.0)
    assert not slots.is_reserved(10.0)
    assert len(slots.slots) == 0


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 100.0), st.floats(0.0, 1_000.0)), max_size=200))
def test_a_wait_is_whole_seconds_within_its_bounds_and_never_before_there_is_capacity(requests):
    slots = RetryAfterScheduler(lambda: 0.999)
    now = 0.0
    for passed, cost, ready_in in requests:
        now += passed
        wait = slots.assign(cost, ready_in=ready_in, now=now)
        assert isinstance(wait, int)
        assert max(1, ready_in) <= wait <= math.ceil(max(ready_in, LONGEST_SECONDS) * 1.25)
    assert len(slots.slots) <= MOST_SLOTS


def test_95_percent_of_obeying_clients_succeed_at_the_first_retry():
    """Fifty clients of one tenant send twice its rate, and start together."""
    tenant = Tenant(id="t", records_per_second=100)
    quota, slots = TenantQuota(tenant), RetryAfterScheduler(no_jitter)
    events = [(0.001 * client, client, False) for client in range(50)]
    returned = taken_at_once = served = 0
    while events:
        now, client, is_return = heappop(events)
        if now > 120:
            break
        wait = 0.0 if slots.is_reserved(now) else quota.try_take(10, 1, now)
        returned += is_return
        if wait is None:
            slots.take_due(now)
            served += 10
            taken_at_once += is_return
            heappush(events, (now + 2.5, client, False))
        else:
            told = slots.assign(0.1, ready_in=wait, now=now)
            heappush(events, (now + told + 0.003 * (client % 10), client, True))
    assert returned > 500
    assert taken_at_once / returned >= 0.95
    # The tenant still gets at least 90 % of its rate.
    assert served >= 0.9 * 100 * 120


@pytest.mark.parametrize("burst_seconds", [0.1, 0.25])
@pytest.mark.parametrize(("parts", "connections", "per_second"), [(6, 2, 25.0), (6, 4, 25.0), (1, 1, 300.0)])
def test_clients_that_ignore_their_retry_time_get_the_whole_rate_in_any_five_seconds(
    burst_seconds: float, parts: int, connections: int, per_second: float
) -> None:
    """Due slots were used up without tokens, and a full bucket was reserved. They got 22 to 80 % of the rate."""
    chance = random.Random(1)
    accepted: list[float] = []
    for _ in range(parts):
        tenant = Tenant(id="t", records_per_second=100.0, burst_seconds=burst_seconds)
        account = TenantAccount(tenant, keys=IdempotencyWindow(most_keys=1, seconds=1.0), chance=chance.random, now=0.0)
        assert account.quota is not None
        account.quota.set_rates(100.0 / parts, 1.0, 0.0)
        events = [(chance.random() / per_second, index) for index in range(connections)]
        while True:
            now, index = heappop(events)
            if now > 40.0:
                break
            with contextlib.suppress(Refused):
                Admission._require_quota(account, 1, 0, now)  # noqa: SLF001 - the rest needs a producer
                accepted.append(now)
            heappush(events, (now + chance.uniform(0.95, 1.1) / per_second, index))
    for start in range(1, 35):
        assert 95 * 5 <= sum(start <= at < start + 5 for at in accepted) <= 105 * 5
