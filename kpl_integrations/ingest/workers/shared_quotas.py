"""Tenants' rates across processes: each process has a lease on the part of a rate that its own clients use.

The processes are the workers of one gateway, or all processes of several gateways with `KPL_INGEST_COORDINATION`. A
tenant is a resource, and the leases are those of `kpl_core.coordination`. All processes together admit at most a
tenant's burst and its rate, whichever its requests reach. When a tenant moves to another process, its rate follows
within two intervals. Only tenants that sent something lately have leases.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import msgspec

from kpl_core import CoordinationOptions
from kpl_core.coordination import CoordinationStore, Usage
from kpl_core.coordination.stores import open_store, part_of_store
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.hooks import CoordinatorMet, Fact
from kpl_integrations.ingest.admission.tenant_account import TenantAccount, TenantAccounts
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.tenants import TenantQuota
from kpl_integrations.ingest.workers.link import WorkerIdentity

# Longer than the leaseholder's own bound, so that the lease is released before the tenant is forgotten here.
IDLE_INTERVALS: Final = 8.0
# Between two sync rounds of the workers of one gateway.
_OWN_SECONDS: Final = 1.0
# The interval of the quotas is a part of the shards', except in a store that charges for each call.
_QUOTAS_SHARE: Final = 0.5
_CHARGED: Final = frozenset({"s3", "dynamodb"})
Pair = tuple[float, float]


class Sharing(msgspec.Struct, frozen=True):
    """How processes divide limits: those of `shards`, and the tenants' `quotas`."""

    shards: CoordinationOptions
    quotas: CoordinationOptions


def sharing_of(settings: IngestSettings, identity: WorkerIdentity | None) -> Sharing | None:
    """Return how this process shares limits with others; None if it is alone.

    Raises:
        ConfigError: the store cannot be divided.
    """
    shared = settings.producer.coordination
    if shared is None:
        if identity is None:
            return None
        folder = Path(identity.folder).as_uri()
        shared = CoordinationOptions(store=folder, max_workers=identity.count, interval_seconds=_OWN_SECONDS)
    worker_id = None if identity is None else identity.name
    share = 1.0 if urlsplit(shared.store).scheme in _CHARGED else _QUOTAS_SHARE
    of_shards = msgspec.structs.replace(shared, store=part_of_store(shared.store, "shards"), worker_id=worker_id)
    of_quotas = msgspec.structs.replace(
        of_shards,
        store=part_of_store(shared.store, "quotas"),
        interval_seconds=shared.interval_seconds * share,
        shadow=False,
        # No service enforces them.
        usual_workers=shared.usual_workers or shared.max_workers,
    )
    return Sharing(of_shards, of_quotas)


class _ActiveTenant(msgspec.Struct):
    """A tenant that sent something lately; `base` is what its quota had counted before that."""

    quota: TenantQuota
    limit: Pair
    base: Pair
    seen: Pair
    active_at: float

    def offered(self) -> Pair:
        """Return what the tenant offered since it became active."""
        return (self.quota.offered[0] - self.base[0], self.quota.offered[1] - self.base[1])


