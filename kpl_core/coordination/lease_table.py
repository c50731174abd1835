"""The lease table: computes the next summary from the last summary and the workers' reports; pure.

The invariant: the sum of what all workers may be using at any moment is within the limit. This includes grants that a
worker has not read yet. Therefore:

- A reduced grant is written at once, but the difference stays reserved until the worker reports that it applied the
  reduction (`Grant.ceiling`).
- A raised grant takes only what is not reserved.

The invariant does not depend on whose clock is right, on the order in which workers read, or on whether a next summary
is ever computed: following the last summary is safe for any length of time.

A worker counts while its report is younger than two intervals. If every resource it claims is calm, which means that
capacity is unassigned, the report may be fourteen intervals old: other workers do not need what a dead worker leaves.
Once a resource is not calm, its workers must report within two intervals.

If nothing that matters has changed, and each worker uses its grants, the last summary is renewed: only its time
changes. After a gap in which no summary could be computed, all reports are old, so all old members keep their grants
for a while. A step of the store's clock is handled in the same way. When the first workers claim a resource, others may
be using it as newcomers: for the same while no grant is above a newcomer's share. The plan of a resource that no worker
claims any more is kept for ten minutes, so that this is rare.
If the store loses its latest writes (a failover to a stale replica), the workers' reports prevail: a reported holding
counts if it is more than the table's grant.

The available part of a limit is estimated from throttled records. All workers together keep the limit, so throttling
means that a writer outside the fleet exists. As in `AdaptiveRate` of `kpl_core.pipeline.shard_limiter`, but for the
whole fleet: decrease by 15 % an interval while more than 1 % is throttled, else increase by 10 points an interval
(Chiu and Jain, 1989).
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import starmap
from typing import Final

import msgspec

from kpl_core.coordination.max_min_share import fair_level, shares
from kpl_core.coordination.store_objects import Claim, FleetMember, Grant, Pair, ResourcePlan, Summary, WorkerReport

TOLERATED_SHARE: Final = 0.01
DECREASE: Final = 0.85
INCREASE: Final = 0.1
FLOOR: Final = 0.05


def next_estimate(estimate: float, *, sent: float, throttled: float, intervals: float) -> float:
    """Return the new share of the limit, 0.05 .. 1, that is available to this fleet.

    Args:
        estimate: the share so far.
        sent: what all workers sent in their last interval, in any unit.
        throttled: how much of it was throttled, in the same unit.
        intervals: intervals since `estimate` was computed; at most one counts.
    """
    passed = min(1.0, max(0.0, intervals))
    if throttled > TOLERATED_SHARE * sent:
        return max(FLOOR, estimate * math.pow(DECREASE, passed))
    return min(1.0, estimate + INCREASE * passed)


# A worker without a report for this long is gone, and its leases have expired.
LIFETIME_INTERVALS: Final = 2.0
# The same for a worker whose resources are all calm. It reports at least every CALM_INTERVALS.
CALM_LIFETIME_INTERVALS: Final = 14.0
CALM_INTERVALS: Final = 12.0
# A summary is renewed for this long at most.
RENEWED_INTERVALS: Final = 60.0
# A resource is calm if more than this share of its limit is unassigned. Less is not worth a sync either.
CALM_SHARE: Final = 0.02
# A grant does not serve a worker that uses more than this share of it: a load that the grant limits is never above it.
NEARLY_USED: Final = 0.9
# No grant is raised for this long after the start of a sequence, because other workers may be about to report. The same
# goes for the start of a resource.
WARM_UP_INTERVALS: Final = 1.3
# If no summary followed for this long, no worker could reach the store. At most LIFETIME_INTERVALS minus the 1.1
# between two reports; otherwise the first worker to return would take all others for dead.
GAP_INTERVALS: Final = 0.8
# An older summary is ignored.
FORGOTTEN_INTERVALS: Final = 120.0
# The share of the limit that is reserved for workers that have not started: all of it if none has started.
RESERVE: Final = 0.04
# A table is settled if its deviation from the targets is at most this share of the limit.
SETTLED: Final = 0.02
# A busy worker reports more often than every nine summaries, and stores charge for bytes: one digit.
MOST_STEADY: Final = 9
NO_LIMITS: Final[Pair] = (math.inf, math.inf)
NO_GRANT: Final[Pair] = (0.0, 0.0)


class TableRules(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters. `max_workers` is the minimum to plan for; workers report their own. See `Summary.dedicated`."""

    interval_seconds: float
    store_timeout_seconds: float = 0.0
    max_workers: int = 1
    dedicated: bool = False


