"""What one client may use before its request is accepted. Times are literal.

Conservation: a room's bytes are those of its bodies. Bound: never more than the room has, and never more refused bytes
than the burst and the rate allow.
"""

from functools import partial

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.admission.clients import (
    MOST_ADDRESSES,
    REFUSED_BYTES_AT_ONCE,
    REFUSED_BYTES_PER_SECOND,
    AddressBudgets,
    ClientRoom,
    HeldBody,
    RefusedBytes,
    SharedRoom,
    network_of,
)
from kpl_integrations.ingest.admission.idempotency import IdempotencyWindow
from kpl_integrations.ingest.admission.refusals import GRACE_SECONDS, REFUSALS, Refused
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.tenants import Tenant

ROOM = 1_000


def body_of(room: SharedRoom, client: str, size: int = 0) -> HeldBody:
    held = ClientRoom(room, client).hold(lambda: None)
    assert not size or held.try_take(size)
    return held


def test_one_client_may_use_the_whole_room() -> None:
    room = SharedRoom(ROOM)
    bodies = [body_of(room, "a", 100) for _ in range(10)]
    assert not body_of(room, "a").try_take(1)
    bodies[0].release()
    assert body_of(room, "a").try_take(100)


def test_a_newcomer_gets_room_from_the_largest_body_of_the_client_that_uses_most() -> None:
    room = SharedRoom(ROOM)
    evicted: list[str] = []
    for client, size in (("a", 200), ("a", 300), ("b", 400), ("c", 100)):
        name = f"{client}{size}"
        assert ClientRoom(room, client).hold(partial(evicted.append, name)).try_take(size)
    assert body_of(room, "new").try_take(50)
    assert evicted == ["a300"]
    assert room.used_bytes == 750


@pytest.mark.parametrize("others", [1, 2, 5, 20])
def test_a_newcomer_gets_an_equal_share_however_much_the_others_want(others: int) -> None:
    room = SharedRoom(ROOM)
    for _ in range(100):
        for number in range(others):
            body_of(room, f"{number}").try_take(10)
    share = ROOM // (others + 1) // 10 * 10
    assert all(body_of(room, "new").try_take(10) for _ in range(share // 10))


def test_an_evicted_body_gets_no_more_bytes_and_counts_once() -> None:
    room = SharedRoom(ROOM)
    large = body_of(room, "a", ROOM)
    small = body_of(room, "b", 10)
    assert large.is_evicted
    assert not large.try_take(1)
    large.release()
    assert room.used_bytes == small.size_bytes == 10


def test_a_body_that_is_alone_gets_its_bytes_also_above_the_size_of_the_room() -> None:
    room = SharedRoom(10)
    alone = body_of(room, "a", 60)
    assert alone.try_take(40)
    assert not body_of(room, "b").try_take(100)
    alone.release()
    assert body_of(room, "b").try_take(100)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 700), st.booleans()), max_size=60))
def test_a_room_counts_every_byte_once_and_a_small_client_is_never_refused(steps) -> None:
    room = SharedRoom(ROOM)
    bodies: list[HeldBody] = []
    for client, size, ends in steps:
        if ends and bodies:
            bodies.pop(0).release()
            continue
        body = ClientRoom(room, client).hold(lambda: None)
        before = room.bytes_of(client)
        if body.try_take(size):
            bodies.append(body)
        else:
            # Refused only at or above an equal share of the room among four clients.
            assert before + size > ROOM // 4
        bodies = [each for each in bodies if not each.is_evicted]
        assert room.used_bytes == sum(each.size_bytes for each in bodies) <= ROOM
        assert room.used_bytes == sum(room.bytes_of(each) for each in "abcd")
    for body in bodies:
        body.release()
    assert room.used_bytes == 0


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(1, 2**24)), min_size=1, max_size=60))
def test_refused_bytes_are_bounded_by_burst_rate_and_one_request(requests) -> None:
    budget = RefusedBytes()
    now, charged = 0.0, 0
    for pause, size in requests:
        now += pause
        if budget.wait_seconds(now) == 0:
            budget.charge(size, now)
            charged += size
    most = REFUSED_BYTES_AT_ONCE + REFUSED_BYTES_PER_SECOND * now + max(size for _, size in requests)
    assert charged <= most * (1 + 1e-9)


def test_an_overdrawn_budget_says_exactly_when_the_next_request_is_read() -> None:
    budget = RefusedBytes()
    budget.charge(REFUSED_BYTES_AT_ONCE, 100.0)
    assert budget.wait_seconds(100.0) == 0
    budget.charge(3 * REFUSED_BYTES_PER_SECOND, 100.0)
    assert budget.wait_seconds(100.0) == pytest.approx(3.0)
    assert budget.wait_seconds(103.0) == pytest.approx(0.0)
    assert budget.wait_seconds(1_000.0) == 0


