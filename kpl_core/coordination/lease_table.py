"""The lease table: from the last summary and the workers' reports to the next summary; pure.

The one law: what all workers may be using at any moment, grants not yet heard of included,
is within the limit. So

- a grant that falls is written at once, but its difference is nobody's until the worker says
  that it applied the fall (`Grant.ceiling`);
- a grant that rises takes only what is nobody's.

Nothing here depends on whose clock is right, on the order in which workers read, or on whether
anybody ever computes again: whatever summary is the last one, following it for ever is safe.
A worker counts while its report is younger than two intervals. After a gap, in which nobody could
compute, all old members keep what they have for a while, since all reports are old then; after a
step of the store's clock likewise, since all reports are of another time. A store that goes back to
what it held before (a replica that missed the latest writes takes over) is believed no more than
the workers: what a report says it holds counts, if that is more than the table grants.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from kpl_core.coordination.max_min_share import fair_level, shares
from kpl_core.coordination.report import Claim, Pair, WorkerReport
from kpl_core.coordination.summary import Grant, Member, ResourcePlan, Summary
from kpl_core.coordination.throttle_estimate import next_estimate

__all__ = ["FORGOTTEN_INTERVALS", "LIFETIME_INTERVALS", "RESERVE", "TableRules", "is_claimed", "next_summary"]

# A worker that has not reported for so long is gone, and its leases are over.
LIFETIME_INTERVALS: Final = 2.0
# Nobody is raised in the first moments of a row of summaries: others may be about to report.
WARM_UP_INTERVALS: Final = 1.3
# A summary without a follower for so long means that nobody could reach the store. No more than LIFETIME_INTERVALS
# less the 1.1 between two reports, or the first to come back would take all others for dead.
GAP_INTERVALS: Final = 0.8
# An older summary says nothing of the present.
FORGOTTEN_INTERVALS: Final = 120.0
# Of the limit, kept for workers that are not there yet: all of it while nobody is, nothing when all are.
RESERVE: Final = 0.04
# What may be missing or too much, of the limit, in a table that is called settled.
SETTLED: Final = 0.02
NO_RATES: Final[Pair] = (0.0, 0.0)


class TableRules(msgspec.Struct, frozen=True, kw_only=True):
    """`max_workers` is the least to plan for; workers report their own. `dedicated`: see `Summary`."""

    interval_seconds: float
    max_workers: int = 1
    dedicated: bool = False


class _Row(msgspec.Struct, gc=False):
    """A member and its claim on the resource at hand."""

    worker_id: str
    weight: float
    tier: int
    claim: Claim
    ceiling: Pair


def next_summary(
    previous: Summary | None, reports: Mapping[str, WorkerReport], rules: TableRules, *, at: float
) -> Summary:
    """Return the summary that follows.

    Args:
        previous: the latest, None if there is none that can be read.
        reports: by worker; each at most once.
        rules: intervals and bounds.
        at: the store's clock, seconds since 1970.
    """
    interval = rules.interval_seconds
    lifetime = LIFETIME_INTERVALS * interval
    generation = 1 if previous is None else previous.generation + 1
    if previous is not None and at - previous.computed_at > FORGOTTEN_INTERVALS * interval:
        previous = None
    is_gap = previous is None or abs(at - previous.computed_at) > GAP_INTERVALS * interval
    began_at = at if previous is None or is_gap else previous.began_at
    is_warm = at - began_at >= WARM_UP_INTERVALS * interval
    old = {} if previous is None else previous.members

    summary = Summary(
        generation=generation, computed_at=at, began_at=began_at, settled=is_warm, dedicated=rules.dedicated
    )
    rows: dict[str, list[_Row]] = {}
    max_workers = rules.max_workers
    for worker_id, report in reports.items():
        if report.leaving or abs(at - report.written_at) > lifetime:
            continue
        max_workers = max(max_workers, report.max_workers)
        known = old.get(worker_id)
        # It has applied the latest summary: it holds what that one granted, and no more.
        is_heard = previous is not None and (report.generation, report.token) == (previous.generation, previous.token)
        summary.members[worker_id] = Member(report.written_at, report.weight, report.tier, {})
        _claim_rows(rows, worker_id, report, known, is_heard=is_heard)
    if not is_warm:
        # Their reports are as old as the gap; who is really gone loses its lease when this table is warm.
        for worker_id, member in old.items():
            report_or_none = reports.get(worker_id)
            if worker_id not in summary.members and not (report_or_none and report_or_none.leaving):
                summary.members[worker_id] = Member(member.reported_at, member.weight, member.tier, {})
                _silent_rows(rows, worker_id, member, previous)

    intervals = 0.0 if previous is None else (at - previous.computed_at) / interval
    for resource, members in rows.items():
        plan = None if previous is None else previous.resources.get(resource)
        estimate = next_estimate(
            1.0 if plan is None else plan.estimate,
            sent=sum([row.claim.sent for row in members]),
            throttled=sum([row.claim.throttled for row in members]),
            intervals=intervals,
        )
        summary.resources[resource], grants, settled = _divide(members, estimate, max_workers, is_warm=is_warm)
        for row, grant in zip(members, grants, strict=True):
            summary.members[row.worker_id].grants[resource] = grant
        summary.settled = summary.settled and settled
    summary.member_count = len(summary.members)
    return summary


def is_claimed(head: Summary, interval_seconds: float, *, at: float) -> bool:
    """Say whether somebody computes the next summary now.

    A claim lasts an interval; one that ends later than the longest life of anything here was made before the store's
    clock was set back.
    """
    return 0.0 < head.claimed_until - at <= LIFETIME_INTERVALS * interval_seconds


def _claim_rows(
    rows: dict[str, list[_Row]], worker_id: str, report: WorkerReport, known: Member | None, *, is_heard: bool
) -> None:
    grants = {} if known is None else known.grants
    for resource, claim in report.claims.items():
        grant = grants.get(resource)
        ceiling = claim.holding
        if grant is not None:
            granted = grant.share if is_heard else grant.ceiling
            # It holds more only if the store forgot a summary that it has applied.
            ceiling = (
                granted[0] if granted[0] > ceiling[0] else ceiling[0],
                granted[1] if granted[1] > ceiling[1] else ceiling[1],
            )
        row = _Row(worker_id, report.weight, report.tier, claim, ceiling)
        if resource in rows:
            rows[resource].append(row)
        else:
            rows[resource] = [row]


def _silent_rows(rows: dict[str, list[_Row]], worker_id: str, member: Member, previous: Summary | None) -> None:
    """Let a member that could not report keep what it has; it wants just that."""
    for resource, grant in member.grants.items():
        plan = None if previous is None else previous.resources.get(resource)
        if plan is not None:
            claim = Claim(grant.share, grant.ceiling, plan.limit)
            rows.setdefault(resource, []).append(_Row(worker_id, member.weight, member.tier, claim, grant.ceiling))


def _divide(
    members: list[_Row], estimate: float, max_workers: int, *, is_warm: bool
) -> tuple[ResourcePlan, list[Grant], bool]:
    """Divide one resource; return its plan, the grants in the members' order, and whether nothing is left to do."""
    weights = [row.weight for row in members]
    tiers = [row.tier for row in members]
    # Lists, not generators, and comparisons instead of max: a large fleet passes here a hundred thousand times.
    limits = tuple(min([row.claim.limit[dimension] for row in members]) for dimension in (0, 1))
    absent = max(0, max_workers - len(members))
    columns: list[tuple[list[float], list[float]]] = []
    newcomer: list[float] = []
    settled = True
    for dimension in (0, 1):
        limit = limits[dimension] * estimate
        planned = limit * (1.0 - RESERVE * absent / max_workers)
        ceilings = [row.ceiling[dimension] for row in members]
        targets = shares(planned, [row.claim.demand[dimension] for row in members], weights, tiers)
        if not is_warm:
            # What a newcomer may have anyway.
            most = limit / max_workers
            targets = [min(target, max(most, ceiling)) for target, ceiling in zip(targets, ceilings, strict=True)]
        granted, highest, wrong = _safely(targets, ceilings, planned)
        columns.append((granted, highest))
        outstanding = sum(highest)
        settled = settled and wrong <= SETTLED * limit
        newcomer.append(_newcomer(limits[dimension], limit - outstanding, absent, max_workers))
    grants = [
        Grant((share0, share1), (most0, most1))
        for share0, most0, share1, most1 in zip(*columns[0], *columns[1], strict=True)
    ]
    plan = ResourcePlan(
        (limits[0], limits[1]), (newcomer[0], newcomer[1]), estimate, _fair(members, columns, limits, estimate)
    )
    return plan, grants, settled


