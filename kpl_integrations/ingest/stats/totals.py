"""The totals of a gateway: the document of `/v1/stats` and the metric families, from one process or several."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from prometheus_client.metrics_core import Metric as Family

from kpl_core import Producer
from kpl_integrations.gateway_figures import BufferStats, RecordStats, StatsDocument, StreamStats, TenantStats
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.stats.metrics import GatewayMetrics


class GatewayTotals(NamedTuple):
    """The document of `/v1/stats`, and the metrics."""

    stats: StatsDocument
    families: Sequence[Family]


class GatewayStats(Protocol):
    """The source of the totals: this process, or all workers together."""

    async def totals(self) -> GatewayTotals:
        """Return the totals of all processes of this gateway, as recent as possible."""

    async def tenant_stats(self, account: TenantAccount) -> StatsDocument:
        """Return the figures of one tenant; the other members of the document may be empty."""


class SingleProcessStats:
    """The totals of a gateway with one process."""

    def __init__(self, opened: OpenGateway, metrics: GatewayMetrics) -> None:
        self._opened = opened
        self._metrics = metrics

    async def totals(self) -> GatewayTotals:
        """Return the totals of this process."""
        return GatewayTotals(_document(self._opened), list(self._metrics.families()))

    async def tenant_stats(self, account: TenantAccount) -> StatsDocument:
        """Return one tenant's figures in this process."""
        opened = self._opened
        return StatsDocument(state=opened.admission.state, tenants=_tenants([account], opened.producer))


def _document(opened: OpenGateway) -> StatsDocument:
    producer = opened.producer
    report = producer.report()
    limit = producer.buffer_limit
    return StatsDocument(
        state=opened.admission.state,
        tenants=_tenants(opened.accounts, producer),
        records=RecordStats(
            accepted=report.accepted,
            delivered=report.delivered,
            failed=dict(report.failed),
            spooled=report.spooled,
            dead_lettered=report.dead_lettered,
            buffered=report.buffered,
            buffered_bytes=report.buffered_bytes,
        ),
        room=BufferStats(
            outstanding_records=limit.outstanding_records,
            max_records=limit.max_records,
            outstanding_bytes=limit.outstanding_bytes,
            max_bytes=limit.max_bytes,
        ),
        answers={str(status): count for status, count in sorted(opened.answers.items())},
        refusals={refusal.value: count for refusal, count in opened.refusals.items()},
        streams={
            stream: StreamStats(
                accepted=each.accepted,
                delivered=each.delivered,
                failed=sum(each.failed.values()),
                waiting=each.queueing,
                in_flight=each.in_flight,
                buffered=each.buffered,
                breakers=dict(each.breakers),
            )
            for stream, each in producer.statistics().items()
        },
    )


def _tenants(accounts: Iterable[TenantAccount], producer: Producer) -> dict[str, TenantStats]:
    queued = producer.waiting_by_flow()
    found = {}
    for account in accounts:
        records, size_bytes = queued.get(account.flow, (0, 0))
        found[account.tenant.id] = TenantStats(
            requests=account.requests,
            accepted_records=account.accepted_records,
            waiting_records=records,
            waiting_bytes=size_bytes,
            refused={refusal.value: count for refusal, count in account.refused.items()},
        )
    return found
