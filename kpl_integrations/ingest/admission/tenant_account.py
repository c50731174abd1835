"""The state that the gateway keeps for each tenant: its quota, counts, idempotency keys and retry schedules."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from http import HTTPStatus
from typing import Final

from kpl_core import FairnessPolicy
from kpl_integrations.ingest.admission.clients import THIS_ADDRESS, AddressBudget, RefusedBytes, over_decoding
from kpl_integrations.ingest.admission.idempotency import IdempotencyWindow
from kpl_integrations.ingest.admission.refusals import (
    REFUSALS,
    SHORTEST_SAMPLE_SECONDS,
    DrainRate,
    Refusal,
    Refused,
    RetryAfterScheduler,
)
from kpl_integrations.ingest.tenants import Tenant, TenantDirectory, TenantQuota

# Twice the most tenants of a gateway: the accounts dropped first are mostly those of renamed or removed tenants.
MOST_ACCOUNTS: Final = 20_000


class TenantAccount:
    """One tenant. It is replaced when the tenant's settings change, and keeps its counts and keys."""

    __slots__ = ("accepted_records", "admitted", "flow", "keys", "offered", "puts_pairs", "quota", "quota_schedule",
                 "refused", "refused_bytes", "requests", "share_schedule", "shed_records", "tenant")  # fmt: skip

    def __init__(self, tenant: Tenant, *, keys: IdempotencyWindow, chance: Callable[[], float], now: float) -> None:
        self.tenant = tenant
        self.flow = tenant.id
        # Pairs of key and data are put with the normal tier and with aggregation.
        self.puts_pairs = tenant.tier == "normal" and tenant.aggregation
        self.quota = TenantQuota(tenant) if tenant.records_per_second or tenant.bytes_per_second else None
        self.quota_schedule = RetryAfterScheduler(chance)
        self.share_schedule = RetryAfterScheduler(chance)
        # While the tenant's share of the queue is full, records are admitted at the rate at which they leave it.
        self.admitted = DrainRate(now)
        # With what was shed. Otherwise the tenants that fill the buffer would soon have no rate.
        self.offered = DrainRate(now)
        self.shed_records = 0
        self.keys = keys
        self.requests = 0
        self.accepted_records = 0
        self.refused: Counter[Refusal] = Counter()
        # None until a request was refused, so that others cost one comparison.
        self.refused_bytes: RefusedBytes | None = None

    def records_per_second_and_weight(self, now: float) -> float:
        """Return the recent rate of offered records, divided by the tenant's weight."""
        return self.offered.per_second(self.accepted_records + self.shed_records, now) / self.tenant.weight

    def count_accepted(self, records: int, now: float) -> None:
        """Count accepted records."""
        self.accepted_records += records
        if now - self.admitted.sampled_at >= SHORTEST_SAMPLE_SECONDS:
            self.admitted.observe(self.accepted_records, now)
            self.offered.observe(self.accepted_records + self.shed_records, now)

    def count_shed(self, records: int, now: float) -> None:
        """Count records that were refused: over their share of the queue, or because Kinesis or the disk fails."""
        self.shed_records += records
        self.offered.observe(self.accepted_records + self.shed_records, now)

    def count_refused(
        self, refused: Refused, received_bytes: int, now: float, payer: AddressBudget | None = None
    ) -> None:
        """Count a rejected request, and charge its bytes, received and inflated, to the tenant or to `payer`.

        Those that cannot succeed cost its byte rate as well. A rejection because of the gateway or of Kinesis (5xx)
        costs nothing.
        """
        self.refused[refused.refusal] += 1
        row, size_bytes = REFUSALS[refused.refusal], received_bytes + refused.work_bytes
        if size_bytes and row.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self.charge(size_bytes, now, payer, costs_rate=row.retry_after_seconds is None)

    def charge(
        self, size_bytes: int, now: float, payer: AddressBudget | None = None, *, costs_rate: bool = True
    ) -> None:
        """Charge the bytes of a rejected request to the tenant, or to `payer` alone."""
        if payer is not None:
            payer.charge(size_bytes, now)
            return
        if self.quota is not None and costs_rate:
            self.quota.charge(size_bytes, now)
        if self.refused_bytes is None:
            self.refused_bytes = RefusedBytes()
        self.refused_bytes.charge(size_bytes, now)

    def require_readable(self, budget: RefusedBytes | AddressBudget, now: float) -> None:
        """Raise `Refused` if rejected requests have cost too much of this budget, the tenant's own or an address'.

        One request passes for each slot that is due.
        """
        wait = budget.wait_seconds(now)
        if wait and not (self.quota_schedule.try_pass(now) or self.share_schedule.try_pass(now)):
            raise over_decoding(f"tenant {self.tenant.id}" if budget is self.refused_bytes else THIS_ADDRESS, wait)

    def changed(self, tenant: Tenant, *, chance: Callable[[], float], now: float) -> "TenantAccount":
        """Return the account for the tenant's new settings."""
        account = TenantAccount(tenant, keys=self.keys, chance=chance, now=now)
        account.requests, account.refused = self.requests, self.refused
        account.refused_bytes = self.refused_bytes
        account.accepted_records, account.shed_records = self.accepted_records, self.shed_records
        # They count on from there: a new one would take all records so far for those of its first moment.
        account.admitted, account.offered = self.admitted, self.offered
        return account


