"""What the lease table concludes from a report about what its worker may be using."""

import pytest

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_table import TableRules, next_summary
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store_objects import (
    Claim,
    FleetMember,
    Grant,
    ResourcePlan,
    Summary,
    WorkerReport,
)

RESOURCE = "orders/shard-0"
LIMIT = (1_000.0, 1e6)
RULES = TableRules(interval_seconds=5.0)


@pytest.mark.parametrize(
    ("generation", "token", "holding", "steady", "highest", "steady_then"),
    [
        (7, "b", 100.0, 0, 100.0, 1),  # it applied this summary, so the share it gave up is free
        (6, "z", 800.0, 0, 800.0, 1),  # it has not applied this summary
        (6, "z", 150.0, 0, 800.0, 1),  # likewise, and this summary raised a grant
        (5, "y", 150.0, 2, 150.0, 3),  # it applied a summary since which no grant of its was raised
        (4, "x", 150.0, 2, 800.0, 3),  # the one after it raised a grant
        (5, "y", 10.0, 2, 100.0, 0),  # it holds less than it was granted, so that grant is a rise
        (7, "a", 100.0, 2, 800.0, 0),  # it applied another summary of this generation, which the store lost
        (8, "c", 900.0, 9, 900.0, 0),  # likewise, and it holds more than the table granted
    ],
)
def test_the_holding_of_a_worker_follows_from_the_summary_it_applied(
    generation, token, holding, steady, highest, steady_then
):
    members = {"w0": FleetMember(1_000.0, 1.0, 1, {RESOURCE: Grant((100.0, 1e5), (800.0, 8e5))}, steady)}
    plans = {RESOURCE: ResourcePlan(LIMIT, (0.0, 0.0), 1.0, {})}
    previous = Summary(generation=7, token="b", computed_at=1_000.0, began_at=900.0, members=members, resources=plans)
    claim = Claim((0.0, 0.0), (holding, holding * 1e3), LIMIT)
    theirs = Claim((5_000.0, 5e6), (50.0, 5e4), LIMIT)
    reports = [
        WorkerReport(worker_id=name, written_at=1_001.0, generation=each, token=word, claims={RESOURCE: said})
        for name, each, word, said in (("w0", generation, token, claim), ("w1", 0, "", theirs))
    ]
    summary = next_summary(previous, reports, RULES, at=1_002.0)
    assert summary.members["w0"].grants[RESOURCE].ceiling[0] == pytest.approx(highest)
    assert summary.members["w1"].grants[RESOURCE].share[0] <= max(50.0, 1_000.0 - highest)
    assert summary.members["w0"].steady == steady_then


@pytest.mark.parametrize(
    ("generation", "token", "may_use"),
    [
        (7, "b", 2.0),  # it applied this summary
        (6, "z", 6.6),  # it may have applied this one since, and use what that has for newcomers
        (7, "a", 6.6),  # likewise: the store lost the summary of this generation that it had applied
    ],
)
def test_a_worker_without_a_grant_may_use_what_a_later_summary_has_for_newcomers(generation, token, may_use):
    """Six workers had 1.004 times the limit for 0.04 intervals, once in a million transitions."""
    members = {"w0": FleetMember(1_000.0, 1.0, 1, {RESOURCE: Grant((900.0, 9e5), (900.0, 9e5))})}
    plans = {RESOURCE: ResourcePlan(LIMIT, (6.6, 6.6e3), 1.0, {}, began_at=900.0)}
    previous = Summary(generation=7, token="b", computed_at=1_000.0, began_at=900.0, members=members, resources=plans)
    said = {
        "w0": (7, "b", 1.0, Claim((5_000.0, 5e6), (900.0, 9e5), LIMIT)),
        "new": (generation, token, 0.05, Claim((0.0, 0.0), (2.0, 2e3), LIMIT)),
    }
    reports = [
        WorkerReport(
            worker_id=name, written_at=1_001.0, generation=each, token=word, weight=weight, claims={RESOURCE: claim}
        )
        for name, (each, word, weight, claim) in said.items()
    ]
    summary = next_summary(previous, reports, TableRules(interval_seconds=5.0, max_workers=2), at=1_002.0)
    grants = {name: member.grants[RESOURCE] for name, member in summary.members.items()}
    assert grants["new"].ceiling[0] >= may_use
    assert grants["w0"].ceiling[0] + max(grants["new"].ceiling[0], may_use) <= 1_000.0 + 1e-6