def test_refused_requests_cost_a_wait_of_at_most_a_minute() -> None:
    budget = RefusedBytes()
    for _ in range(100):
        budget.charge(16 * 1024 * 1024, 100.0)
    assert budget.wait_seconds(100.0) == pytest.approx(60.0)
    assert budget.wait_seconds(160.1) == 0


def test_addresses_have_separate_budgets_and_their_number_is_bounded() -> None:
    budgets = AddressBudgets()
    budgets.charge("192.0.2.3", 100, 0.0)
    assert not budgets.makes_wait(0.0)
    budgets.charge("192.0.2.1", 2 * REFUSED_BYTES_AT_ONCE, 0.0)
    assert [budgets.makes_wait(at) for at in (0.0, 15.0, 16.1)] == [True, True, False]
    with pytest.raises(Refused, match="refused requests of this address cost 33,554,432 bytes"):
        budgets.require("192.0.2.1", 0.0)
    budgets.require("192.0.2.2", 0.0)
    budgets.require("192.0.2.1", 60.0)
    for number in range(MOST_ADDRESSES + 10):
        budgets.charge(f"10.{number}", 1, 0.0)
        budgets.charge("free", 0, 0.0)
    assert len(budgets.by_address) == MOST_ADDRESSES


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", ""),
        ("a socket", "a socket"),
    ],
)
def test_an_ipv6_client_counts_as_its_network(address: str, network: str) -> None:
    assert network_of(address) == network


def account_of(tenant: Tenant) -> TenantAccount:
    return TenantAccount(tenant, keys=IdempotencyWindow(most_keys=1, seconds=1.0), chance=lambda: 0.0, now=0.0)


# Statuses with which a tenant's bytes cost only its decoding budget: the same request may succeed later.
ONLY_BUDGET = {409, 429}


@pytest.mark.parametrize(("refusal", "row"), REFUSALS.items(), ids=[each.value for each in REFUSALS])
def test_a_refusal_costs_its_client_unless_the_gateway_or_kinesis_is_the_cause(refusal, row):
    costs_budget = row.status < 500
    costs_rate = costs_budget and row.status not in ONLY_BUDGET
    account = account_of(Tenant(id="a", bytes_per_second=1e6))
    refused = Refused(refusal, "")
    refused.work_bytes = REFUSED_BYTES_AT_ONCE
    account.count_refused(refused, 10 * REFUSED_BYTES_PER_SECOND, 0.0)
    assert account.refused == {refusal: 1}
    wait = 0.0 if account.refused_bytes is None else account.refused_bytes.wait_seconds(0.0)
    assert wait == pytest.approx(10.0 if costs_budget else 0.0)
    assert account.quota is not None
    assert (account.quota.spare_seconds(0, 0, 0.0) <= 0.0) == costs_rate


OVERDRAWN = (
    "refused requests of tenant a cost 27,472,691 bytes, received and decompressed, above the allowed 2,097,152 a "
    "second; correct them, and send again after 14 s"
)


def test_a_promised_retry_is_read_although_the_budget_is_overdrawn():
    account = account_of(Tenant(id="a", records_per_second=1.0))
    account.charge(2 * REFUSED_BYTES_AT_ONCE, 0.0)
    wait = account.quota_schedule.assign(1.0, ready_in=3.0, now=0.0)
    with pytest.raises(Refused, match=OVERDRAWN):
        require_readable(account, wait - 0.1)
    require_readable(account, wait)


def require_readable(account: TenantAccount, now: float) -> None:
    """Raise `Refused` if the refused requests of the tenant itself have cost too much."""
    assert account.refused_bytes is not None
    account.require_readable(account.refused_bytes, now)


def overdrawn_account() -> TenantAccount:
    account = account_of(Tenant(id="a", records_per_second=1.0))
    account.charge(2 * REFUSED_BYTES_AT_ONCE, 0.0)
    return account


def test_a_retry_time_lets_one_request_be_read_and_not_a_second_one():
    account = overdrawn_account()
    due = account.quota_schedule.assign(1.0, ready_in=3.0, now=0.0)
    require_readable(account, due)
    with pytest.raises(Refused):
        require_readable(account, due)


def test_a_retry_time_that_no_client_used_lets_no_later_request_be_read():
    account = overdrawn_account()
    due = account.quota_schedule.assign(1.0, ready_in=3.0, now=0.0)
    with pytest.raises(Refused):
        require_readable(account, due + GRACE_SECONDS + 0.1)


def test_each_of_two_retry_times_lets_one_request_be_read_also_after_one_was_admitted():
    account = overdrawn_account()
    due = max(account.quota_schedule.assign(0.1, ready_in=3.0, now=0.0) for _ in range(2))
    require_readable(account, due)
    assert not account.quota_schedule.is_reserved(due)
    require_readable(account, due)
    with pytest.raises(Refused):
        require_readable(account, due)
