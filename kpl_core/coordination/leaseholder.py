"""One worker's state: what it may use now, what it reports, and when its next sync is due; pure.

    alone      no store has answered yet: a sixth of limit / max_workers at first, then what the shard takes
               (`probed_share`). A rate that no service enforces is divided by the workers that usually run.
    newcomer   a store has answered: limit / max_workers, or the summary's reserve for newcomers; the least of all
               plans if the answer was late, or if the summary has an equal share that will soon be assigned
    leased     the summary's grant
    expired    the summary is older than a lease: the last share, never more, for as long as it takes; less while units
               are throttled, because others may have the store and have divided this share again

If the summary no longer contains this worker, its leases were revoked because it did not report for too long.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from kpl_core.coordination.demand import DemandMeter, Usage
from kpl_core.coordination.lease_table import (
    CALM_INTERVALS,
    CALM_SHARE,
    FLOOR,
    FORGOTTEN_INTERVALS,
    INCREASE,
    LIFETIME_INTERVALS,
    NEARLY_USED,
    RESERVE,
    TOLERATED_SHARE,
    is_calm,
    is_claimed,
)
from kpl_core.coordination.probed_share import ProbedShare
from kpl_core.coordination.store_objects import (
    Claim,
    FleetMember,
    Grant,
    Pair,
    ResourcePlan,
    Summary,
    SummaryPart,
    WorkerReport,
)
from kpl_core.options.coordination_options import ALONE_SHARE

LeaseState = Literal["alone", "newcomer", "leased", "expired"]

# A resource without any offered load for this long is given up until more is offered.
IDLE_INTERVALS: Final = 6.0
# In intervals. A worker that may get more than it has syncs more often, at first after FIRST_QUICK_SPACING, then after
# twice as long each time, up to WANTS_MORE_SPACING. Reading is cheaper than writing, so each
# worker reads the summary twice per report, and a summary is computed as often as it is read. So reports are at most
# 1.1 intervals apart and summaries 0.55, which `lease_table.GAP_INTERVALS` relies on.
FIRST_QUICK_SPACING: Final = 0.02
WANTS_MORE_SPACING: Final = 0.08
UNSETTLED_SPACING: Final = 0.08
# In so many quick syncs the summary may not yet count the new demand. More summaries would come before the workers
# have confirmed the last one, and so free nothing.
NEWS_SYNCS: Final = 2
READ_SPACING: Final = 0.5
COMPUTE_SPACING: Final = 0.4
REPORT_SPACING: Final = 0.7
# Only so long newcomers use the equal share of a warm-up, of `lease_table.WARM_UP_INTERVALS`. They read the next plan
# within 0.55, and report then; so others do not get that share before the report, even if the answer is slow.
OPEN_INTERVALS: Final = 0.3
# In intervals. How often a share without a store is lowered or raised.
BACKOFF_INTERVALS: Final = 0.18
# It is raised more slowly than those of the workers with the store, which raise theirs at the same time.
RECOVERY: Final = 0.3
# After this many quick syncs without success a worker returns to the normal interval.
MAX_QUICK_SYNCS: Final = 15
WANTS_MORE_ABOVE: Final = 1.1
ENTITLED_BELOW: Final = 0.9
# The worker that computed last has read all reports and goes on. Others of a large fleet compute when it is late.
# More than half an interval, also if the store's clock shows whole seconds.
LATE_SPACING: Final = 0.7
LARGE_FLEET: Final = 32
# A worker that uses at most this share of each of its shares measures only when it syncs. Units that wait wake it.
LITTLE_USED: Final = 0.5
_NOTHING: Final[Pair] = (0.0, 0.0)


class HolderRules(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of this worker, and its parameters."""

    worker_id: str
    interval_seconds: float
    max_workers: int
    store_timeout_seconds: float = 0.0
    weight: float = 1.0
    tier: int = 1
    # What each worker uses of a rate that no service enforces while no store has answered; None for other rates.
    unenforced_part: float | None = None


class PreparedReport(NamedTuple):
    """A report that is not yet written, when it was prepared, and the usage of each claim."""

    report: WorkerReport
    prepared_at: float
    counted: Mapping[str, Usage]


