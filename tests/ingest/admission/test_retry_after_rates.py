"""What one tenant gets of its rate if its clients wait for Retry-After, and if they do not, in virtual time."""

import random
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.admission.admission import Admission
from kpl_integrations.ingest.admission.idempotency import IdempotencyWindow
from kpl_integrations.ingest.admission.refusals import (
    GRACE_SECONDS,
    LONGEST_SECONDS,
    SLACK,
    Refused,
    RetryAfterScheduler,
)
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.tenants import Tenant, TenantQuota

RATE = 100.0
# Each client sends three times the rate.
PAUSE_SECONDS = 1.0 / 300.0
RETURN_SECONDS = 0.002


def served(
    *,
    burst_seconds: float,
    obedient: int = 0,
    impatient: int = 0,
    obedient_records: int = 1,
    pause_seconds: float = PAUSE_SECONDS,
    seconds: float = 60.0,
    rates: Sequence[tuple[float, float]] = (),
) -> tuple[list[float], Counter[str]]:
    """Return the instants of the accepted records, and the outcomes of the retries of clients that obey `Retry-After`.

    `rates` are the changes of this process's lease: instants and rates.
    """
    chance = random.Random(1)
    tenant = Tenant(id="t", records_per_second=RATE, burst_seconds=burst_seconds)
    account = TenantAccount(tenant, keys=IdempotencyWindow(most_keys=1, seconds=1.0), chance=chance.random, now=0.0)
    quota, schedule = account.quota, account.quota_schedule
    assert quota is not None
    events = [(chance.random() / 10.0, client) for client in range(obedient + impatient)]
    heapify(events)
    changes, accepted, waiting, returns = list(rates), [], set(), Counter[str]()
    while (event := heappop(events))[0] < seconds:
        now, client = event
        while changes and changes[0][0] <= now:
            quota.set_rates(changes.pop(0)[1], 1.0, now)
        pause = pause_seconds * chance.uniform(0.97, 1.03)
        outcome = "taken"
        try:
            count = obedient_records if client < obedient else 1
            Admission._require_quota(account, count, 0, now)  # noqa: SLF001 - the rest needs a producer
            schedule.take_due(now)
            accepted += [now] * count
        except Refused as refused:
            outcome = "refused again"
            if client < obedient:
                pause = (refused.retry_after or 0.0) + RETURN_SECONDS
        returns[outcome] += client in waiting
        waiting.discard(client)
        if client < obedient and outcome != "taken":
            waiting.add(client)
        heappush(events, (now + pause, client))
    return accepted, returns


def per_second(accepted: list[float], begin: float, end: float) -> float:
    return sum(begin <= at < end for at in accepted) / (end - begin)


