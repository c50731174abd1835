"""What the gateway keeps of one tenant: its quota, its counts, its keys, and who of its clients returns when."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from kpl_integrations.ingest.admission.admission import Refusal
from kpl_integrations.ingest.admission.idempotency import IdempotencyWindow
from kpl_integrations.ingest.admission.return_slots import DrainRate, ReturnSlots
from kpl_integrations.ingest.tenants import Tenant, TenantQuota

__all__ = ["TenantAccount", "TenantAccounts"]

# Twice the tenants a gateway may have: what is forgotten is mostly of those that were renamed or removed.
MOST_ACCOUNTS: Final = 20_000


class TenantAccount:
    """One tenant; made anew when its settings change, with the counts and keys it had."""

    __slots__ = ("accepted_records", "admitted", "flow", "keys", "quota", "refused", "requests", "share_slots", "slots",
                 "tenant", "wants_pairs")  # fmt: skip

    def __init__(self, tenant: Tenant, *, keys: IdempotencyWindow, chance: Callable[[], float], now: float) -> None:
        self.tenant = tenant
        self.flow = tenant.id
        # Pairs of key and data enter aggregation as normal ones.
        self.wants_pairs = tenant.tier == "normal" and tenant.aggregation
        self.quota = TenantQuota(tenant) if tenant.records_per_second or tenant.bytes_per_second else None
        self.slots = ReturnSlots(chance)
        self.share_slots = ReturnSlots(chance)
        # What gets in while its share of the queue is full is what leaves the queue.
        self.admitted = DrainRate(now)
        self.keys = keys
        self.requests = 0
        self.accepted_records = 0
        self.refused: Counter[Refusal] = Counter()

    def seconds_of_quota(self, records: int, size_bytes: int) -> float:
        """Return for how long the tenant's rates are used up by so much."""
        return 0.0 if self.quota is None else self.quota.seconds_for(records, size_bytes)

    def quota_seconds(self, now: float) -> float:
        """Return for how long what remains of its quotas would last at its rates; nothing bounds it: for ever."""
        return math.inf if self.quota is None else self.quota.seconds_left(now)

    def brings(self, now: float) -> float:
        """Return how many records a second it has brought lately, for its weight."""
        return self.admitted.per_second(self.accepted_records, now) / self.tenant.weight

    def changed(self, tenant: Tenant, *, chance: Callable[[], float], now: float) -> "TenantAccount":
        """Return the account under the tenant's new settings."""
        account = TenantAccount(tenant, keys=self.keys, chance=chance, now=now)
        account.requests, account.refused = self.requests, self.refused
        account.accepted_records = self.accepted_records
        return account


class TenantAccounts:
    """The accounts of those who have asked; beyond `most_accounts`, those opened first are forgotten."""

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
        # Hears of each account before it is used: several processes may share its rates.
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
        """Return the account of a tenant that has asked, by its id."""
        return self._accounts.get(tenant_id)

    def __iter__(self) -> Iterator[TenantAccount]:
        return iter(list(self._accounts.values()))

    def __len__(self) -> int:
        return len(self._accounts)
