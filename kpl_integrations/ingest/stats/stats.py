"""`/v1/stats`: what the gateway knows of itself, as one JSON document; the dashboard reads the same."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from kpl_core import Producer
from kpl_integrations.gateway_figures import RecordStats, Room, StreamStats, TenantStats, WorkerStats
from kpl_integrations.ingest.admission.account import TenantAccount
from kpl_integrations.ingest.open_gateway import OpenGateway

__all__ = ["Stats", "stats_of", "tenant_stats"]

_MOST_TENANTS: Final = 1_000


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, as whoever shows the admin key sees it."""

    state: str
    tenants: dict[str, TenantStats] = {}
    records: RecordStats = RecordStats()
    room: Room = Room()
    answers: dict[str, int] = {}
    refusals: dict[str, int] = {}
    streams: dict[str, StreamStats] = {}
    # Of a gateway of several processes, by number.
    workers: dict[str, WorkerStats] = {}

    def document(self) -> dict[str, Any]:
        """Return the document for an admin; of very many tenants those with the longest queues."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        tenants = document["tenants"]
        if len(tenants) > _MOST_TENANTS:
            busiest = sorted(tenants.items(), key=lambda each: -each[1]["waiting_bytes"])
            document["tenants"] = dict(busiest[:_MOST_TENANTS])
        return document

    def document_for(self, tenant_id: str) -> dict[str, Any]:
        """Return what one tenant may see: itself."""
        own = self.tenants.get(tenant_id, TenantStats())
        return {"state": self.state, "tenants": {tenant_id: msgspec.to_builtins(own)}}


def stats_of(opened: OpenGateway) -> Stats:
    """Return what an open gateway has counted, and holds now."""
    producer = opened.producer
    report = producer.report()
    limit = producer.buffer_limit
    return Stats(
        state=opened.intake.state,
        tenants=tenant_stats(opened.accounts, producer),
        records=RecordStats(
            accepted=report.accepted,
            delivered=report.delivered,
            failed=dict(report.failed),
            spooled=report.spooled,
            dead_lettered=report.dead_lettered,
            buffered=report.buffered,
            buffered_bytes=report.buffered_bytes,
        ),
        room=Room(
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


def tenant_stats(accounts: Iterable[TenantAccount], producer: Producer) -> dict[str, TenantStats]:
    """Return each account's counts by tenant."""
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