@pytest.mark.parametrize("burst_seconds", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("clients", [1, 5, 20, 110, 150, 1_000])
def test_clients_that_wait_get_the_whole_rate_whatever_its_burst(burst_seconds: float, clients: int) -> None:
    """Retry-After has whole seconds: with a burst of 0.25 s one client got 33 of 100 records a second, 1,000 got 29."""
    accepted, returns = served(burst_seconds=burst_seconds, obedient=clients)
    assert 95 <= per_second(accepted, 5, 60) <= 105
    # A client whose request was accepted sends the next one at once, and may take the place of one that waited.
    assert returns["taken"] >= (0.95 if clients <= 20 else 0.7) * returns.total()
    # One second's worth at once, and one second of the rate.
    assert max(per_second(accepted, second, second + 1) for second in range(59)) <= 2 * RATE


@pytest.mark.parametrize("burst_seconds", [0.25, 1.0])
def test_a_client_that_does_not_wait_gets_the_rate_of_each_lease_at_once(burst_seconds: float) -> None:
    """Its slots of the old, low rate held tokens: it got 84 to 94 of 100 records a second after it had moved here."""
    leases = [(0.0, RATE / 6), (11.0, RATE / 3), (11.5, 60.0), (12.0, RATE)]
    accepted, _ = served(burst_seconds=burst_seconds, impatient=1, seconds=40.0, rates=leases)
    assert per_second(accepted, 12, 14) >= 90
    assert 95 <= per_second(accepted, 13, 40) <= 105
    # A longer burst may be saved in one window and spent in the next.
    slack = 5 if burst_seconds <= 0.25 else 100 * burst_seconds / 5
    for begin in range(13, 35):
        assert 100 - slack <= per_second(accepted, begin, begin + 5) <= 100 + slack


def test_clients_that_wait_find_room_after_the_rate_has_risen() -> None:
    """New slots lay on those of the low rate, and half of the clients were refused again."""
    chance = random.Random(1)
    tenant = Tenant(id="t", records_per_second=RATE, burst_seconds=2.0)
    account = TenantAccount(tenant, keys=IdempotencyWindow(most_keys=1, seconds=1.0), chance=chance.random, now=0.0)
    assert account.quota is not None
    account.quota.set_rates(RATE / 3, 1.0, 0.0)
    # Twice the rate, in requests of 20 records; each client comes back once.
    events: list[tuple[float, float]] = [(number / 10.0 + 0.1 * chance.random(), 0) for number in range(800)]
    heapify(events)
    is_low, returned = True, Counter[bool]()
    while events:
        now, wait = heappop(events)
        if is_low and now >= 10.0:
            account.quota.set_rates(RATE, 1.0, now)
            is_low = False
        is_back = wait > 0 and now - wait >= 10.0
        try:
            Admission._require_quota(account, 20, 0, now)  # noqa: SLF001 - the rest needs a producer
            account.quota_schedule.take_due(now)
            returned[True] += is_back
        except Refused as refused:
            returned[False] += is_back
            retry_after = refused.retry_after or 0
            if not wait and retry_after < LONGEST_SECONDS:
                heappush(events, (now + retry_after + RETURN_SECONDS, retry_after))
    assert returned.total() > 200
    assert returned[True] >= 0.95 * returned.total()


@pytest.mark.parametrize("clients", [3, 110, 300])
def test_clients_that_wait_beside_one_that_does_not_wait_take_no_more_than_the_rate(clients: int) -> None:
    accepted, _ = served(burst_seconds=0.25, obedient=clients, impatient=1)
    assert 95 <= per_second(accepted, 5, 60) <= 105


def test_a_request_larger_than_the_burst_is_accepted_at_its_time_beside_small_ones() -> None:
    """The small ones, of a client that does not wait, took what was saved for it: 46 % of its retries were accepted."""
    accepted, returns = served(burst_seconds=0.1, obedient=1, impatient=1, obedient_records=20, pause_seconds=0.011)
    assert per_second(accepted, 5, 60) <= 105
    assert returns["taken"] >= 0.85 * returns.total()


def test_tokens_above_the_burst_are_kept_only_while_a_client_may_come_back() -> None:
    quota = TenantQuota(Tenant(id="t", records_per_second=RATE, burst_seconds=0.25))
    assert quota.try_take(25, 0, 0.0) is None
    quota.keep_until(1.0, 0.0, booked_seconds=0.5)
    assert [state.remaining for state in quota.states(1, 0, 0.9)] == [90]
    # Never more than one second's worth.
    assert [state.remaining for state in quota.states(1, 0, 1.0)] == [100]
    assert quota.try_take(100, 0, 1.0) is None
    quota.keep_until(1.2 + GRACE_SECONDS, 1.2, booked_seconds=0.5)
    assert quota.try_take(1, 0, 1.2 + GRACE_SECONDS) is None
    # Afterwards the burst is the bound again.
    assert quota.try_take(26, 0, 2.0 + GRACE_SECONDS) is None
    assert quota.try_take(1, 0, 2.0 + GRACE_SECONDS) is not None


def test_slots_are_costed_with_the_rate_in_force() -> None:
    slots = RetryAfterScheduler(lambda: 0.0)
    slots.reprice(6.0, 0.0)
    waits = [slots.assign(2.0, ready_in=2.0, now=0.0) for _ in range(2)]
    assert waits == [2, 5]
    assert slots.booked_seconds(1.5) == pytest.approx(2.7)
    # Two seconds of the low rate are to come in half a second.
    assert slots.is_reserved(1.5, spare_seconds=0.4)
    slots.reprice(1.0, 1.5)
    # At the whole rate they are a third of a second.
    assert not slots.is_reserved(1.5, spare_seconds=0.4)
    # So there is room before the first one.
    assert slots.booked_seconds(1.5) == 0.0
    # The times that were given stay.
    assert not slots.is_reserved(2.0)
    slots.take_due(2.0)
    assert slots.is_reserved(4.9)
    assert not slots.is_reserved(5.0)


COSTS = st.lists(st.floats(0.01, 0.5), min_size=20, max_size=80)


@given(st.floats(1.0, 6.0), COSTS, st.floats(0.0, 30.0), COSTS)
def test_after_a_rise_of_the_rate_slots_need_no_more_than_the_rate_at_any_time_and_leave_none_unused(
    rise: float, before: list[float], now: float, after: list[float]
) -> None:
    slots = RetryAfterScheduler(lambda: 0.0)
    slots.reprice(rise, 0.0)
    booked: list[tuple[float, float]] = []
    for cost in before:
        wait, had = slots.assign(rise * cost, ready_in=0.0, now=0.0), len(booked)
        booked += [(wait, cost)] * (len(slots.slots) - had)
    booked = [each for each in booked if each[0] > now]
    slots.reprice(1.0, now)
    for cost in after:
        wait = slots.assign(cost, ready_in=0.0, now=now)
        booked.append((now + wait, cost))
        if wait < LONGEST_SECONDS:
            assert wait <= SLACK * sum(each for at, each in booked if at < now + wait + 1.0) + 1.0
    # Times are rounded up to seconds, the first slot counts whole, and a request moves a slot of the old rate by its
    # own cost at most.
    inexact = 1.0 + 2.0 * SLACK * max(before + after)
    booked = sorted(each for each in booked if each[0] < now + LONGEST_SECONDS)
    for number, (begin, _) in enumerate(booked):
        needed = 0.0
        for at, cost in booked[number:]:
            needed += SLACK * cost
            assert needed <= at - begin + inexact


def test_a_request_beside_reserved_slots_is_told_to_come_when_the_debt_is_paid() -> None:
    """It was told the end of the slots, and was refused again."""
    account = TenantAccount(
        Tenant(id="t", bytes_per_second=1_000.0, burst_seconds=1.0),
        keys=IdempotencyWindow(most_keys=1, seconds=1.0),
        chance=lambda: 0.0,
        now=0.0,
    )
    assert account.quota is not None
    Admission._require_quota(account, 1, 1_000, 0.0)  # noqa: SLF001 - the rest needs a producer
    with pytest.raises(Refused) as slot:
        Admission._require_quota(account, 1, 100, 0.0)  # noqa: SLF001
    assert slot.value.retry_after == 1
    account.quota.charge(20_000, 0.0)
    with pytest.raises(Refused) as refused:
        Admission._require_quota(account, 1, 100, 0.0)  # noqa: SLF001
    assert refused.value.retry_after is not None
    assert refused.value.retry_after >= 20