class SharedQuotas:
    """Keeps the quotas of one process within its leases.

    `clock` is the same as the admission's. `tell` is called at the end of each sync round with the store.
    """

    def __init__(
        self,
        store: CoordinationStore,
        options: CoordinationOptions,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        tell: Callable[[CoordinatorMet], object],
    ) -> None:
        self._clock = clock
        self._max_workers = options.max_workers
        self._idle_seconds = IDLE_INTERVALS * options.interval_seconds
        self._is_needed = anyio.Event()
        self._active: dict[str, _ActiveTenant] = {}
        # Reported as idle in the last interval; the leaseholder releases their leases meanwhile.
        self._idle: dict[str, _ActiveTenant] = {}
        self._tell = tell
        self._worker = CoordinationWorker(
            store,
            options,
            usages=self._usages,
            apply_shares=self._apply_shares,
            tell=self._told,
            clock=clock,
            chance=chance,
        )

    def _told(self, fact: Fact) -> None:
        if isinstance(fact, CoordinatorMet):
            self._tell(fact)

    @contextlib.asynccontextmanager
    async def taking_part(self) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Synchronise once, run the block, then release the leases. The block must run the yielded function."""
        await self._worker.step()
        try:
            yield self._run
        finally:
            await self._worker.leave()

    async def _run(self) -> None:
        """Synchronise from the first tenant with a rate on."""
        await self._is_needed.wait()
        await self._worker.run()

    def opened(self, account: TenantAccount) -> None:
        """Set a new account's quota to this worker's part of the tenant's rates."""
        quota, tenant = account.quota, account.tenant
        if quota is None:
            return
        self._is_needed.set()
        limit = (tenant.records_per_second or 1.0, tenant.bytes_per_second or 1.0)
        known = self._active.get(tenant.id)
        if known is not None and known.limit != limit:
            # The lease is a part of the old rates.
            share = (limit[0] / self._max_workers, limit[1] / self._max_workers)
        else:
            share = self._worker.share(tenant.id, limit)
        self._set_rates(tenant.id, quota, limit, share)
        quota.woken = partial(self._activate, tenant.id, quota, limit)

    def _activate(self, tenant_id: str, quota: TenantQuota, limit: Pair) -> None:
        # The share of its last request may be old: other processes may have the tenant's whole rate by now.
        self._set_rates(tenant_id, quota, limit, self._worker.share(tenant_id, limit))
        self._idle.pop(tenant_id, None)
        known = self._active.get(tenant_id)
        # The leaseholder expects counts that only grow, so they continue when a tenant's settings change.
        before = (0.0, 0.0) if known is None else known.offered()
        base = (quota.offered[0] - before[0], quota.offered[1] - before[1])
        self._active[tenant_id] = _ActiveTenant(quota, limit, base, quota.offered, self._clock())
        self._worker.units_wait()

    def _usages(self) -> Mapping[str, Usage]:
        now = self._clock()
        for tenant_id, each in self._idle.items():
            # The lease is released: until the tenant sends again, its quota has a newcomer's share.
            self._set_rates(tenant_id, each.quota, each.limit, self._worker.share(tenant_id, each.limit))
            each.quota.woken = partial(self._activate, tenant_id, each.quota, each.limit)
        self._idle.clear()
        usages: dict[str, Usage] = {}
        for tenant_id, each in list(self._active.items()):
            if each.quota.offered != each.seen:
                each.seen, each.active_at = each.quota.offered, now
            if now - each.active_at > self._idle_seconds:
                self._idle[tenant_id] = self._active.pop(tenant_id)
            else:
                # It changes without the share: the store fails, or other processes begin with this tenant.
                each.quota.plan_with(self._worker.claimable_part(tenant_id))
                usages[tenant_id] = Usage(each.limit, each.offered())
        return usages

    def _apply_shares(self, shares: Mapping[str, Pair]) -> None:
        for tenant_id, share in shares.items():
            each = self._active.get(tenant_id) or self._idle.get(tenant_id)
            if each is not None:
                self._set_rates(tenant_id, each.quota, each.limit, share)

    def _set_rates(self, tenant_id: str, quota: TenantQuota, limit: Pair, share: Pair) -> None:
        quota.claimable_part = self._worker.claimable_part(tenant_id)
        quota.set_rates(min(share[0], limit[0]), min(share[1], limit[1]), self._clock())


@contextlib.asynccontextmanager
async def shared_quotas(
    options: CoordinationOptions,
    accounts: TenantAccounts,
    *,
    region: str | None,
    clock: Callable[[], float],
    chance: Callable[[], float],
    tell: Callable[[CoordinatorMet], object],
) -> AsyncIterator[None]:
    """Keep the rates of these accounts within this process' leases while the block runs.

    Raises:
        ConfigError: the store's URL is incomplete, or a package is not installed.
    """
    store = await open_store(options.store, client_options={} if region is None else {"region_name": region})
    try:
        quotas = SharedQuotas(store, options, clock=clock, chance=chance, tell=tell)
        async with quotas.taking_part() as share_quotas, anyio.create_task_group() as tasks:
            accounts.opened = quotas.opened
            tasks.start_soon(share_quotas)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
    finally:
        await store.aclose()