def _safely(targets: list[float], ceilings: list[float], planned: float) -> tuple[list[float], list[float], float]:
    """Return what can be granted now, the new ceilings, and how far all that is from the targets.

    The sum of the ceilings grows only into what is nobody's.
    """
    wanted = 0.0
    for target, ceiling in zip(targets, ceilings, strict=True):
        if target > ceiling:
            wanted += target - ceiling
    free = planned - sum(ceilings)
    fraction = 0.0 if wanted <= 0.0 or free <= 0.0 else min(1.0, free / wanted)
    granted: list[float] = []
    highest: list[float] = []
    wrong = 0.0
    for target, ceiling in zip(targets, ceilings, strict=True):
        if target <= ceiling:
            granted.append(target)
            highest.append(ceiling)
            wrong += ceiling - target
        else:
            share = ceiling + (target - ceiling) * fraction
            granted.append(share)
            highest.append(share)
            wrong += target - share
    return granted, highest, wrong


def _newcomer(limit: float, nobodys: float, absent: int, max_workers: int) -> float:
    """Return what each worker that is not there yet may take: all of them together only what is nobody's."""
    share = limit / max_workers
    return min(share, max(nobodys / max(1, absent), share * RESERVE / 4))


def _fair(
    members: list[_Row], columns: list[tuple[list[float], list[float]]], limits: tuple[float, ...], estimate: float
) -> dict[int, Pair]:
    """Return what a unit of weight of each tier may claim: what higher tiers leave, divided."""
    fair: dict[int, Pair] = {}
    left = [limit * estimate for limit in limits]
    for tier in sorted({row.tier for row in members}):
        weights = [row.weight for row in members if row.tier == tier]
        fair[tier] = (fair_level(left[0], weights), fair_level(left[1], weights))
        for dimension in (0, 1):
            taken = sum(share for row, share in zip(members, columns[dimension][0], strict=True) if row.tier == tier)
            left[dimension] = max(0.0, left[dimension] - taken)
    return fair