class _Claimants:
    """The claims of all workers on one resource. For a large fleet `add` runs a hundred thousand times per summary.

    The values are in arrays, so that no report must be kept: the reports of a large fleet are tens of megabytes.
    """

    def __init__(self) -> None:
        self.members: list[FleetMember] = []
        # By dimension.
        self.demands = (array("d"), array("d"))
        self.ceilings = (array("d"), array("d"))
        # The lower one of what each was granted and what it holds. A grant above that is a rise.
        self.unraised = (array("d"), array("d"))
        self.limits = NO_LIMITS
        self.sent = self.throttled = 0.0

    def add(self, member: FleetMember, claim: Claim, ceiling: Pair, granted: Pair) -> None:
        """Add a member, its claim, the most it may be using, and its last grant."""
        self.members.append(member)
        self.demands[0].append(claim.demand[0])
        self.demands[1].append(claim.demand[1])
        self.ceilings[0].append(ceiling[0])
        self.ceilings[1].append(ceiling[1])
        self.unraised[0].append(min(granted[0], claim.holding[0]))
        self.unraised[1].append(min(granted[1], claim.holding[1]))
        if claim.limit != self.limits:
            self.limits = (min(self.limits[0], claim.limit[0]), min(self.limits[1], claim.limit[1]))
        self.sent += claim.sent
        self.throttled += claim.throttled


def next_summary(previous: Summary | None, reports: Iterable[WorkerReport], rules: TableRules, *, at: float) -> Summary:
    """Return the next summary, or the previous one with a new time if all its grants still serve.

    Args:
        previous: the latest summary, None if there is none that can be read.
        reports: read once, in order, and not kept; the first report of each worker counts.
        rules: the parameters.
        at: the store's clock, seconds since 1970.
    """
    interval = rules.interval_seconds
    generation = 1 if previous is None else previous.generation + 1
    if previous is not None and at - previous.computed_at > FORGOTTEN_INTERVALS * interval:
        previous = None
    summary = _empty(previous, generation, rules, at=at)
    is_warm = summary.settled
    old = {} if previous is None else previous.members
    claimants: defaultdict[str, _Claimants] = defaultdict(_Claimants)
    # Workers whose reports do not count now may still be running, so the plan must include them.
    max_workers = rules.max_workers if previous is None or is_warm else max(rules.max_workers, previous.max_workers)
    leaving: set[str] = set()
    # When workers reported last, if that is before a report that `previous` has counted.
    stepped: dict[str, float] = {}
    # Whether the grants of `previous` still serve all workers.
    serves = is_warm
    for report in reports:
        worker_id = report.worker_id
        if report.leaving:
            leaving.add(worker_id)
            continue
        known = old.get(worker_id)
        if worker_id in summary.members:
            continue
        if not _counts(report, known, previous, interval, at=at):
            if known is not None and report.written_at < known.reported_at:
                stepped[worker_id] = report.written_at
            continue
        max_workers = max(max_workers, report.max_workers)
        serves = serves and previous is not None and known is not None and _serves(known, report, previous)
        member = summary.members[worker_id] = FleetMember(report.written_at, report.weight, report.tier, {})
        _add_claims(claimants, member, report, known, previous)
    if stepped and previous is not None:
        # These reported while the store's clock was set back, and may still be running. A new sequence gives them time.
        summary.began_at, summary.settled, is_warm, serves = at, False, False, False
        max_workers = max(max_workers, previous.max_workers)
    if not is_warm and previous is not None:
        _keep_silent(summary, leaving, claimants, previous, stepped)

    summary.member_count = len(summary.members)
    summary.max_workers = max_workers
    if serves and previous is not None and _is_renewable(previous, summary, claimants, rules):
        return msgspec.structs.replace(previous, computed_at=at, claimed_until=0.0)
    _divide_all(summary, claimants, previous, rules, max_workers)
    return summary


