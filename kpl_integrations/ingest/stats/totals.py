"""What `/metrics`, `/v1/stats` and the dashboard show: the statistics of the whole gateway."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prometheus_client.metrics_core import Metric as Family

from kpl_integrations.ingest.admission.account import TenantAccount
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.stats.metrics import GatewayMetrics
from kpl_integrations.ingest.stats.stats import Stats, stats_of, tenant_stats

__all__ = ["GatewayStats", "GatewayTotals", "SingleProcessStats"]


class GatewayTotals(NamedTuple):
    """The document of `/v1/stats`, and the metrics."""

    stats: Stats
    families: Sequence[Family]


class GatewayStats(Protocol):
    """The statistics of all processes of a gateway."""

    async def totals(self) -> GatewayTotals:
        """Return the current totals."""

    async def stats_for(self, account: TenantAccount) -> Stats:
        """Return the current state and one tenant's statistics; other members may be empty."""


class SingleProcessStats:
    """The statistics of this process."""

    def __init__(self, opened: OpenGateway, metrics: GatewayMetrics) -> None:
        self._opened = opened
        self._metrics = metrics

    async def totals(self) -> GatewayTotals:
        """Return the current totals."""
        return GatewayTotals(stats_of(self._opened), list(self._metrics.families()))

    async def stats_for(self, account: TenantAccount) -> Stats:
        """Return the current state and one tenant's statistics."""
        opened = self._opened
        return Stats(state=opened.intake.state, tenants=tenant_stats([account], opened.producer))
