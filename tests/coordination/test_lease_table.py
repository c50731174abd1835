"""The lease table alone, and summaries so large that they are split into parts."""

import math
from collections.abc import Iterator

import msgspec
import pytest

from benchmarks.coordination_fleet import finished
from benchmarks.coordination_scale import filled_store, summarise
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import LeaseSync
from kpl_core.coordination.lease_table import (
    FORGOTTEN_INTERVALS,
    TableRules,
    is_calm,
    next_summary,
)
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store_objects import (
    MEMBERS_IN_HEAD,
    MEMBERS_PER_PART,
    SMALL_PARTS,
    Claim,
    FleetMember,
    Grant,
    ResourcePlan,
    Summary,
    SummaryPart,
    UnreadableObject,
    WorkerReport,
    decode,
    encode,
    part_count_of,
    part_name,
)

RESOURCE = "orders/shard-0"
LIMIT = (1_000.0, 1e6)
RULES = TableRules(interval_seconds=5.0)


def report(
    worker_id: str, generation: int, at: float, *, throttled: float = 0.0, leaving: bool = False
) -> WorkerReport:
    claim = Claim((5_000.0, 5e6), (0.0, 0.0), LIMIT, 100.0, throttled)
    return WorkerReport(
        worker_id=worker_id,
        written_at=at,
        generation=generation,
        claims={RESOURCE: claim},
        max_workers=4,
        leaving=leaving,
    )


def grown(throttled: float, *, steps: int = 10, workers: int = 4) -> Summary:
    """Let all workers report and apply every summary."""
    summary: Summary | None = None
    for step in range(steps):
        at = 1_000.0 + 2.5 * step
        generation = 0 if summary is None else summary.generation
        names = [f"w{index}" for index in range(workers)]
        summary = next_summary(
            summary, [report(name, generation, at, throttled=throttled) for name in names], RULES, at=at
        )
    assert summary is not None
    return summary


def total(summary: Summary) -> float:
    return sum(member.grants[RESOURCE].share[0] for member in summary.members.values())


def test_throttling_of_one_worker_lowers_the_limit_of_all():
    quiet, busy = grown(throttled=0.0), grown(throttled=10.0)
    assert quiet.resources[RESOURCE].estimate == 1.0
    assert busy.resources[RESOURCE].estimate < 0.6
    assert total(quiet) == pytest.approx(1_000.0)
    assert total(busy) == pytest.approx(1_000.0 * busy.resources[RESOURCE].estimate)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (b'"weight":1.0', b'"weight":0.0'),
        (b'"max_workers":4', b'"max_workers":0'),
        (b"[0.0,0.0]", b"[-500.0,0.0]"),
        (b"[1000.0,1000000.0]", b"[0.0,1000000.0]"),
        (b"[5000.0,5000000.0]", b"[null,5000000.0]"),
    ],
)
def test_a_report_with_numbers_out_of_bounds_is_garbage(ours, theirs):
    body = encode(report("w0", 1, 1_000.0))
    assert decode(body, WorkerReport).worker_id == "w0"
    assert ours in body
    with pytest.raises(UnreadableObject, match="it cannot be decoded") as unreadable:
        decode(body.replace(ours, theirs, 1), WorkerReport)
    assert unreadable.value.reason == "garbage"


def test_without_throttling_the_estimate_recovers():
    summary = grown(throttled=10.0)
    for step in range(20):
        at = summary.computed_at + 2.5
        reports = [report(name, summary.generation, at) for name in summary.members]
        summary = next_summary(summary, reports, RULES, at=at)
        assert step < 19 or total(summary) == pytest.approx(1_000.0)


def test_a_worker_that_leaves_or_misses_two_intervals_loses_its_lease():
    summary = grown(throttled=0.0)
    at = summary.computed_at + 2.5
    reports = {name: report(name, summary.generation, at) for name in summary.members}
    reports["w0"] = report("w0", summary.generation, at, leaving=True)
    for name, age in (("w1", 10.1), ("w2", 9.9)):
        # The summary has counted this report.
        reports[name] = report(name, summary.generation, at - age)
        summary.members[name] = msgspec.structs.replace(summary.members[name], reported_at=at - age)
    assert set(next_summary(summary, reports.values(), RULES, at=at).members) == {"w2", "w3"}