def _empty(previous: Summary | None, generation: int, rules: TableRules, *, at: float) -> Summary:
    """Return a summary without members. It is settled if its sequence is warm."""
    is_gap = previous is None or abs(at - previous.computed_at) > GAP_INTERVALS * rules.interval_seconds
    began_at = at if previous is None or is_gap else previous.began_at
    return Summary(
        generation=generation,
        computed_at=at,
        divided_at=at,
        began_at=began_at,
        settled=at - began_at >= WARM_UP_INTERVALS * rules.interval_seconds,
        dedicated=rules.dedicated,
    )


def _keep_silent(
    summary: Summary,
    leaving: Container[str],
    claimants: defaultdict[str, _Claimants],
    previous: Summary,
    stepped: Mapping[str, float],
) -> None:
    """Keep the workers of `previous` whose reports are as old as the gap, or of another time (`stepped`).

    A worker that is really gone loses its lease once the table is warm.
    """
    for worker_id, known in previous.members.items():
        if worker_id in summary.members or worker_id in leaving:
            continue
        reported_at = stepped.get(worker_id, known.reported_at)
        member = summary.members[worker_id] = FleetMember(reported_at, known.weight, known.tier, {})
        _add_silent(claimants, member, known, previous)


def _is_renewable(previous: Summary, summary: Summary, claimants: Mapping[str, _Claimants], rules: TableRules) -> bool:
    """Return True if `previous` may be kept. The grants of each member of the undivided `summary` serve it."""
    at = summary.computed_at
    return (
        previous.settled
        and previous.dedicated == rules.dedicated
        and at - previous.divided_at <= RENEWED_INTERVALS * rules.interval_seconds
        and previous.max_workers == summary.max_workers
        and previous.members.keys() == summary.members.keys()
        and all(
            plan.estimate == 1.0 and is_calm(plan, previous) if resource in claimants else _is_kept(plan, rules, at)
            for resource, plan in previous.resources.items()
        )
    )


def _divide_all(
    summary: Summary,
    claimants: Mapping[str, _Claimants],
    previous: Summary | None,
    rules: TableRules,
    max_workers: int,
) -> None:
    """Divide every resource into `summary`, which has the members and no grants, and keep the plans of unused ones."""
    at, is_warm = summary.computed_at, summary.settled
    plans = {} if previous is None else previous.resources
    intervals = 0.0 if previous is None else (at - previous.computed_at) / rules.interval_seconds
    for resource, among in claimants.items():
        known = plans.get(resource)
        before, claimed_at = (1.0, at) if known is None else (known.estimate, known.began_at)
        estimate = next_estimate(before, sent=among.sent, throttled=among.throttled, intervals=intervals)
        is_known = is_warm and abs(at - claimed_at) >= WARM_UP_INTERVALS * rules.interval_seconds
        plan, grants, settled = _divide(among, estimate, max_workers, known, is_warm=is_known)
        calm_at = at
        if not is_known or any(map(_is_scarce, plan.unassigned, plan.limit)):
            # Before this division, also if the clock was set back or shows whole seconds.
            calm_at = 0.0 if known is None or previous is None else min(_calm_at(known, previous), at - 0.001)
        summary.resources[resource] = msgspec.structs.replace(plan, began_at=claimed_at, used_at=at, calm_at=calm_at)
        for member, grant, first, second in zip(among.members, grants, *among.unraised, strict=True):
            member.grants[resource] = grant
            if grant.share[0] > first or grant.share[1] > second:
                member.steady = 0
        summary.settled = summary.settled and settled
    for resource, plan in plans.items():
        if resource not in claimants and _is_kept(plan, rules, at):
            summary.resources[resource] = _unused(plan, max_workers, is_warm=is_warm)


