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

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Final

import msgspec

from kpl_core.coordination.max_min_share import fair_level, shares
from kpl_core.coordination.store_objects import Claim, FleetMember, Grant, Pair, ResourcePlan, Summary, WorkerReport

__all__ = [
    "FORGOTTEN_INTERVALS",
    "LIFETIME_INTERVALS",
    "RESERVE",
    "TableRules",
    "is_claimed",
    "next_estimate",
    "next_summary",
]

TOLERATED_SHARE: Final = 0.01
DECREASE: Final = 0.85
INCREASE: Final = 0.1
FLOOR: Final = 0.05


def next_estimate(estimate: float, *, sent: float, throttled: float, intervals: float) -> float:
    """Return the new share, 0.05 .. 1, of the limit that is there for us.

    Args:
        estimate: the share so far.
        sent: what all workers sent in their last interval; any unit.
        throttled: as much of it was refused.
        intervals: how many intervals have passed since `estimate` was made; at most one counts.
    """
    passed = min(1.0, max(0.0, intervals))
    if throttled > TOLERATED_SHARE * sent:
        return max(FLOOR, estimate * math.pow(DECREASE, passed))
    return min(1.0, estimate + INCREASE * passed)


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
NO_LIMITS: Final[Pair] = (math.inf, math.inf)


class TableRules(msgspec.Struct, frozen=True, kw_only=True):
    """`max_workers` is the least to plan for; workers report their own. `dedicated`: see `Summary`."""

    interval_seconds: float
    max_workers: int = 1
    dedicated: bool = False


class _Claimants:
    """Who wants a resource, and what their claims come to: a large fleet passes here a hundred thousand times.

    Arrays, so that no report need be kept: those of a large fleet lie all over tens of megabytes.
    """

    __slots__ = ("ceilings", "demands", "limits", "members", "sent", "throttled")

    def __init__(self) -> None:
        self.members: list[FleetMember] = []
        # By dimension.
        self.demands = (array("d"), array("d"))
        self.ceilings = (array("d"), array("d"))
        self.limits = NO_LIMITS
        self.sent = self.throttled = 0.0

    def add(self, member: FleetMember, claim: Claim, ceiling: Pair) -> None:
        """Add a member, what it claims, and the most it may be using."""
        self.members.append(member)
        self.demands[0].append(claim.demand[0])
        self.demands[1].append(claim.demand[1])
        self.ceilings[0].append(ceiling[0])
        self.ceilings[1].append(ceiling[1])
        if claim.limit != self.limits:
            self.limits = (min(self.limits[0], claim.limit[0]), min(self.limits[1], claim.limit[1]))
        self.sent += claim.sent
        self.throttled += claim.throttled