def test_more_workers_than_max_workers_still_keep_the_limit():
    summary = grown(throttled=0.0, workers=9)
    assert total(summary) == pytest.approx(1_000.0)
    assert summary.resources[RESOURCE].newcomer[0] < 10.0


def test_the_first_claim_of_a_resource_gets_a_newcomers_share_until_all_workers_know():
    """The others may be using it as newcomers."""
    summary = grown(throttled=0.0)
    claim = Claim((5_000.0, 5e6), (0.0, 0.0), LIMIT)
    # The plan at 7.5 s is the first that gives newcomers less, so only the next one may give that to others.
    for seconds, most in ((0.0, 250.0), (2.5, 250.0), (5.0, 250.0), (7.5, 250.0), (10.0, 970.0)):
        at = summary.computed_at + (2.5 if seconds else 0.0)
        reports = {name: report(name, summary.generation, at) for name in summary.members}
        known = reports["w0"].claims
        reports["w0"] = msgspec.structs.replace(reports["w0"], claims={**known, "new": claim}, token=summary.token)
        summary = next_summary(summary, reports.values(), RULES, at=at)
        assert summary.members["w0"].grants["new"].share[0] == pytest.approx(most)


def test_the_plan_of_an_unused_resource_is_kept_for_ten_minutes():
    """So the next worker with a claim gets nearly all of it at once."""
    summary = grown(throttled=0.0)

    def idle(at: float) -> list[WorkerReport]:
        return [
            WorkerReport(worker_id="w0", written_at=at, generation=summary.generation, claims={}, max_workers=4),
        ]

    for _ in range(12):
        at = summary.computed_at + 2.5
        summary = next_summary(summary, idle(at), RULES, at=at)
    plan = summary.resources[RESOURCE]
    assert plan.newcomer == pytest.approx((10.0, 1e4))
    assert plan.unassigned == LIMIT
    at = summary.computed_at + 2.5
    claimed = next_summary(summary, [report("w0", summary.generation, at)], RULES, at=at)
    assert claimed.members["w0"].grants[RESOURCE].share[0] == pytest.approx(970.0)
    late = plan.used_at + 601.0
    summary = next_summary(msgspec.structs.replace(summary, computed_at=late - 2.5), idle(late), RULES, at=late)
    assert RESOURCE not in summary.resources


def test_the_smallest_configured_limit_holds_for_all():
    reports = {name: report(name, 0, 1_000.0) for name in ("w0", "w1")}
    claim = Claim((5_000.0, 5e6), (0.0, 0.0), (400.0, 1e6))
    reports["w1"] = WorkerReport(worker_id="w1", written_at=1_000.0, generation=0, claims={RESOURCE: claim})
    assert next_summary(None, reports.values(), RULES, at=1_000.0).resources[RESOURCE].limit == (400.0, 1e6)


@pytest.mark.parametrize("seconds", [60.0, 400.0, -400.0], ids=["outage", "clock set on", "clock set back"])
def test_when_all_reports_are_stale_no_share_grows(seconds):
    reports = [report(name, 0, 1_000.0) for name in ("w0", "w1")]
    before = next_summary(None, reports, RULES, at=1_000.0)
    after = next_summary(before, reports, RULES, at=1_000.0 + seconds)
    assert [member.grants[RESOURCE] for member in after.members.values()] == [Grant((250.0, 2.5e5), (250.0, 2.5e5))] * 2
    # The other two of four may have joined meanwhile.
    assert after.resources[RESOURCE].newcomer == (250.0, 2.5e5)


def test_the_first_report_of_each_worker_counts():
    def one_after_the_other() -> Iterator[WorkerReport]:
        for _ in range(2):
            yield report("w0", 0, 1_000.0)
        yield report("w1", 0, 1_000.0)

    summary = next_summary(None, one_after_the_other(), RULES, at=1_000.0)
    assert set(summary.members) == {"w0", "w1"}
    assert summary == next_summary(None, [report(name, 0, 1_000.0) for name in ("w0", "w1")], RULES, at=1_000.0)