class TenantAccounts:
    """The accounts of tenants that sent requests. Above `most_accounts`, the oldest account is dropped."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        idempotency_keys: int,
        idempotency_seconds: float,
        most_accounts: int = MOST_ACCOUNTS,
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._keys = idempotency_keys
        self._key_seconds = idempotency_seconds
        self._most = most_accounts
        self._accounts: OrderedDict[str, TenantAccount] = OrderedDict()
        # Called with each new account before its first use, because several processes may share its rates.
        self.opened: Callable[[TenantAccount], object] = lambda _: None

    def of(self, tenant: Tenant) -> TenantAccount:
        """Return the tenant's account."""
        account = self._accounts.get(tenant.id)
        if account is not None and account.tenant is tenant:
            return account
        return self._opened(tenant, account)

    def _opened(self, tenant: Tenant, before: TenantAccount | None) -> TenantAccount:
        if before is not None and before.tenant == tenant:
            before.tenant = tenant
            return before
        if before is not None:
            account = before.changed(tenant, chance=self._chance, now=self._clock())
        else:
            keys = IdempotencyWindow(most_keys=self._keys, seconds=self._key_seconds)
            account = TenantAccount(tenant, keys=keys, chance=self._chance, now=self._clock())
        self._accounts[tenant.id] = account
        self.opened(account)
        if len(self._accounts) > self._most:
            self._accounts.popitem(last=False)
        return account

    def find(self, tenant_id: str) -> TenantAccount | None:
        """Return the account of a tenant that sent requests, by its id."""
        return self._accounts.get(tenant_id)

    def __iter__(self) -> Iterator[TenantAccount]:
        return iter(list(self._accounts.values()))

    def __len__(self) -> int:
        return len(self._accounts)


class TenantFairness(FairnessPolicy):
    """A fairness policy whose flows are tenants. It reads the directory at each call, so changes take effect."""

    __slots__ = ("_directory",)

    def __init__(self, directory: TenantDirectory) -> None:
        super().__init__()
        object.__setattr__(self, "_directory", directory)

    def weight_of(self, flow: Hashable) -> float:
        """Return the weight of the tenant with this id; the default weight for a removed tenant."""
        tenant = self._tenant(flow)
        return self.default_weight if tenant is None else tenant.weight

    def aggregates(self, flow: Hashable) -> bool:
        """Return True if this tenant's records may be aggregated; also for a removed tenant."""
        tenant = self._tenant(flow)
        return tenant is None or tenant.aggregation

    def _tenant(self, flow: Hashable) -> Tenant | None:
        directory: TenantDirectory = self._directory  # type: ignore[attr-defined]
        tenant = directory.by_id(flow) if isinstance(flow, str) else None
        if tenant is None and directory.unknown is not None and flow == directory.unknown.id:
            tenant = directory.unknown
        return tenant