def next_summary(previous: Summary | None, reports: Iterable[WorkerReport], rules: TableRules, *, at: float) -> Summary:
    """Return the summary that follows.

    Args:
        previous: the latest, None if there is none that can be read.
        reports: read once, one after the other, and not kept; of each worker the first one counts.
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
    claimants: defaultdict[str, _Claimants] = defaultdict(_Claimants)
    # Those whose reports do not count now were planned for, and are there all the same.
    max_workers = rules.max_workers if previous is None or is_warm else max(rules.max_workers, previous.max_workers)
    leaving: set[str] = set()
    for report in reports:
        worker_id = report.worker_id
        if report.leaving:
            leaving.add(worker_id)
            continue
        if worker_id in summary.members or abs(at - report.written_at) > lifetime:
            continue
        max_workers = max(max_workers, report.max_workers)
        known = old.get(worker_id)
        # It has applied the latest summary: it holds what that one granted, and no more.
        is_heard = previous is not None and (report.generation, report.token) == (previous.generation, previous.token)
        member = summary.members[worker_id] = FleetMember(report.written_at, report.weight, report.tier, {})
        _add_claims(claimants, member, report, known, is_heard=is_heard)
    if not is_warm:
        # Their reports are as old as the gap; who is really gone loses its lease when this table is warm.
        for worker_id, silent in old.items():
            if worker_id not in summary.members and worker_id not in leaving:
                member = summary.members[worker_id] = FleetMember(silent.reported_at, silent.weight, silent.tier, {})
                _add_silent(claimants, member, silent, previous)

    intervals = 0.0 if previous is None else (at - previous.computed_at) / interval
    for resource, among in claimants.items():
        plan = None if previous is None else previous.resources.get(resource)
        before = 1.0 if plan is None else plan.estimate
        estimate = next_estimate(before, sent=among.sent, throttled=among.throttled, intervals=intervals)
        summary.resources[resource], grants, settled = _divide(among, estimate, max_workers, is_warm=is_warm)
        for member, grant in zip(among.members, grants, strict=True):
            member.grants[resource] = grant
        summary.settled = summary.settled and settled
    summary.member_count = len(summary.members)
    summary.max_workers = max_workers
    return summary


def is_claimed(head: Summary, interval_seconds: float, *, at: float) -> bool:
    """Say whether somebody computes the next summary now.

    A claim lasts an interval; one that ends later than the longest life of anything here was made before the store's
    clock was set back.
    """
    return 0.0 < head.claimed_until - at <= LIFETIME_INTERVALS * interval_seconds


def _add_claims(
    claimants: defaultdict[str, _Claimants],
    member: FleetMember,
    report: WorkerReport,
    known: FleetMember | None,
    *,
    is_heard: bool,
) -> None:
    grants = {} if known is None else known.grants
    for resource, claim in report.claims.items():
        grant = grants.get(resource)
        ceiling = claim.holding
        if grant is not None:
            granted = grant.share if is_heard else grant.ceiling
            # It holds more only if the store forgot a summary that it has applied.
            if ceiling[0] <= granted[0] and ceiling[1] <= granted[1]:
                ceiling = granted
            else:
                ceiling = (max(granted[0], ceiling[0]), max(granted[1], ceiling[1]))
        claimants[resource].add(member, claim, ceiling)


def _add_silent(
    claimants: defaultdict[str, _Claimants], member: FleetMember, silent: FleetMember, previous: Summary | None
) -> None:
    """Let a member that could not report keep what it has; it wants just that."""
    for resource, grant in silent.grants.items():
        plan = None if previous is None else previous.resources.get(resource)
        if plan is not None:
            claimants[resource].add(member, Claim(grant.share, grant.ceiling, plan.limit), grant.ceiling)


def _divide(
    among: _Claimants, estimate: float, max_workers: int, *, is_warm: bool
) -> tuple[ResourcePlan, list[Grant], bool]:
    """Divide one resource; return its plan, the grants in the members' order, and whether nothing is left to do."""
    weights = [member.weight for member in among.members]
    tiers = [member.tier for member in among.members]
    absent = max(0, max_workers - len(weights))
    columns: list[tuple[list[float], list[float]]] = []
    newcomer: list[float] = []
    settled = True
    for reported, demands, ceilings in zip(among.limits, among.demands, among.ceilings, strict=True):
        limit = reported * estimate
        planned = limit * (1.0 - RESERVE * absent / max_workers)
        targets = shares(planned, demands, weights, tiers)
        if not is_warm:
            # What a newcomer may have anyway.
            most = limit / max_workers
            bounds = [ceiling if ceiling > most else most for ceiling in ceilings]
            targets = [target if target < bound else bound for target, bound in zip(targets, bounds, strict=True)]
        granted, highest, wrong = _safely(targets, ceilings, planned)
        columns.append((granted, highest))
        settled = settled and wrong <= SETTLED * limit
        newcomer.append(_newcomer(reported, limit - sum(highest), absent, max_workers))
    (share0, most0), (share1, most1) = columns
    pairs = zip(zip(share0, share1, strict=True), zip(most0, most1, strict=True), strict=True)
    grants = list(starmap(Grant, pairs))
    fair = _fair(weights, tiers, (share0, share1), [limit * estimate for limit in among.limits])
    return ResourcePlan(among.limits, (newcomer[0], newcomer[1]), estimate, fair), grants, settled


def _safely(
    targets: Sequence[float], ceilings: Sequence[float], planned: float
) -> tuple[list[float], list[float], float]:
    """Return what can be granted now, the new ceilings, and how far all that is from the targets.

    The sum of the ceilings grows only into what is nobody's.
    """
    rises = [target - ceiling if target > ceiling else 0.0 for target, ceiling in zip(targets, ceilings, strict=True)]
    wanted, held = sum(rises), sum(ceilings)
    fraction = min(1.0, max(0.0, planned - held) / wanted) if wanted > 0.0 else 0.0
    highest = [ceiling + rise * fraction for ceiling, rise in zip(ceilings, rises, strict=True)]
    granted = [target if target < most else most for target, most in zip(targets, highest, strict=True)]
    falls = wanted + held - sum(targets)
    return granted, highest, falls + wanted * (1.0 - fraction)


def _newcomer(limit: float, nobodys: float, absent: int, max_workers: int) -> float:
    """Return what each worker that is not there yet may take: all of them together only what is nobody's."""
    share = limit / max_workers
    return min(share, max(nobodys / max(1, absent), share * RESERVE / 4))


def _fair(
    weights: list[float], tiers: list[int], granted: tuple[list[float], list[float]], left: list[float]
) -> dict[int, Pair]:
    """Return what a unit of weight of each tier may claim: what higher tiers leave of `left`, divided."""
    fair: dict[int, Pair] = {}
    for tier in sorted(set(tiers)):
        of_tier = [weight for weight, rank in zip(weights, tiers, strict=True) if rank == tier]
        fair[tier] = (fair_level(left[0], of_tier), fair_level(left[1], of_tier))
        if len(of_tier) < len(tiers):
            for dimension in (0, 1):
                taken = sum([share for share, rank in zip(granted[dimension], tiers, strict=True) if rank == tier])
                left[dimension] = max(0.0, left[dimension] - taken)
    return fair
