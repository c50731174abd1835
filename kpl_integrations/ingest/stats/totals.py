"""What the gateway tells of itself as a whole, whoever of its processes is asked."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prometheus_client.metrics_core import Metric as Family

from kpl_integrations.ingest.admission.account import TenantAccount
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.stats.metrics import GatewayMetrics
from kpl_integrations.ingest.stats.stats import Stats, stats_of, tenant_stats

__all__ = ["Alone", "Totals", "Whole"]


class Totals(NamedTuple):
    """The counts of `/v1/stats`, and the metrics."""

    stats: Stats
    families: Sequence[Family]


class Whole(Protocol):
    """Where the totals come from."""

    async def look(self) -> Totals:
        """Return the totals of all processes of this gateway, as fresh as they can be had."""

    async def look_at(self, account: TenantAccount) -> Stats:
        """Return what concerns one tenant; other members of it need not be filled."""


class Alone:
    """A gateway of one process is the whole."""

    def __init__(self, opened: OpenGateway, metrics: GatewayMetrics) -> None:
        self._opened = opened
        self._metrics = metrics

    async def look(self) -> Totals:
        """Return what this process knows."""
        return Totals(stats_of(self._opened), list(self._metrics.families()))

    async def look_at(self, account: TenantAccount) -> Stats:
        """Return what this process counts for a tenant."""
        opened = self._opened
        return Stats(state=opened.intake.state, tenants=tenant_stats([account], opened.producer))
