"""The last of the room is for those who bring little.

What waits in the fair queue is bounded for each tenant by what is free. But what is past it, on its way to many
shards or waiting for a service that does not answer, is not: one tenant could fill the house with it, and whoever
comes next would pay. So when that part gets large, whoever brings more than the others for his weight is refused first:

    more than 60 % of the room is past the queue     who brings more than the average is refused
    more than 85 %                                   who brings more than half of it
"""

from collections.abc import Iterable
from typing import Final

from kpl_core import Producer
from kpl_integrations.ingest.admission.account import TenantAccount

__all__ = ["LastRoom"]

# Share of the room that is past the queue, and the most a tenant may bring then, in averages: the strictest first.
STEPS: Final = ((0.85, 0.5), (0.6, 1.0))
_LOOK_EVERY_SECONDS: Final = 0.25


class LastRoom:
    """Knows what is past the queue, and what tenants bring; looks at either only when the room is full enough."""

    __slots__ = ("_accounts", "_enough", "_limit", "_looked_at", "_most", "_producer")

    def __init__(self, producer: Producer, accounts: Iterable[TenantAccount], now: float) -> None:
        self._producer = producer
        self._accounts = accounts
        self._limit = limit = producer.buffer_limit
        # Free records and bytes; while there are as many, nothing is past the least step.
        used = STEPS[-1][0]
        self._enough = (
            limit.outstanding_records + limit.free_records - used * limit.max_records,
            limit.outstanding_bytes + limit.free_bytes - used * limit.max_bytes,
        )
        # Records a second, for its weight, that a tenant may bring; None: as many as it wants.
        self._most: float | None = None
        self._looked_at = now - _LOOK_EVERY_SECONDS

    def is_for_others(self, account: TenantAccount, now: float) -> bool:
        """Say whether this tenant must leave what room there is to those who bring less."""
        limit = self._limit
        enough_records, enough_bytes = self._enough
        if limit.free_records >= enough_records and limit.free_bytes >= enough_bytes:
            return False
        if now - self._looked_at >= _LOOK_EVERY_SECONDS:
            self._looked_at = now
            self._most = self._look(now)
        return self._most is not None and account.brings(now) > self._most

    def _look(self, now: float) -> float | None:
        limit = self._limit
        waiting = self._producer.waiting_by_flow().values()
        records = limit.outstanding_records - sum(each[0] for each in waiting)
        size_bytes = limit.outstanding_bytes - sum(each[1] for each in waiting)
        past = max(records / limit.max_records, size_bytes / limit.max_bytes)
        averages = next((averages for share, averages in STEPS if past > share), None)
        if averages is None:
            return None
        brought = [rate for each in self._accounts if (rate := each.brings(now)) > 0.0]
        return averages * sum(brought) / len(brought) if brought else None
