"""All workers as one: what they tell now, and what the dead had told, added up; pure.

Counters and histograms are added, dead workers' too. Of gauges the living count; most are added, and `_OTHERWISE` has
the rest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.metrics_core import Metric as Family

from kpl_integrations.gateway_figures import (
    BufferStats,
    RecordStats,
    StatsDocument,
    StreamStats,
    TenantStats,
    WorkerStats,
)
from kpl_integrations.ingest.stats.totals import GatewayTotals
from kpl_integrations.ingest.workers.past import GROWING, Past, WorkerPast, added
from kpl_integrations.ingest.workers.snapshot import FamilySnapshot, Snapshot
from kpl_integrations.metrics.catalogue import METRICS

__all__ = ["sum_of"]

ACCEPTED: Final = "kinesis_producer_accepted_records"
WAITING_TENANTS: Final = "kinesis_ingest_waiting_tenants"
OPEN: Final = "kinesis_ingest_open"
# Gauges of which a sum would say nothing: the worst of them does.
_OTHERWISE: Final[Mapping[str, Callable[[float, float], float]]] = {
    "kinesis_producer_breaker_state": max,
    "kinesis_ingest_tenant_wait_seconds": max,
    "kinesis_coordinator_lease_age_seconds": max,
    "kinesis_producer_shard_rate_limit": min,
    OPEN: min,
}
# The gateway is what the least open of the workers that take requests is.
_STATES: Final = ("closed", "draining", "open")

_Labels = tuple[tuple[str, str], ...]


def sum_of(living: Sequence[Snapshot], past: Past) -> GatewayTotals:
    """Return the totals of all workers; `living` has each number at most once, and nobody whom `past` has."""
    stats = StatsDocument(
        state=min((each.stats.state for each in living if each.takes), key=_STATES.index, default="closed"),
        tenants=_tenants([past.tenants, *(each.stats.tenants for each in living)]),
        records=_records(living, past),
        room=_room(each.stats.room for each in living),
        answers=_counts([past.answers, *(each.stats.answers for each in living)]),
        refusals=_counts([past.refusals, *(each.stats.refusals for each in living)]),
        streams=_streams([past.streams, *(each.stats.streams for each in living)]),
        workers={
            str(each.worker): WorkerStats(
                process_id=each.process_id,
                state=each.stats.state,
                deaths=past.workers.get(str(each.worker), WorkerPast()).deaths,
                accepted=each.stats.records.accepted,
                requests=sum(each.stats.answers.values()),
            )
            for each in sorted(living, key=lambda each: each.worker)
        },
    )
    return GatewayTotals(stats, _families(living, past, stats))


def _records(living: Sequence[Snapshot], past: Past) -> RecordStats:
    parts = [each.stats.records for each in living]
    inherited = {str(each.worker): each.inherited for each in living}
    dead = past.workers.values()
    delivered = sum(each.delivered for each in parts) + sum(each.delivered for each in dead)
    failed = _counts([*(each.failed for each in parts), *(each.failed for each in dead)])
    lost = sum(each.lost + max(0, each.unresolved - inherited.get(name, 0)) for name, each in past.workers.items())
    finished_before = sum(each.delivered + sum(each.failed.values()) for each in dead)
    return RecordStats(
        accepted=finished_before + lost + sum(each.accepted for each in parts),
        delivered=delivered,
        failed=failed,
        spooled=sum(each.spooled for each in parts),
        dead_lettered=sum(each.dead_lettered for each in parts),
        buffered=sum(each.buffered for each in parts),
        buffered_bytes=sum(each.buffered_bytes for each in parts),
        lost=lost,
    )


def _room(rooms: Iterable[BufferStats]) -> BufferStats:
    total = BufferStats()
    for room in rooms:
        total = BufferStats(
            outstanding_records=total.outstanding_records + room.outstanding_records,
            max_records=total.max_records + room.max_records,
            outstanding_bytes=total.outstanding_bytes + room.outstanding_bytes,
            max_bytes=total.max_bytes + room.max_bytes,
        )
    return total


def _counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        total = added(total, part)
    return dict(sorted(total.items()))


def _tenants(parts: Iterable[Mapping[str, TenantStats]]) -> dict[str, TenantStats]:
    total: dict[str, TenantStats] = {}
    for part in parts:
        for tenant, each in part.items():
            known = total.get(tenant)
            total[tenant] = (
                each
                if known is None
                else TenantStats(
                    requests=known.requests + each.requests,
                    accepted_records=known.accepted_records + each.accepted_records,
                    waiting_records=known.waiting_records + each.waiting_records,
                    waiting_bytes=known.waiting_bytes + each.waiting_bytes,
                    refused=added(known.refused, each.refused),
                )
            )
    return total


def _streams(parts: Iterable[Mapping[str, StreamStats]]) -> dict[str, StreamStats]:
    total: dict[str, StreamStats] = {}
    for part in parts:
        for stream, each in part.items():
            known = total.get(stream, StreamStats())
            total[stream] = StreamStats(
                accepted=known.accepted + each.accepted,
                delivered=known.delivered + each.delivered,
                failed=known.failed + each.failed,
                waiting=known.waiting + each.waiting,
                in_flight=known.in_flight + each.in_flight,
                buffered=known.buffered + each.buffered,
                breakers=_breakers(known.breakers, each.breakers),
            )
    return total


def _breakers(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Return each shard's breaker: closed only if all workers' are."""
    found = dict(one)
    for shard, state in other.items():
        if found.get(shard, "closed") == "closed":
            found[shard] = state
    return found


def _families(living: Sequence[Snapshot], past: Past, stats: StatsDocument) -> list[Family]:
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, _Labels], float]] = {}
    for snapshot in [past.families, *(_of_the_whole(each) for each in living)]:
        for family in snapshot:
            if family.name not in families:
                families[family.name] = Family(family.name, family.meaning, family.kind)
                sums[family.name] = {}
            join = _OTHERWISE.get(family.name) if family.kind not in GROWING else None
            mine = sums[family.name]
            for name, labels, value in family.samples:
                known = mine.get((name, labels))
                if known is None:
                    mine[name, labels] = value
                elif join is not None or name.endswith("_created"):
                    mine[name, labels] = (join or min)(known, value)
                else:
                    mine[name, labels] = known + value
    _set(sums, ACCEPTED, float(stats.records.accepted))
    _set(sums, WAITING_TENANTS, float(sum(each.waiting_records > 0 for each in stats.tenants.values())))
    for family_name, mine in sums.items():
        for (name, labels), value in mine.items():
            families[family_name].add_sample(name, dict(labels), value)
    return [*families.values(), *_of_the_workers(stats)]


def _of_the_whole(snapshot: Snapshot) -> list[FamilySnapshot]:
    """Return the metrics that count: who takes no requests has no say in whether the gateway is open."""
    return [each for each in snapshot.families if snapshot.takes or each.name != OPEN]


def _set(sums: Mapping[str, dict[tuple[str, _Labels], float]], family: str, value: float) -> None:
    """Replace a sum that would count something twice."""
    for key in sums.get(family, {}):
        sums[family][key] = value


def _of_the_workers(stats: StatsDocument) -> list[Family]:
    return [
        _gauge("kinesis_ingest_workers", len(stats.workers)),
        _gauge("kinesis_ingest_lost_records", stats.records.lost),
    ]


def _gauge(name: str, value: float) -> Family:
    family = Family(name, METRICS[name].meaning, "gauge")
    family.add_sample(name, {}, value)
    return family