def _is_scarce(unassigned: float, limit: float) -> bool:
    return unassigned <= CALM_SHARE * limit


def is_calm(plan: ResourcePlan, head: Summary) -> bool:
    """Return True if the latest division left a part of this resource unassigned that is worth a sync."""
    return 0.0 < head.divided_at <= plan.calm_at


def _is_kept(plan: ResourcePlan, rules: TableRules, at: float) -> bool:
    return abs(at - plan.used_at) <= FORGOTTEN_INTERVALS * rules.interval_seconds


def _calm_at(plan: ResourcePlan, head: Summary) -> float:
    """Return when the resource was last calm."""
    return head.computed_at if is_calm(plan, head) else plan.calm_at


def _counts(
    report: WorkerReport, known: FleetMember | None, previous: Summary | None, interval: float, *, at: float
) -> bool:
    """Return True if the worker of this report may still be alive; `known` is it in the previous summary."""
    age, lifetime = at - report.written_at, LIFETIME_INTERVALS * interval
    if abs(age) <= lifetime:
        return True
    # A worker that was considered gone stays so until it reports again.
    if previous is None or known is None or not 0.0 < age <= CALM_LIFETIME_INTERVALS * interval:
        return False
    plans = (previous.resources.get(resource) for resource in report.claims)
    return all(plan is not None and abs(at - _calm_at(plan, previous)) <= lifetime for plan in plans)


def _serves(known: FleetMember, report: WorkerReport, previous: Summary) -> bool:
    """Return True if this worker's grants in `previous` are still what it should have."""
    # It uses less than what it has read if that follows from an earlier claim: it has started again since, or given up.
    has_read = (report.generation, report.token) == (previous.generation, previous.token)
    for resource, claim in report.claims.items():
        grant, plan = known.grants.get(resource), previous.resources.get(resource)
        if grant is None or plan is None or claim.limit != plan.limit or claim.throttled > TOLERATED_SHARE * claim.sent:
            return False
        for demand, share, holding, ceiling in zip(
            claim.demand, grant.share, claim.holding, grant.ceiling, strict=True
        ):
            if demand > NEARLY_USED * share or holding > ceiling or (has_read and holding < share):
                return False
    return (known.weight, known.tier) == (report.weight, report.tier)


def claim_seconds(interval_seconds: float, store_timeout_seconds: float) -> float:
    """Return how long a process may compute and write a summary. Its claim lasts so long, at least for one call."""
    return max(interval_seconds, store_timeout_seconds)


def is_claimed(head: Summary, interval_seconds: float, store_timeout_seconds: float, *, at: float) -> bool:
    """Return True if another process is computing the next summary.

    No claim is longer than both `claim_seconds` and the lifetime of a lease. One that seems longer was written before
    the store's clock was set back, and is ignored. `at` is the store's clock, in seconds since 1970.
    """
    most = max(LIFETIME_INTERVALS * interval_seconds, claim_seconds(interval_seconds, store_timeout_seconds))
    return 0.0 < head.claimed_until - at <= most


