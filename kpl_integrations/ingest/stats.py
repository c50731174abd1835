"""The figures of a gateway: the document of `/v1/stats`, and the metric families of `/metrics`.

They come from one process or several. No label is a tenant or a name that a client invents.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kpl_integrations.gateway_figures import BufferStats, RecordStats, StatsDocument, StreamStats, TenantStats
from kpl_integrations.ingest.admission.refusals import Refusal
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.metrics.metrics_hook import Sample
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import (
    breaker_source,
    dead_letter_source,
    producer_source,
    request_source,
    spool_source,
    spool_state_source,
    tenant_wait_source,
)

EXPOSITION_TYPE: Final = CONTENT_TYPE_LATEST


class GatewayTotals(NamedTuple):
    """The document of `/v1/stats`, and the metrics. They are old if they are not current."""

    stats: StatsDocument
    families: Sequence[Family]
    is_current: bool = True


class GatewayStats(Protocol):
    """The source of the totals: this process, or all workers together."""

    async def totals(self) -> GatewayTotals:
        """Return the totals of all processes of this gateway, as recent as possible."""

    async def tenant_stats(self, account: TenantAccount) -> StatsDocument:
        """Return the figures of one tenant; the other members of the document may be empty."""


class SingleProcessStats:
    """The totals of a gateway with one process. `metrics` is a hook of its producer."""

    def __init__(self, opened: OpenGateway, metrics: PrometheusMetrics) -> None:
        self._opened = opened
        self._metrics = metrics
        producer = opened.producer
        metrics.watch(producer_source(producer))
        metrics.watch(breaker_source(producer.breakers))
        waits = producer.internal.waits_by_flow
        metrics.watch(tenant_wait_source(lambda: {flow or "": wait for flow, wait in waits().items()}))
        if producer.spool is not None:
            metrics.watch(spool_source(producer.spool))
        if producer.spool_state is not None:
            metrics.watch(spool_state_source(producer.spool_state))
        if producer.dead_letters is not None:
            metrics.watch(dead_letter_source(producer.dead_letters))
        metrics.watch(
            request_source(
                lambda: opened.tally.answers,
                # Every reason from the start: Prometheus sees no increase where a series begins with its first refusal.
                lambda: {each.value.replace(" ", "_"): opened.tally.refusals[each] for each in Refusal},
            )
        )
        metrics.watch(opened.parts.samples)
        metrics.watch(self._state)

    async def totals(self) -> GatewayTotals:
        """Return the totals of this process."""
        return GatewayTotals(_document(self._opened), list(self._metrics.registry.collect()))

    async def tenant_stats(self, account: TenantAccount) -> StatsDocument:
        """Return one tenant's figures in this process."""
        opened = self._opened
        return StatsDocument(state=opened.admission.state, tenants=_tenants([account], opened))

    def _state(self) -> Iterator[Sample]:
        waiting = self._opened.producer.waiting_by_flow()
        yield Sample("kinesis_ingest_waiting_records", (), sum(records for records, _ in waiting.values()))
        yield Sample("kinesis_ingest_waiting_tenants", (), len(waiting))
        turns = self._opened.read_turns
        yield Sample("kinesis_ingest_paused_connections", (), turns.paused_connections)
        yield Sample("kinesis_ingest_read_pauses_total", (), turns.pauses)
        is_open = self._opened.admission.state == "open" and self._opened.producer.failure is None
        yield Sample("kinesis_ingest_open", (), float(is_open))


def _document(opened: OpenGateway) -> StatsDocument:
    producer = opened.producer
    return StatsDocument(
        state=opened.admission.state,
        tenants=_tenants(opened.accounts, opened),
        records=msgspec.convert(producer.report(), RecordStats, from_attributes=True),
        room=msgspec.convert(producer.buffer_limit, BufferStats, from_attributes=True),
        answers={str(status): count for status, count in sorted(opened.tally.answers.items())},
        refusals={refusal.value: count for refusal, count in opened.tally.refusals.items()},
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


def _tenants(accounts: Iterable[TenantAccount], opened: OpenGateway) -> dict[str, TenantStats]:
    queued = opened.producer.waiting_by_flow()
    found = {}
    for account in accounts:
        records, size_bytes = queued.get(account.flow, (0, 0))
        found[account.tenant.id] = TenantStats(
            requests=account.requests,
            accepted_records=account.accepted_records,
            waiting_records=records,
            waiting_bytes=size_bytes,
            cpu_seconds=round(opened.read_turns.charges.cpu_seconds.get(account.tenant.id, 0.0), 3),
            refused={refusal.value: count for refusal, count in account.refused.items()},
        )
    return found


class _Collected(Collector):
    """Families that are already collected."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        """Return the families."""
        return self._families


def exposition(families: Iterable[Family]) -> bytes:
    """Return the body of the answer to a scrape."""
    return generate_latest(_Collected(families))