class Leaseholder:
    """Applies summaries. `now` is this process's monotonic clock, `at` the store's clock."""

    def __init__(self, rules: HolderRules) -> None:
        self.rules = rules
        self._meters: dict[str, DemandMeter] = {}
        # While no summary was applied.
        self._probed: dict[str, ProbedShare] | None = {} if rules.unenforced_part is None else None
        # Of the resources that it claims: those with a meter, except the ones that it gave up.
        self._shares: dict[str, Pair] = {}
        # What it may use of those that it gave up: what every plan reserves for a newcomer.
        self._given_up: dict[str, Pair] = {}
        # When it first reported, and when it first reported that it claims a resource again, by the store's clock. A
        # grant that follows from an older report is void: another worker may have it by now. An older report is also
        # that of a process that had the same name.
        self._first_reported_at = math.inf
        self._claimed_at: dict[str, float] = {}
        # What throttling leaves of each share while the lease is expired, and since when throttling is counted.
        self._backoff: dict[str, float] = {}
        self._counted_at = math.inf
        self._granted: set[str] = set()
        self._plans: Mapping[str, ResourcePlan] = {}
        self._is_current = False
        self._unsettled = False
        # Whether a later summary may have replaced the applied one before that was applied: the process was paused, or
        # the answer was late. Then only what every plan reserves for a newcomer is certain.
        self._was_read_late = False
        # Newcomers use the equal share of a warm-up that began at this time or later.
        self._open_since = -math.inf
        self._answered = False
        self._generation = 0
        self._token = ""
        self._renewed_at = 0.0
        # When a summary of this time was first seen.
        self._seen = (0.0, 0.0)
        self._synced_at = -math.inf
        self._reported_at = -math.inf
        self._reported: set[str] = set()
        # So that the reports of a fleet spread out in time.
        self._calm_spacing = CALM_INTERVALS * (1.0 - 0.2 * zlib.crc32(rules.worker_id.encode()) / 2**32)
        self._quick_syncs = 0
        # True if a summary lowered a share: other workers wait for this worker's report, and for the next summary.
        self._must_confirm = self._is_lowered = False
        self._confirm_syncs = 0
        # The last measurement found at most LITTLE_USED of each share in use, no waiting unit, no expired lease.
        self.uses_little = False

    # Shares

    def share(self, resource: str, limit: Pair) -> Pair:
        """Return the rates this worker may use of a resource, known or new."""
        known = self._shares.get(resource)
        if known is not None:
            factor = self._backoff.get(resource, 1.0)
            return known if factor == 1.0 else (known[0] * factor, known[1] * factor)
        newcomer = self._newcomer(resource, limit)
        last = self._given_up.get(resource, newcomer)
        return min(newcomer[0], last[0]), min(newcomer[1], last[1])

    def _newcomer(self, resource: str, limit: Pair) -> Pair:
        plan = self._plans.get(resource)
        if plan is not None and (self._was_read_late or plan.began_at < self._open_since):
            reserve = RESERVE / self.rules.max_workers
            return min(plan.newcomer[0], limit[0] * reserve), min(plan.newcomer[1], limit[1] * reserve)
        if plan is not None:
            # Also if it is old: other workers may go on with what it granted them.
            return plan.newcomer
        if self._answered:
            part = 1.0 / self.rules.max_workers
        else:
            part = self.rules.unenforced_part or ALONE_SHARE / self.rules.max_workers
        return limit[0] * part, limit[1] * part

    def claimable_part(self, resource: str, now: float) -> float:
        """Return the part of a resource that this worker gets if it wants all; 0.0 if no current plan says it."""
        if not self._answered or self.lease_age(now) > LIFETIME_INTERVALS * self.rules.interval_seconds:
            return 0.0
        plan = self._plans.get(resource)
        fair = None if plan is None else plan.fair.get(self.rules.tier)
        if plan is None or fair is None:
            return 1.0
        part = self.rules.weight * min(most / limit for most, limit in zip(fair, plan.limit, strict=True))
        return min(1.0, part if resource in self._granted else part / (1.0 + part))

    def state(self, now: float) -> LeaseState:
        """Return the basis of its shares."""
        if not self._granted:
            return "newcomer" if self._answered else "alone"
        return "expired" if self.lease_age(now) > LIFETIME_INTERVALS * self.rules.interval_seconds else "leased"

    def lease_age(self, now: float) -> float:
        """Return the seconds since the applied summary was computed; 0 before the first one."""
        return max(0.0, now - self._renewed_at) if self._generation else 0.0

    # Demand and report

    def measure(self, usages: Mapping[str, Usage], now: float) -> None:
        """Record the measured usage of each resource."""
        self.uses_little = True
        for resource in self._meters.keys() - usages.keys():
            self._give_up(resource)
            del self._meters[resource]
        idle_before = now - IDLE_INTERVALS * self.rules.interval_seconds
        for resource, usage in usages.items():
            meter = self._meters.get(resource)
            if meter is None:
                meter = self._meters[resource] = DemandMeter(self.rules.interval_seconds, usage, now)
            meter.measure(usage, now)
            if meter.idle_since >= idle_before or not self._shares:
                # What it has stays: `share` would lower it again by what throttling leaves of it.
                if resource not in self._shares:
                    self._shares[resource] = self.share(resource, usage.limit)
                self._given_up.pop(resource, None)
            elif len(self._shares) > 1:
                self._give_up(resource)
            share, demand = self._shares.get(resource, _NOTHING), meter.demand
            if demand[0] > LITTLE_USED * share[0] or demand[1] > LITTLE_USED * share[1] or usage.waiting != _NOTHING:
                self.uses_little = False
        if self._probed is not None:
            self._probe(self._probed, now)
        if self.state(now) == "expired":
            self.uses_little = False
            self._back_off(now)

    def _probe(self, probed: dict[str, ProbedShare], now: float) -> None:
        """Raise or lower the shares, because no store has answered since the start."""
        for resource in probed.keys() - self._shares.keys():
            del probed[resource]
        for resource, share in self._shares.items():
            meter = self._meters[resource]
            known = probed.setdefault(resource, ProbedShare(share, now))
            sent, throttled = meter.counts()
            if known.probe(meter.demand, meter.usage.limit, now, sent=sent, throttled=throttled):
                meter.counted(meter.usage)
                self._shares[resource] = known.share

    def _back_off(self, now: float) -> None:
        """Lower the shares that were throttled in the last interval, and raise the others up to the last share."""
        intervals = (now - self._counted_at) / self.rules.interval_seconds
        if 0.0 <= intervals < BACKOFF_INTERVALS:
            return
        for resource in self._shares:
            meter = self._meters[resource]
            sent, throttled = meter.counts()
            meter.counted(meter.usage)
            if intervals > 0.0:
                factor = self._backoff.get(resource, 1.0)
                if throttled > TOLERATED_SHARE * sent:
                    self._backoff[resource] = max(FLOOR, factor * (1.0 - min(0.5, throttled / sent)))
                else:
                    self._backoff[resource] = min(1.0, factor + INCREASE * RECOVERY * min(1.0, intervals))
        self._counted_at = now

    def _give_up(self, resource: str) -> None:
        """Stop claiming a resource. It is a newcomer there before the other workers see that its lease is free."""
        if resource in self._shares:
            share, limit = self._shares.pop(resource), self._meters[resource].usage.limit
            reserve = RESERVE / self.rules.max_workers
            self._claimed_at[resource] = math.inf
            self._given_up[resource] = min(share[0], limit[0] * reserve), min(share[1], limit[1] * reserve)
        self._granted.discard(resource)

    def leave(self) -> None:
        """Give up every resource, before the report that says so."""
        for resource in list(self._shares):
            self._give_up(resource)

    def report(self, now: float, *, at: float, leaving: bool = False) -> "PreparedReport":
        """Return this worker's report. Call `reported` when it is written."""
        claims: dict[str, Claim] = {}
        counted: dict[str, Usage] = {}
        # In one interval, because calm workers report rarely.
        part = min(1.0, self.rules.interval_seconds / max(now - self._reported_at, 1e-6))
        self._first_reported_at = min(self._first_reported_at, at)
        for resource, share in self._shares.items():
            meter = self._meters[resource]
            sent, throttled = meter.counts()
            counted[resource] = meter.usage
            if at < self._claimed_at.get(resource, -math.inf):
                self._claimed_at[resource] = at
            claims[resource] = Claim(meter.demand, share, meter.usage.limit, sent * part, throttled * part)
        report = WorkerReport(
            worker_id=self.rules.worker_id,
            written_at=at,
            generation=self._generation,
            token=self._token,
            claims=claims,
            weight=self.rules.weight,
            tier=self.rules.tier,
            max_workers=self.rules.max_workers,
            leaving=leaving,
        )
        return PreparedReport(report, now, counted)

    def reported(self, prepared: "PreparedReport") -> None:
        """Note that a report is in the store. A report whose write failed has no effect here and is repeated."""
        self._reported_at, self._reported = prepared.prepared_at, set(prepared.counted)
        self._must_confirm = False
        for resource, usage in prepared.counted.items():
            # Measurements during the write may have removed the meter, or counted more by `_back_off`.
            meter = self._meters.get(resource)
            if meter is not None and meter.reported_sent <= usage.sent:
                meter.counted(usage)

    # Summaries

    def renew(self, head: Summary | None, part: SummaryPart | None, now: float, *, at: float) -> None:
        """Renew the lease from a summary: take the shares it grants. None means that the store has no summary."""
        was_cut_off = self.state(now) in {"alone", "expired"}
        self._probed = None
        self._was_read_late = now - self._synced_at > COMPUTE_SPACING * self.rules.interval_seconds
        members, plans = ({}, {}) if head is None else (head.members, head.resources)
        if part is not None:
            members, plans = part.members, part.resources()
        # A summary from the future was written before the store's clock was set back, at an unknown time.
        age = 0.0 if head is None else abs(at - head.computed_at)
        lifetime = LIFETIME_INTERVALS * self.rules.interval_seconds
        self._is_current = head is not None and age <= lifetime
        if head is not None and head.computed_at != self._seen[0]:
            self._seen = (head.computed_at, now)
        # After an outage other workers may still hold the whole limit by an old summary.
        self._unsettled = head is not None and not head.settled
        is_forgotten = age > FORGOTTEN_INTERVALS * self.rules.interval_seconds
        self._answered = self._is_current or head is None or is_forgotten
        self._plans = {} if is_forgotten else plans
        open_since = at - OPEN_INTERVALS * self.rules.interval_seconds
        self._open_since = -math.inf if head is not None and head.began_at >= open_since else open_since
        if head is None:
            # The summary was deleted. Each worker keeps its share until there is a new one.
            self._generation, self._token = 0, ""
        elif self._is_current or self.rules.worker_id in members:
            self._generation, self._token = head.generation, head.token
            self._renewed_at = now - age
        self._backoff.clear()
        self._counted_at = math.inf
        member = members.get(self.rules.worker_id)
        self._forget_claims(member)
        was_lowered = False
        for resource, last in self._shares.items():
            grant = self._grant(member, resource)
            if grant is not None:
                was_lowered = was_lowered or grant.share[0] < last[0] or grant.share[1] < last[1]
                self._shares[resource] = grant.share
                self._granted.add(resource)
            elif resource in self._granted and not self._is_current:
                continue
            else:
                share = self._newcomer(resource, self._meters[resource].usage.limit)
                if resource in self._granted or resource in self._reported:
                    # The next plan counts on what it has reported.
                    share = (min(share[0], last[0]), min(share[1], last[1]))
                    self._granted.discard(resource)
                self._shares[resource] = share
        self._is_lowered = self._unsettled and (was_lowered or self._is_lowered)
        self._must_confirm = self._unsettled and (was_lowered or self._must_confirm)
        self._confirm_syncs = 0
        # While it was cut off, syncs that failed may have used up the quick ones.
        if not self.wants_more or (was_cut_off and self._is_current and self._quick_syncs >= MAX_QUICK_SYNCS):
            self._quick_syncs = 0

    def _forget_claims(self, member: FleetMember | None) -> None:
        """Forget the resources that this worker uses no more, once no plan grants what it gave up.

        Until then no plan reserves more for it than the lease that it had.
        """
        if self._is_current and member is not None:
            for resource in self._claimed_at.keys() - self._meters.keys() - member.grants.keys():
                del self._claimed_at[resource]
                self._given_up.pop(resource, None)

    def _grant(self, member: FleetMember | None, resource: str) -> Grant | None:
        """Return what a summary grants this worker, None if nothing, or if it follows from too old a report."""
        if member is None or member.reported_at < self._claimed_at.get(resource, self._first_reported_at):
            return None
        return member.grants.get(resource)

    # When to sync

    def early_measure_at(self, now: float) -> float:
        """Return when to measure again if units wait before the next regular measurement, `math.inf` if useless."""
        waiting = [resource for resource, meter in self._meters.items() if meter.usage.waiting != (0.0, 0.0)]
        may_gain = any(self._may_gain(resource, dimension) for resource in waiting for dimension in (0, 1))
        return now + FIRST_QUICK_SPACING * self.rules.interval_seconds if may_gain or not waiting else math.inf

    def _may_gain(self, resource: str, dimension: int) -> bool:
        """Return True if this worker has less than it may claim, or if capacity is unassigned."""
        plan, share = self._plans.get(resource), self._shares.get(resource)
        if plan is None or share is None:
            return True
        fair = plan.fair.get(self.rules.tier, (0.0, 0.0))
        return (
            share[dimension] < ENTITLED_BELOW * self.rules.weight * fair[dimension]
            or plan.unassigned[dimension] > CALM_SHARE * plan.limit[dimension]
        )

    @property
    def wants_more(self) -> bool:
        """True if it wants more than it has and may get it, or if it has no lease for a resource."""
        for resource, share in self._shares.items():
            if resource not in self._granted:
                return True
            demand = self._meters[resource].demand
            for dimension in (0, 1):
                if demand[dimension] > WANTS_MORE_ABOVE * share[dimension] and self._may_gain(resource, dimension):
                    return True
        return False

    def sync_started(self, now: float) -> None:
        """Note that a sync has started; it may still fail."""
        self._synced_at = now
        if self.wants_more:
            self._quick_syncs += 1
        self._confirm_syncs += self._must_confirm

    def sync_due(self, now: float, *, usual_seconds: float) -> bool:
        """Return True if a sync is due. `usual_seconds` is this round's interval with jitter."""
        return now >= self.next_sync_at(usual_seconds=usual_seconds)

    def next_sync_at(self, *, usual_seconds: float) -> float:
        """Return when the next sync is due at the latest."""
        spacing = READ_SPACING * usual_seconds
        # Both are bounded, because the syncs may fail for hours.
        must_confirm = self._must_confirm and self._confirm_syncs < MAX_QUICK_SYNCS
        if must_confirm or (self._quick_syncs < MAX_QUICK_SYNCS and self.wants_more):
            share = min(WANTS_MORE_SPACING, FIRST_QUICK_SPACING * 2.0 ** min(self._quick_syncs, MAX_QUICK_SYNCS))
            spacing = min(spacing, share * self.rules.interval_seconds * 0.999)
        return self._synced_at + spacing

    def wants_to_report(self, head: Summary | None, now: float) -> bool:
        """Return True if this worker should report now: its report is getting old, or other workers wait for it."""
        spacing = self._calm_spacing if self._is_calm(head) else REPORT_SPACING
        is_due = now - self._reported_at >= spacing * self.rules.interval_seconds
        return is_due or self._unsettled or self.wants_more

    def _is_calm(self, head: Summary | None) -> bool:
        """Return True if its last report still serves: all its resources are calm, and no share is nearly used."""
        if head is None or (head.generation, head.token) != (self._generation, self._token):
            return False
        if not self._is_current or self._reported != self._shares.keys():
            return False
        for resource, share in self._shares.items():
            plan, meter = self._plans.get(resource), self._meters[resource]
            if plan is None or not is_calm(plan, head) or meter.usage.throttled != meter.reported_throttled:
                return False
            if any(demand > NEARLY_USED * most for demand, most in zip(meter.demand, share, strict=True)):
                return False
        return True

    def may_compute(self, head: Summary | None, now: float, *, at: float) -> bool:
        """Return True if the summary is old enough for this worker to compute the next one."""
        if head is None:
            return True
        interval = self.rules.interval_seconds
        if is_claimed(head, interval, self.rules.store_timeout_seconds, at=at):
            return False
        age = at - head.computed_at
        if age >= 0.0 and head.computed_at == self._seen[0]:
            # The store's clock may show whole seconds.
            age = max(age, now - self._seen[1])
        if head.dedicated:
            return abs(age) > LIFETIME_INTERVALS * interval
        if self._is_lowered or 0 < self._quick_syncs <= NEWS_SYNCS:
            self._is_lowered = False
            spacing = FIRST_QUICK_SPACING
        elif self.wants_more or not head.settled:
            spacing = UNSETTLED_SPACING
        elif head.member_count > LARGE_FLEET and head.computed_by != self.rules.worker_id:
            spacing = LATE_SPACING
        else:
            spacing = COMPUTE_SPACING
        return age < -interval or age >= interval * spacing * 0.999
