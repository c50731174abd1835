"""What workers had counted when they died: a counter never falls, and every record stays accounted for; pure.

The next process with a dead worker's number opens its spool, and counts what it finds there as accepted. So of the dead
worker only what was final stays in the books, and of what was not, that which the next one did not find: it is lost.

    accepted = delivered + failed + spooled + dead_lettered + buffered + lost
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from kpl_integrations.gateway_figures import StreamStats, TenantStats
from kpl_integrations.ingest.workers.snapshot import FamilySnapshot, Sample, Snapshot

__all__ = ["GROWING", "Past", "WorkerPast", "added", "folded"]

# Kinds of metric that only grow.
GROWING = frozenset({"counter", "histogram", "summary"})
# Names of lives that may still have a file; older ones were removed long ago.
_MOST_LIVES = 200


class WorkerPast(msgspec.Struct, frozen=True, kw_only=True):
    """All dead processes of one number: what they finished, what the last left open, and what earlier ones lost."""

    delivered: int = 0
    failed: dict[str, int] = {}
    unresolved: int = 0
    lost: int = 0
    deaths: int = 0


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """All dead workers of a run. `lives` are the names of those that are in it."""

    lives: list[str] = []
    workers: dict[str, WorkerPast] = {}
    tenants: dict[str, TenantStats] = {}
    answers: dict[str, int] = {}
    refusals: dict[str, int] = {}
    streams: dict[str, StreamStats] = {}
    families: list[FamilySnapshot] = []


def folded(past: Past, name: str, worker: int, last: Snapshot | None) -> Past:
    """Return the past with one more death; `last` is what the dead told last, None if it never said anything."""
    before = past.workers.get(str(worker), WorkerPast())
    if last is None:
        after = msgspec.structs.replace(before, deaths=before.deaths + 1)
        return msgspec.structs.replace(past, workers=past.workers | {str(worker): after})
    stats = last.stats
    records = stats.records
    after = WorkerPast(
        delivered=before.delivered + records.delivered,
        failed=added(before.failed, records.failed),
        unresolved=max(0, records.accepted - records.delivered - sum(records.failed.values())),
        lost=before.lost + max(0, before.unresolved - last.inherited),
        deaths=before.deaths + 1,
    )
    return Past(
        lives=[*past.lives, name][-_MOST_LIVES:],
        workers=past.workers | {str(worker): after},
        tenants=_tenants(past.tenants, stats.tenants),
        answers=added(past.answers, stats.answers),
        refusals=added(past.refusals, stats.refusals),
        streams=_streams(past.streams, stats.streams),
        families=_families([*past.families, *(each for each in last.families if each.kind in GROWING)]),
    )


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return two sets of counts as one."""
    return dict(Counter(one) + Counter(other))


def _tenants(one: Mapping[str, TenantStats], other: Mapping[str, TenantStats]) -> dict[str, TenantStats]:
    found = dict(one)
    for tenant, each in other.items():
        before = found.get(tenant, TenantStats())
        found[tenant] = TenantStats(
            requests=before.requests + each.requests,
            accepted_records=before.accepted_records + each.accepted_records,
            refused=added(before.refused, each.refused),
        )
    return found


def _streams(one: Mapping[str, StreamStats], other: Mapping[str, StreamStats]) -> dict[str, StreamStats]:
    found = dict(one)
    for stream, each in other.items():
        before = found.get(stream, StreamStats())
        found[stream] = StreamStats(
            accepted=before.accepted + each.accepted,
            delivered=before.delivered + each.delivered,
            failed=before.failed + each.failed,
        )
    return found


def _families(families: Iterable[FamilySnapshot]) -> list[FamilySnapshot]:
    by_name: dict[str, FamilySnapshot] = {}
    for family in families:
        known = by_name.get(family.name)
        samples = family.samples if known is None else _samples([*known.samples, *family.samples])
        by_name[family.name] = msgspec.structs.replace(family, samples=samples)
    return list(by_name.values())


def _samples(samples: Iterable[Sample]) -> list[Sample]:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, labels, value in samples:
        key = (name, labels)
        if key not in sums:
            sums[key] = value
        elif name.endswith("_created"):
            sums[key] = min(sums[key], value)
        else:
            sums[key] += value
    return [(name, labels, value) for (name, labels), value in sums.items()]