def _add_claims(
    claimants: defaultdict[str, _Claimants],
    member: FleetMember,
    report: WorkerReport,
    known: FleetMember | None,
    previous: Summary | None,
) -> None:
    """Add the claims of a report. `known` is its worker in the previous summary.

    A worker that has applied the latest summary holds what that granted. One that has applied an earlier summary holds
    no more than it reported if no later one raised its grants. In a fleet with slow calls few reports are of the latest
    summary, and the other workers would wait for those.
    """
    grants, is_heard = {}, False
    if known is not None and previous is not None:
        grants = known.grants
        behind = previous.generation - report.generation
        # Otherwise the store has lost the summary that this worker has applied.
        if behind > 0 or (behind == 0 and report.token == previous.token):
            is_heard = behind <= known.steady
            member.steady = min(MOST_STEADY, known.steady + 1)
    for resource, claim in report.claims.items():
        grant = grants.get(resource)
        ceiling, granted = claim.holding, NO_GRANT
        if grant is None:
            ceiling = _of_newcomer(ceiling, resource, report, previous)
        else:
            granted = grant.share
            bound = granted if is_heard else grant.ceiling
            # It can hold more only if the store lost a summary that it has applied.
            if ceiling[0] <= bound[0] and ceiling[1] <= bound[1]:
                ceiling = bound
            else:
                ceiling = (max(bound[0], ceiling[0]), max(bound[1], ceiling[1]))
        claimants[resource].add(member, claim, ceiling, granted)


def _of_newcomer(holding: Pair, resource: str, report: WorkerReport, previous: Summary | None) -> Pair:
    """Return the most that a worker without a grant may be using: its share may have risen since its report."""
    plan = None if previous is None else previous.resources.get(resource)
    if plan is None or previous is None or (report.generation, report.token) == (previous.generation, previous.token):
        return holding
    return max(holding[0], plan.newcomer[0]), max(holding[1], plan.newcomer[1])


def _add_silent(
    claimants: defaultdict[str, _Claimants], member: FleetMember, silent: FleetMember, previous: Summary
) -> None:
    """Add a worker without a current report as a claimant. Its demand is its last grant, so it keeps that grant."""
    for resource, grant in silent.grants.items():
        plan = previous.resources.get(resource)
        if plan is not None:
            claimants[resource].add(member, Claim(grant.share, grant.ceiling, plan.limit), grant.ceiling, NO_GRANT)


def _divide(
    among: _Claimants, estimate: float, max_workers: int, known: ResourcePlan | None, *, is_warm: bool
) -> tuple[ResourcePlan, list[Grant], bool]:
    """Divide one resource; return its plan, the grants in the members' order, and whether the shares are settled.

    `known` is its plan in the previous summary: workers that are about to report may be using its newcomers' share.
    """
    weights = [member.weight for member in among.members]
    tiers = [member.tier for member in among.members]
    absent = max(0, max_workers - len(weights))
    columns: list[tuple[list[float], list[float]]] = []
    newcomer: list[float] = []
    unassigned: list[float] = []
    settled = True
    starting = (0.0, 0.0) if known is None else known.newcomer
    columns_of = zip(among.limits, among.demands, among.ceilings, starting, strict=True)
    for reported, demands, ceilings, start in columns_of:
        limit = reported * estimate
        planned = limit * (1.0 - RESERVE * absent / max_workers)
        targets = shares(planned, demands, weights, tiers)
        if not is_warm:
            # A newcomer may use this much in any case.
            most = limit / max_workers
            bounds = [ceiling if ceiling > most else most for ceiling in ceilings]
            targets = [target if target < bound else bound for target, bound in zip(targets, bounds, strict=True)]
        most_granted = planned
        if start * max_workers > limit * RESERVE * 1.001:
            # Not in any other case: a sum with a rounding error has more digits, and stores charge for bytes.
            most_granted = min(planned, limit - absent * start - sum([max(0.0, start - most) for most in ceilings]))
        granted, highest, deviation = _grant_unreserved(targets, ceilings, most_granted)
        columns.append((granted, highest))
        settled = settled and deviation <= SETTLED * limit
        unassigned.append(max(0.0, planned - sum(highest)))
        newcomer.append(_newcomer(limit, highest, granted, absent, max_workers, is_warm=is_warm))
    (share0, most0), (share1, most1) = columns
    pairs = zip(zip(share0, share1, strict=True), zip(most0, most1, strict=True), strict=True)
    grants = list(starmap(Grant, pairs))
    fair = _fair(weights, tiers, (share0, share1), [limit * estimate for limit in among.limits])
    plan = ResourcePlan(
        among.limits, (newcomer[0], newcomer[1]), estimate, fair, unassigned=(unassigned[0], unassigned[1])
    )
    return plan, grants, settled


