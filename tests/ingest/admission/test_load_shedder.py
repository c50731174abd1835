"""The last part of the buffer is reserved for tenants with low rates: who is rejected when, row by row."""

from types import SimpleNamespace
from typing import Any

import pytest

from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_integrations.ingest.admission.admission import LoadShedder
from kpl_integrations.ingest.admission.tenant_account import TenantAccount, TenantAccounts
from kpl_integrations.ingest.tenants import Tenant

MOST_RECORDS = 1_000
MOST_BYTES = 100_000


class Scene:
    """A shedder beside a buffer, and two tenants whose rates have the average 100 records a second at 1.0 s."""

    def __init__(self, *, rate: int = 150, weight: int = 1) -> None:
        self.limit = BufferLimit(max_records=MOST_RECORDS, max_bytes=MOST_BYTES)
        self.waiting: dict[str, tuple[int, int]] = {}
        accounts = TenantAccounts(
            clock=lambda: 0.0, chance=lambda: 0.5, idempotency_keys=1, idempotency_seconds=1.0, most_accounts=10
        )
        producer: Any = SimpleNamespace(buffer_limit=self.limit, waiting_by_flow=lambda: self.waiting)
        self.shedder = LoadShedder(producer, accounts, now=0.0)
        self.tenant = self.account(accounts, "tenant", rate * weight, weight)
        self.other = self.account(accounts, "other", 200 - rate)

    @staticmethod
    def account(accounts: TenantAccounts, name: str, rate: int, weight: int = 1) -> TenantAccount:
        account = accounts.of(Tenant(id=name, weight=weight))
        account.count_accepted(rate, now=0.0)
        return account

    def fill(self, records: int, size_bytes: int = 0) -> None:
        self.limit.reserve(records=records, size_bytes=size_bytes)

    def rejects(self, now: float = 1.0) -> bool:
        return self.shedder.rejects(self.tenant, now)


# Records and bytes behind the fair queue, the tenant's records per second (the average is 100), and whether it is
# rejected.
ROWS = [
    (600, 0, 199, False),
    (610, 0, 101, True),
    (610, 0, 100, False),
    (0, 61_000, 101, True),
    (0, 60_000, 199, False),
    (850, 0, 99, False),
    (860, 0, 51, True),
    (860, 0, 50, False),
    (0, 86_000, 51, True),
]


@pytest.mark.parametrize(("records", "size_bytes", "rate", "rejected"), ROWS)
def test_the_fuller_the_buffer_the_lower_the_rate_that_may_still_send(records, size_bytes, rate, rejected):
    scene = Scene(rate=rate)
    scene.fill(records, size_bytes)
    assert scene.rejects() is rejected


def test_a_rate_is_compared_for_each_unit_of_weight():
    scene = Scene(rate=90, weight=3)
    scene.fill(610)
    assert not scene.rejects()
    assert scene.shedder.rejects(scene.other, now=1.0)


def test_records_that_wait_in_the_fair_queue_are_not_behind_it():
    scene = Scene()
    scene.fill(900, 90_000)
    scene.waiting = {"tenant": (200, 20_000), "other": (100, 10_000)}
    assert not scene.rejects(now=1.0)
    scene.waiting = {"tenant": (200, 20_000)}
    assert scene.rejects(now=1.25)


def test_what_was_found_is_valid_for_a_quarter_of_a_second():
    scene = Scene()
    scene.fill(610)
    assert scene.rejects(now=1.0)
    scene.waiting = {"tenant": (300, 0)}
    assert scene.rejects(now=1.2)
    assert not scene.rejects(now=1.25)


def test_a_request_after_which_no_step_is_reached_needs_no_look_at_the_rates():
    scene = Scene()
    scene.fill(500, 50_000)
    assert scene.shedder.has_enough(100, 10_000)
    assert not scene.shedder.has_enough(101, 0)
    assert not scene.shedder.has_enough(0, 10_001)


def test_nobody_is_rejected_while_no_tenant_has_a_rate():
    scene = Scene()
    scene.fill(1_000)
    assert not scene.rejects(now=1_000.0)


def test_while_nothing_leaves_the_tenants_that_filled_the_buffer_are_rejected_and_a_quiet_one_is_not():
    """Refused for seconds, they had a lower rate of accepted records than the quiet one, which was rejected then."""
    scene = Scene(rate=190)
    noisy, quiet = scene.tenant, scene.other
    scene.fill(700)
    rejected = 0
    for step in range(300):
        now = 1.0 + step / 10
        if scene.shedder.rejects(noisy, now):
            rejected += 1
            noisy.count_shed(50, now)
        else:
            noisy.count_accepted(50, now)
        assert not scene.shedder.rejects(quiet, now)
        quiet.count_accepted(1, now)
    assert rejected >= 290


@pytest.mark.parametrize(("quiet", "noisy", "rejected"), [(2, 1, False), (3, 1, False), (5, 1, True), (2, 0, False)])
def test_rates_that_would_fill_the_rest_in_more_than_a_minute_are_not_rejected(quiet, noisy, rejected):
    """After an outage few records arrive, and chance decides who has the higher rate."""
    scene = Scene(rate=0)
    scene.tenant.count_accepted(quiet, 0.0)
    scene.other.accepted_records = noisy
    scene.fill(610)
    # 390 places, and two tenants: 3.25 records a second each.
    assert scene.rejects() is rejected


def test_a_tenant_whose_settings_change_keeps_its_rate():
    """All records that it had sent so far counted as those of the first moment, so it was rejected first."""
    scene = Scene(rate=50)
    quiet = scene.tenant
    for second in range(1, 60):
        quiet.count_accepted(50, float(second))
    before = quiet.records_per_second_and_weight(60.0)
    changed = quiet.changed(Tenant(id="tenant", records_per_second=1_000), chance=lambda: 0.5, now=60.0)
    assert changed.records_per_second_and_weight(60.0) == before
    changed.count_accepted(50, 60.0)
    assert changed.records_per_second_and_weight(60.5) <= 100.0