def test_a_large_fleet_has_a_summary_in_parts_and_old_parts_are_deleted():
    workers = 2 * MEMBERS_PER_PART + 50
    store, clock = filled_store(workers, shard_count=20)
    for _ in range(4):
        clock[0] += 2.0
        summarise(store, clock[0])
    parts = finished(store.read_all("part-")).bodies
    # Those of the latest summary, and those of the one before, which a worker may be reading.
    assert len(parts) == 2 * part_count_of(workers)
    assert len(finished(store.read("leases.json")).body) < 500

    name = "worker-7"
    holder = Leaseholder(HolderRules(worker_id=name, interval_seconds=5.0, max_workers=workers))
    resource = next(iter(decode(finished(store.read(f"report-{name}.json")).body, WorkerReport).claims))
    holder.measure({resource: Usage(LIMIT, (0.0, 0.0))}, clock[0])
    meeting = LeaseSync(store, holder, may_compute=False, on_problem=lambda *_: pytest.fail("complained"))
    finished(meeting.sync(lambda: clock[0], lambda: clock[0]))
    # The plan follows from the report of an earlier process of this name, which may have given the resource up since.
    assert holder.state(clock[0]) == "newcomer"
    clock[0] += 2.0
    summarise(store, clock[0])
    finished(meeting.sync(lambda: clock[0], lambda: clock[0]))
    assert holder.state(clock[0]) == "leased"
    assert 0.0 < holder.share(resource, LIMIT)[0] <= LIMIT[0] / 10


def test_a_lost_part_is_written_again_by_the_next_summary() -> None:
    store, clock = filled_store(MEMBERS_IN_HEAD + 1, shard_count=10)
    summarise(store, clock[0])
    before = decode(finished(store.read("leases.json")).body, Summary)
    finished(store.delete(part_name(before, 0)))
    summarise(store, clock[0] + 2.0)
    after = decode(finished(store.read("leases.json")).body, Summary)
    assert after.generation == before.generation + 1
    assert len(decode(finished(store.read(part_name(after, 0))).body, SummaryPart).members) == MEMBERS_IN_HEAD + 1


def test_a_summary_costs_one_listing_and_one_write_per_part():
    few, _ = filled_store(MEMBERS_IN_HEAD, shard_count=10)
    many, clock = filled_store(400, shard_count=10)
    for store in (few, many):
        summarise(store, clock[0])
        store.calls.clear()
        summarise(store, clock[0] + 6.0)
    # One listing of the reports per summary; two writes of the head, and the parts.
    assert few.calls == {"read": 1, "write": 2, "read_all": 1}
    assert many.calls == {"read": 1, "write": 2 + SMALL_PARTS, "read_all": 2}


@pytest.mark.parametrize(
    ("workers", "parts"),
    [(20, 0), (21, 1), (50, 1), (100, 2), (200, 4), (400, 8), (1_600, 8), (1_601, 9), (10_000, 50)],
)
def test_the_parts_of_a_summary_are_small_or_few(workers: int, parts: int) -> None:
    assert part_count_of(workers) == parts


def test_a_store_that_fails_for_hours_ends_no_worker_and_is_not_asked_without_pause() -> None:
    holder = Leaseholder(HolderRules(worker_id="a", interval_seconds=5.0, max_workers=8))
    holder.measure({"shard": Usage((1_000.0, 1e6), (0.0, 0.0))}, 0.0)
    holder._must_confirm = True  # noqa: SLF001 - a share was lowered just before the store failed
    for attempt in range(2_000):
        holder.sync_started(float(attempt))
    assert holder.next_sync_at(usual_seconds=5.0) - 1_999.0 >= 1.0


def test_no_worker_computes_while_another_has_claimed_the_next_summary() -> None:
    holder = Leaseholder(HolderRules(worker_id="a", interval_seconds=5.0, max_workers=8))
    head = Summary(generation=1, computed_at=900.0, began_at=900.0, claimed_until=1_004.0)
    assert not holder.may_compute(head, 1_003.0, at=1_003.0)
    assert holder.may_compute(head, 1_004.0, at=1_004.0)
    # A claim from before the store's clock was set back.
    assert holder.may_compute(head, 800.0, at=800.0)


