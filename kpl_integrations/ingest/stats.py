"""`/v1/stats`: what the gateway knows of itself, as one JSON document; the dashboard reads the same."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kpl_integrations.ingest.account import TenantAccount

if TYPE_CHECKING:
    from kpl_integrations.ingest.gateway import IngestGateway

__all__ = ["stats_document"]

_MOST_TENANTS = 1_000


def stats_document(
    gateway: "IngestGateway", accounts: Iterable[TenantAccount], *, of_all: bool = True
) -> dict[str, Any]:
    """Return the document; with `of_all` False only what the accounts say of themselves."""
    waiting = gateway.producer.waiting_by_flow()
    tenants = {account.tenant.id: _tenant(account, waiting) for account in accounts}
    busiest = sorted(tenants.items(), key=lambda each: -each[1]["waiting_bytes"])[:_MOST_TENANTS]
    document: dict[str, Any] = {"state": gateway.intake.state, "tenants": dict(busiest)}
    if not of_all:
        return document
    report = gateway.producer.report()
    limit = gateway.producer.buffer_limit
    document["records"] = {
        "accepted": report.accepted,
        "delivered": report.delivered,
        "failed": dict(report.failed),
        "spooled": report.spooled,
        "dead_lettered": report.dead_lettered,
        "buffered": report.buffered,
        "buffered_bytes": report.buffered_bytes,
    }
    document["room"] = {
        "outstanding_records": limit.outstanding_records,
        "max_records": limit.max_records,
        "outstanding_bytes": limit.outstanding_bytes,
        "max_bytes": limit.max_bytes,
    }
    document["answers"] = {str(status): count for status, count in sorted(gateway.answers.items())}
    document["refusals"] = {refusal.value: count for refusal, count in gateway.refusals.items()}
    document["streams"] = {
        stream: {
            "accepted": each.accepted,
            "delivered": each.delivered,
            "failed": sum(each.failed.values()),
            "waiting": each.queueing,
            "in_flight": each.in_flight,
            "buffered": each.buffered,
            "breakers": dict(each.breakers),
        }
        for stream, each in gateway.producer.statistics().items()
    }
    return document


def _tenant(account: TenantAccount, waiting: dict[str | None, tuple[int, int]]) -> dict[str, Any]:
    records, size_bytes = waiting.get(account.flow, (0, 0))
    return {
        "requests": account.requests,
        "accepted_records": account.accepted_records,
        "waiting_records": records,
        "waiting_bytes": size_bytes,
        "refused": {refusal.value: count for refusal, count in account.refused.items()},
    }
