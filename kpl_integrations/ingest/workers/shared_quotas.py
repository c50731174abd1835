"""Tenants' rates, held across the workers: each has a lease on a part of every rate, by what its own clients offer.

A resource is a tenant; leases are those of `kpl_core.coordination`, in the folder of this run. So all workers together
take at most a tenant's burst and its rate, whoever of them its requests reach; what moves from one worker to another is
there within about a second. Only tenants who lately sent something are spoken of.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from kpl_core.coordination import CoordinationStore, Usage
from kpl_core.coordination.worker import CoordinationWorker
from kpl_integrations.ingest.admission.account import TenantAccount
from kpl_integrations.ingest.tenants import TenantQuota
from kpl_integrations.ingest.workers.seat import Seat

__all__ = ["SharedQuotas"]

# More than a leaseholder's own, so that it gives a tenant up before it is spoken of no more.
IDLE_INTERVALS: Final = 8.0
Pair = tuple[float, float]


class _Metered(msgspec.Struct):
    """A tenant who lately offered something; `base` is what its quota had counted before that."""

    quota: TenantQuota
    limit: Pair
    base: Pair
    seen: Pair
    active_at: float

    def offered(self) -> Pair:
        """Return what it offered since the leaseholder knows of it."""
        return (self.quota.offered[0] - self.base[0], self.quota.offered[1] - self.base[1])


class SharedQuotas:
    """Keeps the quotas of one worker within its leases. `clock` is the intake's."""

    def __init__(
        self, store: CoordinationStore, seat: Seat, *, clock: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        options = seat.quota_sharing()
        self._clock = clock
        self._count = seat.count
        self._idle_seconds = IDLE_INTERVALS * options.interval_seconds
        self._metered: dict[str, _Metered] = {}
        self._gone: dict[str, _Metered] = {}
        self._worker = CoordinationWorker(
            store, options, usages=self._usages, apply_shares=self._apply_shares, clock=clock, chance=chance
        )

    @contextlib.asynccontextmanager
    async def taking_part(self) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Meet the others once before the block, and leave after it; the block runs what is yielded beside itself."""
        await self._worker.turn()
        try:
            yield self._worker.run
        finally:
            await self._worker.leave()

    def opened(self, account: TenantAccount) -> None:
        """Give a new account's quota the part of its rates that is this worker's now."""
        quota, tenant = account.quota, account.tenant
        if quota is None:
            return
        limit = (tenant.records_per_second or 1.0, tenant.bytes_per_second or 1.0)
        known = self._metered.get(tenant.id)
        if known is not None and known.limit != limit:
            # A share of the old rates says nothing of the new ones.
            share = (limit[0] / self._count, limit[1] / self._count)
        else:
            share = _within(self._worker.share(tenant.id, limit), limit)
        quota.set_rates(*share, self._clock())
        quota.woken = lambda: self._woken(tenant.id, quota, limit)

    def _woken(self, tenant_id: str, quota: TenantQuota, limit: Pair) -> None:
        self._gone.pop(tenant_id, None)
        known = self._metered.get(tenant_id)
        # Under new settings its counts go on: the leaseholder reads them as ones that only grow.
        before = (0.0, 0.0) if known is None else known.offered()
        base = (quota.offered[0] - before[0], quota.offered[1] - before[1])
        self._metered[tenant_id] = _Metered(quota, limit, base, quota.offered, self._clock())

    def _usages(self) -> Mapping[str, Usage]:
        now = self._clock()
        for tenant_id, each in self._gone.items():
            # The leaseholder has given it up meanwhile: it is a newcomer's share.
            self._sleep(tenant_id, each, now)
        self._gone.clear()
        usages: dict[str, Usage] = {}
        for tenant_id, each in list(self._metered.items()):
            if each.quota.offered != each.seen:
                each.seen, each.active_at = each.quota.offered, now
            if now - each.active_at > self._idle_seconds:
                self._gone[tenant_id] = self._metered.pop(tenant_id)
            else:
                usages[tenant_id] = Usage(each.limit, each.offered())
        return usages

    def _sleep(self, tenant_id: str, each: _Metered, now: float) -> None:
        each.quota.set_rates(*_within(self._worker.share(tenant_id, each.limit), each.limit), now)
        each.quota.woken = lambda: self._woken(tenant_id, each.quota, each.limit)

    def _apply_shares(self, shares: Mapping[str, Pair]) -> None:
        now = self._clock()
        for tenant_id, share in shares.items():
            each = self._metered.get(tenant_id)
            if each is not None:
                each.quota.set_rates(*_within(share, each.limit), now)


def _within(share: Pair, limit: Pair) -> Pair:
    return (min(share[0], limit[0]), min(share[1], limit[1]))