def test_each_summary_in_parts_has_a_token_of_its_own() -> None:
    """A worker that was overtaken would write over the parts of the same generation."""
    tokens = []
    for fleet in range(2):
        store, clock = filled_store(MEMBERS_IN_HEAD + 1, shard_count=10)
        for _ in range(fleet):
            # Other versions in the store.
            finished(store.write("leases.json", b"{}"))
            finished(store.delete("leases.json"))
        summarise(store, clock[0])
        tokens.append(decode(finished(store.read("leases.json")).body, Summary).token)
    assert all(tokens)
    assert tokens[0] != tokens[1]


def test_a_sync_says_whether_it_has_read_all_reports() -> None:
    """Some problems are visible only then, so only then are they over."""
    store, clock = filled_store(2, shard_count=1)
    holder = Leaseholder(HolderRules(worker_id="worker-0", interval_seconds=5.0, max_workers=2))
    sync_round = LeaseSync(store, holder, may_compute=True, on_problem=lambda *_: None)
    assert (sync_round.is_reading_all, sync_round.has_read_all) == (False, False)
    for expected in (True, False, True):
        finished(sync_round.sync(lambda: clock[0], lambda: clock[0]))
        assert sync_round.has_read_all is expected
        clock[0] += 0.0 if expected else 60.0


@pytest.mark.parametrize(("resources", "kept"), [(1, 1), (2, 1)])
def test_an_idle_worker_keeps_its_last_lease_and_gives_up_the_others(resources: int, kept: int) -> None:
    holder = Leaseholder(HolderRules(worker_id="a", interval_seconds=5.0, max_workers=8))
    usages = {f"orders/shard-{number}": Usage(LIMIT, (10.0, 10.0)) for number in range(resources)}
    holder.measure(usages, 0.0)
    holder.measure({name: Usage(LIMIT, (20.0, 20.0)) for name in usages}, 1.0)
    assert len(holder.report(1.0, at=1.0).report.claims) == resources
    for now in (40.0, 50.0, 60.0):
        holder.measure({name: Usage(LIMIT, (20.0, 20.0)) for name in usages}, now)
        assert len(holder.report(now, at=now).report.claims) == kept


def test_a_worker_without_a_lease_may_use_the_same_part_of_both_limits() -> None:
    holder = Leaseholder(HolderRules(worker_id="a", interval_seconds=5.0, max_workers=8))
    share = holder.share("orders/shard-0", (1_000.0, 1e6))
    assert 0.0 < share[0] <= 125.0
    assert share[1] == share[0] * 1_000.0


def test_what_a_newcomer_may_use_does_not_rise_when_the_plan_gets_old() -> None:
    """Others go on with what an old plan granted them."""
    holder = Leaseholder(HolderRules(worker_id="new", interval_seconds=5.0, max_workers=8))
    plans = {RESOURCE: ResourcePlan(LIMIT, (1.25, 1_250.0), 1.0, {})}
    head = Summary(generation=1, computed_at=100.0, began_at=0.0, resources=plans)
    for age in (0.0, 11.0, 590.0):
        holder.renew(head, None, age, at=100.0 + age)
        assert holder.share(RESOURCE, LIMIT) == (1.25, 1_250.0)
    holder.renew(head, None, 610.0, at=710.0)
    assert holder.share(RESOURCE, LIMIT) == (125.0, 125_000.0), "the fleet has begun again"


