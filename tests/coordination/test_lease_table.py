"""The lease table on its own, and summaries so large that they come in parts."""

from collections.abc import Iterator

import pytest

from benchmarks.coordination_fleet import finished
from benchmarks.coordination_scale import filled_store, summarise
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import LeaseSync
from kpl_core.coordination.lease_table import TableRules, next_summary
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store_objects import (
    MEMBERS_PER_PART,
    Claim,
    FleetMember,
    Grant,
    ResourcePlan,
    Summary,
    UnreadableObject,
    WorkerReport,
    decode_report,
    encode,
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
    """Let all workers report, and hear of every summary."""
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


def test_throttling_that_any_worker_sees_lowers_what_all_divide():
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
def test_a_report_whose_numbers_would_spoil_all_shares_is_garbage(ours, theirs):
    body = encode(report("w0", 1, 1_000.0))
    assert decode_report(body).worker_id == "w0"
    assert ours in body
    with pytest.raises(UnreadableObject, match="it cannot be read") as unreadable:
        decode_report(body.replace(ours, theirs, 1))
    assert unreadable.value.reason == "garbage"


@pytest.mark.parametrize(
    ("generation", "token", "holding", "highest"),
    [
        (7, "b", 100.0, 100.0),  # it goes by this summary, so what it gave up is nobody's
        (6, "z", 800.0, 800.0),  # it has not heard of it
        (7, "a", 100.0, 800.0),  # it speaks of another of that number, which the store has forgotten
        (8, "c", 900.0, 900.0),  # so here, and it holds more than the table knows of
    ],
)
def test_what_a_worker_may_hold_is_known_by_the_very_summary_it_goes_by(generation, token, holding, highest):
    members = {"w0": FleetMember(1_000.0, 1.0, 1, {RESOURCE: Grant((100.0, 1e5), (800.0, 8e5))})}
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


def test_when_nobody_is_throttled_any_more_the_limit_comes_back():
    summary = grown(throttled=10.0)
    for step in range(20):
        at = summary.computed_at + 2.5
        reports = [report(name, summary.generation, at) for name in summary.members]
        summary = next_summary(summary, reports, RULES, at=at)
        assert step < 19 or total(summary) == pytest.approx(1_000.0)


def test_who_leaves_or_is_silent_for_two_intervals_has_no_lease():
    summary = grown(throttled=0.0)
    at = summary.computed_at + 2.5
    reports = {name: report(name, summary.generation, at) for name in summary.members}
    reports["w0"] = report("w0", summary.generation, at, leaving=True)
    reports["w1"] = report("w1", summary.generation, at - 10.1)
    reports["w2"] = report("w2", summary.generation, at - 9.9)
    assert set(next_summary(summary, reports.values(), RULES, at=at).members) == {"w2", "w3"}


def test_more_workers_than_planned_for_still_keep_the_limit():
    summary = grown(throttled=0.0, workers=9)
    assert total(summary) == pytest.approx(1_000.0)
    assert summary.resources[RESOURCE].newcomer[0] < 10.0


def test_the_smallest_limit_that_anybody_was_told_holds_for_all():
    reports = {name: report(name, 0, 1_000.0) for name in ("w0", "w1")}
    claim = Claim((5_000.0, 5e6), (0.0, 0.0), (400.0, 1e6))
    reports["w1"] = WorkerReport(worker_id="w1", written_at=1_000.0, generation=0, claims={RESOURCE: claim})
    assert next_summary(None, reports.values(), RULES, at=1_000.0).resources[RESOURCE].limit == (400.0, 1e6)


@pytest.mark.parametrize("seconds", [60.0, 400.0, -400.0], ids=["outage", "clock set on", "clock set back"])
def test_when_nobody_s_report_counts_nobody_has_more_than_before_for_others_are_there_too(seconds):
    reports = [report(name, 0, 1_000.0) for name in ("w0", "w1")]
    before = next_summary(None, reports, RULES, at=1_000.0)
    after = next_summary(before, reports, RULES, at=1_000.0 + seconds)
    assert [member.grants[RESOURCE] for member in after.members.values()] == [Grant((250.0, 2.5e5), (250.0, 2.5e5))] * 2
    # The other two of four, who may have joined meanwhile.
    assert after.resources[RESOURCE].newcomer == (250.0, 2.5e5)


def test_reports_are_read_as_they_come_and_of_each_worker_the_first_one_counts():
    def one_after_the_other() -> Iterator[WorkerReport]:
        for _ in range(2):
            yield report("w0", 0, 1_000.0)
        yield report("w1", 0, 1_000.0)

    summary = next_summary(None, one_after_the_other(), RULES, at=1_000.0)
    assert set(summary.members) == {"w0", "w1"}
    assert summary == next_summary(None, [report(name, 0, 1_000.0) for name in ("w0", "w1")], RULES, at=1_000.0)


def test_a_large_fleet_reads_its_summary_in_parts_and_old_parts_are_removed():
    workers = 2 * MEMBERS_PER_PART + 50
    store, clock = filled_store(workers, shard_count=20)
    for _ in range(4):
        clock[0] += 2.0
        summarise(store, clock[0])
    parts = finished(store.read_all("part-")).bodies
    # Three of the latest summary, and three of the one before, which somebody may be reading.
    assert len(parts) == 6
    assert len(finished(store.read("leases.json")).body) < 500

    name = "worker-7"
    holder = Leaseholder(HolderRules(worker_id=name, interval_seconds=5.0, max_workers=workers))
    resource = next(iter(decode_report(finished(store.read(f"report-{name}.json")).body).claims))
    holder.look({resource: Usage(LIMIT, (0.0, 0.0))}, clock[0])
    meeting = LeaseSync(
        store, holder, RULES, worker_id=name, may_compute=False, on_problem=lambda *_: pytest.fail("complained")
    )
    finished(meeting.sync(lambda: clock[0], lambda: clock[0]))
    assert holder.state(clock[0]) == "leased"
    assert 0.0 < holder.share(resource, LIMIT)[0] <= LIMIT[0] / 10


def test_calls_to_compute_are_as_many_as_reports_and_parts():
    few, _ = filled_store(100, shard_count=10)
    many, clock = filled_store(400, shard_count=10)
    for store in (few, many):
        summarise(store, clock[0])
        store.calls.clear()
        summarise(store, clock[0] + 6.0)
    # One listing of the reports in each; two writes of the head, and the parts.
    assert few.calls == {"read": 1, "write": 2, "read_all": 1}
    assert many.calls == {"read": 1, "write": 4, "read_all": 2}
