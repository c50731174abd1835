"""When to come back: one after another, never too early, and bounded."""

import math
from heapq import heappop, heappush

from hypothesis import given, strategies as st

from kpl_integrations.ingest.admission.retry_after import LONGEST_SECONDS, MOST_SLOTS, DrainRate, RetryAfterScheduler
from kpl_integrations.ingest.tenants import Tenant, TenantQuota


def no_chance() -> float:
    return 0.0


def test_a_queue_that_nothing_leaves_asks_for_the_longest_wait():
    assert DrainRate(0.0).seconds_for(1) == LONGEST_SECONDS


def test_the_rate_follows_what_leaves():
    drain = DrainRate(0.0)
    for second in range(1, 40):
        drain.observe(second * 100, float(second))
    assert math.isclose(drain.seconds_for(50), 0.5, rel_tol=0.05)
    for second in range(40, 60):
        drain.observe(3_900, float(second))
    assert drain.seconds_for(50) > 5


def test_those_who_are_refused_together_return_one_after_another():
    slots = RetryAfterScheduler(no_chance)
    waits = [slots.assign(1.0, ready_in=1.0, now=0.0) for _ in range(10)]
    assert waits == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_newcomer_is_kept_out_while_others_were_told_to_return():
    slots = RetryAfterScheduler(no_chance)
    assert not slots.is_reserved(0.0)
    assert slots.assign(1.0, ready_in=2.0, now=0.0) == 2
    assert slots.is_reserved(1.0)
    assert not slots.is_reserved(2.1)
    assert not slots.is_reserved(2.2)


def test_whoever_does_not_return_loses_the_slot():
    slots = RetryAfterScheduler(no_chance)
    slots.assign(1.0, ready_in=1.0, now=0.0)
    slots.assign(1.0, ready_in=1.0, now=0.0)
    assert not slots.is_reserved(10.0)
    assert len(slots) == 0


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 100.0), st.floats(0.0, 1_000.0)), max_size=200))
def test_a_wait_is_whole_seconds_within_its_bounds_and_never_before_there_is_room(requests):
    slots = RetryAfterScheduler(lambda: 0.999)
    now = 0.0
    for passed, cost, ready_in in requests:
        now += passed
        wait = slots.assign(cost, ready_in=ready_in, now=now)
        assert isinstance(wait, int)
        assert max(1, ready_in) <= wait <= math.ceil(max(ready_in, LONGEST_SECONDS) * 1.25)
    assert len(slots) <= MOST_SLOTS


def test_of_clients_that_obey_nineteen_in_twenty_are_taken_at_their_first_return():
    """Fifty clients of one tenant want twice its rate, and start together."""
    tenant = Tenant(id="t", records_per_second=100)
    quota, slots = TenantQuota(tenant), RetryAfterScheduler(no_chance)
    events = [(0.001 * client, client, False) for client in range(50)]
    returned = taken_at_once = served = 0
    while events:
        now, client, is_return = heappop(events)
        if now > 120:
            break
        wait = 0.0 if slots.is_reserved(now) else quota.try_take(10, 1, now)
        returned += is_return
        if wait is None:
            served += 10
            taken_at_once += is_return
            heappush(events, (now + 2.5, client, False))
        else:
            told = slots.assign(0.1, ready_in=wait, now=now)
            heappush(events, (now + told + 0.003 * (client % 10), client, True))
    assert returned > 500
    assert taken_at_once / returned >= 0.95
    # And it does not cost the tenant its rate.
    assert served >= 0.9 * 100 * 120