def test_a_worker_measures_early_only_if_that_can_gain_something() -> None:
    holder = Leaseholder(HolderRules(worker_id="a", interval_seconds=5.0, max_workers=8))
    assert holder.early_measure_at(0.0) < math.inf, "units may come"
    holder.measure({RESOURCE: Usage(LIMIT, (900.0, 9e5), (50.0, 5e4))}, 0.0)
    assert holder.early_measure_at(0.0) < math.inf, "it has no lease yet"
    plans = {RESOURCE: ResourcePlan(LIMIT, (0.0, 0.0), 1.0, {})}
    members = {"a": FleetMember(0.0, 1.0, 8, {RESOURCE: Grant(LIMIT, LIMIT)})}
    head = Summary(generation=1, computed_at=0.0, began_at=0.0, members=members, resources=plans)
    holder.renew(head, None, 0.5, at=0.5)
    assert holder.early_measure_at(1.0) == math.inf, "units wait, and all of the limit is its own"
    holder.measure({RESOURCE: Usage(LIMIT, (900.0, 9e5))}, 1.5)
    assert holder.early_measure_at(1.5) < math.inf, "no unit waits"


@pytest.mark.parametrize(
    ("divided_at", "calm_at", "expected"),
    [(0.0, 0.0, False), (0.0, 5.0, False), (0.5, 0.5, True), (5.0, 4.9, False), (5.0, 5.1, True)],
)
def test_a_resource_is_calm_if_the_latest_division_found_it_so(
    divided_at: float, calm_at: float, *, expected: bool
) -> None:
    """At 0 an older release wrote the summary, which did not note the time."""
    head = Summary(generation=1, computed_at=10.0, began_at=0.0, divided_at=divided_at)
    plan = ResourcePlan(LIMIT, (0.0, 0.0), 1.0, {}, calm_at=calm_at)
    assert is_calm(plan, head) is expected


@pytest.mark.parametrize(
    ("age_seconds", "state"), [(0.0, "newcomer"), (3 * 5.0, "alone"), (FORGOTTEN_INTERVALS * 5.0 + 1.0, "newcomer")]
)
def test_a_worker_without_a_grant_counts_as_alone_only_while_an_old_summary_may_be_in_force(
    age_seconds: float, state: str
) -> None:
    holder = Leaseholder(HolderRules(worker_id="worker-0", interval_seconds=5.0, max_workers=2))
    old = Summary(generation=1, computed_at=1_000.0, began_at=0.0)
    holder.renew(old, None, 0.0, at=1_000.0 + age_seconds)
    assert holder.state(0.0) == state


def test_the_worker_that_computes_a_summary_uses_its_grant_at_once() -> None:
    store, clock = filled_store(2, shard_count=1)
    holder = Leaseholder(HolderRules(worker_id="worker-0", interval_seconds=5.0, max_workers=2))
    sync_round = LeaseSync(store, holder, may_compute=True, on_problem=lambda *_: None)
    assert holder.state(clock[0]) == "alone"
    finished(sync_round.sync(lambda: clock[0], lambda: clock[0]))
    written = decode(finished(store.read("leases.json")).body, Summary)
    applied = holder.report(clock[0], at=clock[0]).report
    assert (applied.generation, applied.token) == (written.generation, written.token)


def test_a_calm_summary_is_renewed_for_60_intervals_at_most() -> None:
    def little(read: Summary | None, at: float) -> WorkerReport:
        generation, holding = 0, (0.0, 0.0)
        if read is not None:
            generation, holding = read.generation, read.members["a"].grants[RESOURCE].share
        claims = {RESOURCE: Claim((1.0, 1.0), holding, LIMIT)}
        return WorkerReport(worker_id="a", written_at=at, generation=generation, claims=claims)

    divided: Summary | None = None
    for step in range(5):
        at = 1_000.0 + 2.5 * step
        divided = next_summary(divided, [little(divided, at)], RULES, at=at)
    assert divided is not None
    divided.divided_at = divided.computed_at
    for after, is_renewed in ((300.0, True), (300.5, False)):
        at = divided.computed_at + after
        previous = msgspec.structs.replace(divided, computed_at=at - 2.5)
        for plan in previous.resources.values():
            plan.calm_at = plan.used_at = at
        following = next_summary(previous, [little(divided, at)], RULES, at=at)
        assert (following.generation == divided.generation) is is_renewed