def test_the_grants_of_a_worker_are_steady_until_one_of_them_rises():
    names = ["w0", "w1", "w2", "w3"]
    summary: Summary | None = None
    share, seen = 0.0, []
    for step, demand in enumerate([*[5_000.0] * 12, 10.0, 10.0, 5_000.0, 5_000.0]):
        at = 1_000.0 + 2.5 * step
        members = {} if summary is None else summary.members
        reports = [
            WorkerReport(
                worker_id=name,
                written_at=at,
                generation=0 if summary is None else summary.generation,
                claims={
                    RESOURCE: Claim(
                        (demand if name == "w0" else 5_000.0, 5e6),
                        members[name].grants[RESOURCE].share if members else (0.0, 0.0),
                        LIMIT,
                    )
                },
            )
            for name in names
        ]
        summary = next_summary(summary, reports, RULES, at=at)
        before, share = share, summary.members["w0"].grants[RESOURCE].share[0]
        seen.append((share > before, summary.members["w0"].steady == 0))
    # Its grant rises when the others have confirmed that theirs fell.
    assert seen[-6:] == [*[(False, False)] * 5, (True, True)]


def test_a_worker_that_got_a_summary_late_uses_no_more_of_it_later_than_it_has_reported():
    """The next summary takes what a worker without a grant has reported for all that it may use of this one."""
    plans = {RESOURCE: ResourcePlan(LIMIT, (200.0, 2e5), 1.0, {}, began_at=1_000.0)}
    head = Summary(generation=7, token="b", computed_at=1_000.0, began_at=900.0, resources=plans)
    rules = HolderRules(worker_id="w0", interval_seconds=5.0, max_workers=4)
    late, prompt = Leaseholder(rules), Leaseholder(rules)
    for holder, read_at in ((late, 2.5), (prompt, 0.5)):
        holder.measure({RESOURCE: Usage(LIMIT, (5_000.0, 5e6))}, 0.0)
        holder.sync_started(0.0)
        holder.renew(head, None, read_at, at=1_000.5)
    assert late.share(RESOURCE, LIMIT)[0] == pytest.approx(10.0)
    assert prompt.share(RESOURCE, LIMIT)[0] == pytest.approx(200.0)
    late.reported(late.report(2.5, at=1_003.0))
    late.sync_started(2.6)
    late.renew(head, None, 2.7, at=1_003.2)
    assert late.share(RESOURCE, LIMIT)[0] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("sequence_began_at", "resource_began_at", "may_use"),
    [(900.0, 998.5, 200.0), (900.0, 998.4, 10.0), (998.5, 900.0, 200.0), (998.4, 900.0, 10.0)],
)
def test_only_early_in_a_warm_up_a_worker_that_begins_with_a_resource_uses_an_equal_share(
    sequence_began_at, resource_began_at, may_use
):
    """Its report may come only after the warm-up: 1.32 times a tenant's rate was in force."""
    plans = {RESOURCE: ResourcePlan(LIMIT, (200.0, 2e5), 1.0, {}, began_at=resource_began_at)}
    head = Summary(generation=7, token="b", computed_at=1_000.0, began_at=sequence_began_at, resources=plans)
    holder = Leaseholder(HolderRules(worker_id="w0", interval_seconds=5.0, max_workers=4))
    holder.sync_started(0.0)
    holder.renew(head, None, 0.1, at=1_000.0)
    assert holder.share(RESOURCE, LIMIT)[0] == pytest.approx(may_use)


def test_what_a_worker_may_claim_is_its_part_beside_those_that_the_plan_counts():
    holder = Leaseholder(HolderRules(worker_id="w0", interval_seconds=5.0, max_workers=64))
    assert holder.claimable_part(RESOURCE, 0.0) == 0.0
    plans = {RESOURCE: ResourcePlan(LIMIT, (0.6, 6e2), 1.0, {1: (500.0, 5e5)}, began_at=900.0)}
    head = Summary(generation=7, token="b", computed_at=1_000.0, began_at=900.0, resources=plans)
    holder.renew(head, None, 0.1, at=1_000.0)
    # It is the third one. Nobody claims the other resource.
    assert holder.claimable_part(RESOURCE, 0.1) == pytest.approx(1.0 / 3.0)
    assert holder.claimable_part("other", 0.1) == 1.0
    # Without the store its lease may stay as it is.
    assert holder.claimable_part(RESOURCE, 10.2) == 0.0
