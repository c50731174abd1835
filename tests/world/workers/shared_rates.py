"""What of the tenants' rates is in force in all workers together, and what they admit of them."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kpl_integrations.ingest.admission import tenant_account
from kpl_integrations.ingest.tenants import Tenant, TenantQuota
from kpl_integrations.ingest.workers.shared_quotas import SharedQuotas
from tests.world.in_force import FleetGauge
from tests.world.kinds_of_faults import Kind
from tests.world.network import World
from tests.world.workers.processes import PROCESS, WorkerProcess

ROUNDING = 1e-6
# A bucket saves a second of its rate for clients that wait for their retry time.
SAVED_SECONDS = 1.0


class SharedRates:
    """The rates in force of each tenant, and an independent bound of the records that are admitted.

    Args:
        rates: of the tenants, in records a second.
        burst_seconds: of all of them.
        kind: of faults, with its bounds.
        overshoot: records by which one bucket may be in debt: a request passes if the bucket is full.
    """

    def __init__(
        self, rates: Mapping[str, float], *, burst_seconds: float, kind: Kind, overshoot: float, interval: float
    ) -> None:
        self._rates, self._kind, self._interval = rates, kind, interval
        self.saved = max(burst_seconds, SAVED_SECONDS)
        self._overshoot = overshoot
        self.gauge = FleetGauge({tenant: (rate, rate) for tenant, rate in rates.items()}) if rates else None
        # The tokens that all buckets of a tenant have at most, and when.
        self._tokens = {tenant: (self._most(tenant), 0.0) for tenant in rates}
        self.quotas: list[WatchedQuota] = []
        self.false: list[str] = []

    def _most(self, tenant: str) -> float:
        return self._rates[tenant] * self._kind.most_rate * self.saved

    def changed(self, tenant: str, rate: float) -> None:
        """Count that a bucket's rate in force changed by so much."""
        assert self.gauge is not None
        self.gauge.change(tenant, World.now(), rates=(rate, rate), jump=0.0, flow=0.0)

    def taken(self, tenant: str, records: float) -> None:
        """Count records that a bucket admitted, or took back if negative."""
        tokens, at = self._tokens[tenant]
        now = World.now()
        tokens += (now - at) * self._rates[tenant] * self._kind.most_rate
        tokens = min(self._most(tenant), tokens) - records
        if tokens < -self._overshoot and not self.false:
            self.false.append(f"{tenant} got {-tokens:.0f} records more than its rate and burst allow")
        self._tokens[tenant] = tokens, now

    def started(self, workers: int) -> None:
        """Count that a process starts, with buckets of its own."""
        for tenant, (tokens, at) in self._tokens.items():
            self._tokens[tenant] = tokens + self._most(tenant) / workers, at

    def recount(self) -> None:
        """Look which buckets are in use now."""
        for quota in self.quotas:
            quota.recount()

    def violations(self) -> list[str]:
        """Return what is false of the rates that were in force."""
        false = list(self.false)
        if self.gauge is None:
            return false
        self.gauge.look(World.now())
        kind, longest = self._kind, self.gauge.longest_above / self._interval
        if self.gauge.worst_rate > kind.most_rate + ROUNDING:
            false.append(f"tenants' rates in force {self.gauge.worst_rate:.4f} > {kind.most_rate:.4f}")
        if longest > kind.longest + ROUNDING:
            false.append(f"tenants' rates above the limit for {longest:.2f} intervals > {kind.longest:.2f}")
        return false

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the quotas that are made in this block."""

        def quota_of(tenant: Tenant) -> TenantQuota:
            self.quotas.append(WatchedQuota(tenant, self, PROCESS.get()))
            return self.quotas[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tenant_account, "TenantQuota", quota_of)
            yield


class WatchedQuota(TenantQuota):
    """A tenant's quota in one process."""

    __slots__ = ("_allowance", "_counted", "_is_leased", "_process", "_shared", "_tenant_id")

    def __init__(self, tenant: Tenant, shared: SharedRates, process: WorkerProcess) -> None:
        super().__init__(tenant)
        self._shared, self._process, self._tenant_id, self._counted = shared, process, tenant.id, 0.0
        self._is_leased = False
        # Records of its first burst, if its process has no plan yet; None before it has a rate.
        self._allowance: float | None = None
        if process.sharing is not None and process.first_plans is None:
            process.first_plans = _plans_of(process.sharing)

    def recount(self) -> None:
        """Count the rate if it is in force: the process lives, has been answered, and the tenant sent lately."""
        process, sharing = self._process, self._process.sharing
        if sharing is None:
            return
        is_used = self._tenant_id in sharing._active or self._tenant_id in sharing._idle  # noqa: SLF001
        rate = self._rates[0] if process.is_alive and self._is_leased and is_used else 0.0
        if rate != self._counted:
            self._shared.changed(self._tenant_id, rate - self._counted)
            self._counted = rate

    def set_rates(self, records_per_second: float, bytes_per_second: float, now: float) -> None:
        super().set_rates(records_per_second, bytes_per_second, now)
        sharing, first = self._process.sharing, self._process.first_plans
        # As for the laws of leases, the allowance of a worker that has no plan in force does not count. After its start
        # it reads none before its first tenant with a rate.
        self._is_leased |= sharing is not None and first is not None and _plans_of(sharing) is not first
        burst = self._rates[0] * self._shared.saved
        self._allowance = min(burst, self._allowance if self._allowance is not None else burst * (not self._is_leased))
        self.recount()

    def offer(self, records: int, size_bytes: int) -> None:
        super().offer(records, size_bytes)
        self.recount()

    def try_take(self, records: int, size_bytes: int, now: float) -> Any:
        wait = super().try_take(records, size_bytes, now)
        if wait is None:
            # A tenant may come to a worker long after its start, when the others have its whole burst.
            uncounted = min(self._allowance or 0.0, records)
            if self._allowance is not None:
                self._allowance -= uncounted
            self._shared.taken(self._tenant_id, records - uncounted)
        return wait

    def give_back(self, records: int, size_bytes: int) -> None:
        super().give_back(records, size_bytes)
        self._shared.taken(self._tenant_id, -records)


def _plans_of(sharing: SharedQuotas) -> object:
    """Return the plans that a process has read last."""
    return sharing._worker._holder._plans  # noqa: SLF001 - nothing else says it