@pytest.mark.parametrize(("expected_workers", "holding", "part"), [(4, 490.0, 0.04), (2, 500.0, 0.01)])
def test_a_worker_without_a_grant_may_use_a_small_part_of_an_equal_share(
    expected_workers: int, holding: float, part: float
) -> None:
    """Four parts in a hundred while workers are expected, else one: then a newcomer is one too many."""
    rules = TableRules(interval_seconds=5.0, max_workers=expected_workers)
    summary: Summary | None = None
    for step in range(10):
        at = 1_000.0 + 2.5 * step
        generation = 0 if summary is None else summary.generation
        summary = next_summary(
            summary,
            [
                WorkerReport(
                    worker_id=name,
                    written_at=at,
                    generation=generation,
                    claims={RESOURCE: Claim((900.0, 9e5), (holding, holding * 1_000), LIMIT)},
                )
                for name in ("a", "b")
            ],
            rules,
            at=at,
        )
        if expected_workers == 2:
            # Also while the table is not warm: both workers hold all there is.
            assert summary.resources[RESOURCE].newcomer[0] == pytest.approx(1_000.0 / 2 * part)
    assert summary is not None
    assert summary.resources[RESOURCE].newcomer[0] == pytest.approx(1_000.0 / expected_workers * part)


@pytest.mark.parametrize(("expected_workers", "newcomer"), [(2, 300.0), (4, 100.0)])
def test_before_all_workers_are_known_the_expected_ones_divide_what_nobody_holds(
    expected_workers: int, newcomer: float
) -> None:
    rules = TableRules(interval_seconds=5.0, max_workers=expected_workers)
    holder = WorkerReport(
        worker_id="a", written_at=1_000.0, claims={RESOURCE: Claim((100.0, 1e5), (700.0, 7e5), LIMIT)}, generation=0
    )
    summary = next_summary(None, [holder], rules, at=1_000.0)
    assert summary.resources[RESOURCE].newcomer[0] == pytest.approx(newcomer)


def test_what_each_newcomer_may_use_counts_members_that_may_have_crashed() -> None:
    """Two newcomers in the place of one and of a dead worker had 1.13 times the limit."""
    holdings = {"busy": 800.0, "idle": 20.0}
    reports = [
        WorkerReport(
            worker_id=name,
            written_at=1_000.0,
            generation=0,
            claims={RESOURCE: Claim((0.0, 0.0), (held, 1e3 * held), LIMIT)},
        )
        for name, held in holdings.items()
    ]
    summary = next_summary(None, reports, TableRules(interval_seconds=5.0, max_workers=3), at=1_000.0)
    assert summary.resources[RESOURCE].newcomer[0] == pytest.approx(100.0)


def test_a_newcomer_in_the_place_of_a_light_worker_uses_what_that_had_and_a_part_of_the_reserve() -> None:
    """With the reserve for itself it was 1.002 times the limit, in a fleet of workers of different weights."""
    rules = TableRules(interval_seconds=5.0, max_workers=6)
    names = {"heavy": 4.0, "other": 4.0, "light": 0.02}
    holdings, summary = dict.fromkeys(names, (0.0, 0.0)), None
    for step in range(12):
        at = 1_000.0 + 2.5 * step
        latest = (0, "") if summary is None else (summary.generation, summary.token)
        reports = [
            WorkerReport(
                worker_id=name,
                written_at=at,
                generation=latest[0],
                token=latest[1],
                weight=weight,
                claims={RESOURCE: Claim((900.0, 9e5), holdings[name], LIMIT)},
            )
            for name, weight in names.items()
        ]
        summary = next_summary(summary, reports, rules, at=at)
        holdings = {name: member.grants[RESOURCE].share for name, member in summary.members.items()}
    assert summary is not None
    held = sorted(share[0] for share in holdings.values())
    newcomer = summary.resources[RESOURCE].newcomer[0]
    reserve = 0.04 * 1_000.0 / 6
    assert held[0] < newcomer < reserve
    # Three are absent, and one is in the place of the light worker.
    assert sum(held[1:]) + 4 * newcomer == pytest.approx(1_000.0)


def test_a_head_has_its_version_and_nothing_else_that_is_the_default():
    body = encode(Summary(generation=7, computed_at=2.5, began_at=1.5))
    assert body == b'{"generation":7,"computed_at":2.5,"began_at":1.5,"version":1}'