def _grant_unreserved(
    targets: Sequence[float], ceilings: Sequence[float], planned: float
) -> tuple[list[float], list[float], float]:
    """Return what can be granted now, the new ceilings, and the total deviation from the targets.

    The sum of the ceilings grows only into the unreserved part of the limit.
    """
    rises = [target - ceiling if target > ceiling else 0.0 for target, ceiling in zip(targets, ceilings, strict=True)]
    wanted, held = sum(rises), sum(ceilings)
    fraction = min(1.0, max(0.0, planned - held) / wanted) if wanted > 0.0 else 0.0
    highest = [ceiling + rise * fraction for ceiling, rise in zip(ceilings, rises, strict=True)]
    granted = [target if target < most else most for target, most in zip(targets, highest, strict=True)]
    falls = wanted + held - sum(targets)
    return granted, highest, falls + wanted * (1.0 - fraction)


def _newcomer(
    limit: float, ceilings: Sequence[float], granted: Sequence[float], absent: int, max_workers: int, *, is_warm: bool
) -> float:
    """Return what each worker without a grant may use. With the ceilings, the sum of these is within the limit.

    Once the table is warm it is only what no summary assigns: a worker may use it for as long as it has not read the
    next summary. By then the ceilings may have fallen to what is `granted` now, and others have what that frees.
    """
    share = limit / max_workers
    reserve = share * RESERVE if is_warm else share
    least = share * RESERVE / 4
    if not absent:
        return least
    most = _level_beside(ceilings, limit - sum(ceilings), absent)
    if is_warm and min(granted, default=reserve) < reserve:
        most = min(most, _level_beside(granted, absent * reserve, absent))
    return min(reserve, max(most, least))


def _level_beside(shares_of_members: Sequence[float], left: float, absent: int) -> float:
    """Return what each newcomer may use of `left`, if members may have crashed and have newcomers in their places.

    Such a newcomer uses what the member had, and a part of `left` above that.
    """
    heads = absent
    for share in sorted(shares_of_members):
        if share * heads >= left:
            break
        left, heads = left + share, heads + 1
    return left / heads


def _unused(plan: ResourcePlan, max_workers: int, *, is_warm: bool) -> ResourcePlan:
    """Return the plan of a resource that no worker claims now."""
    first, second = (
        _newcomer(limit * plan.estimate, (), (), max_workers, max_workers, is_warm=is_warm) for limit in plan.limit
    )
    return msgspec.structs.replace(plan, newcomer=(first, second), fair={}, unassigned=plan.limit)


def _fair(
    weights: list[float], tiers: list[int], granted: tuple[list[float], list[float]], left: list[float]
) -> dict[int, Pair]:
    """Return what a unit of weight of each tier may claim: what higher tiers leave of `left`, divided by weight."""
    fair: dict[int, Pair] = {}
    for tier in sorted(set(tiers)):
        of_tier = [weight for weight, rank in zip(weights, tiers, strict=True) if rank == tier]
        fair[tier] = (fair_level(left[0], of_tier), fair_level(left[1], of_tier))
        if len(of_tier) < len(tiers):
            for dimension in (0, 1):
                taken = sum([share for share, rank in zip(granted[dimension], tiers, strict=True) if rank == tier])
                left[dimension] = max(0.0, left[dimension] - taken)
    return fair
