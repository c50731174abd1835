"""The sum over all workers: every record has a place and no counter falls, whichever worker dies when (Hypothesis)."""

from collections.abc import Mapping

import msgspec
from hypothesis import given, settings, strategies as st
from prometheus_client.metrics_core import Metric as Family

from kpl_integrations.gateway_figures import BufferStats, RecordStats, StatsDocument, StreamStats, TenantStats
from kpl_integrations.ingest.stats import GatewayTotals, exposition
from kpl_integrations.ingest.workers.record_counts import Counts
from kpl_integrations.ingest.workers.totals import (
    DeadTotals,
    WorkerTotals,
    decode_report,
    decode_totals,
    encode,
    sum_of,
)


def records_in_all_places(records: RecordStats) -> int:
    finished = records.delivered + sum(records.failed.values())
    return finished + records.spooled + records.dead_lettered + records.buffered + records.lost


def family(name: str, kind: str, *samples: tuple[str, Mapping[str, str], float]) -> Family:
    made = Family(name, "meaning", kind)
    for sample, labels, value in samples:
        made.add_sample(sample, dict(labels), value)
    return made


class Worker:
    """A worker number. Hypothesis decides when its processes die. Its counters and its file outlive its processes."""

    def __init__(self, number: int, *, has_file: bool) -> None:
        self.number, self.has_file = number, has_file
        self.counts = [0, 0, 0, 0, 0]
        self.in_file = self.true_delivered = self.true_failed = self.true_lost = 0
        # Records of a removed file, until a process that misses them reports.
        self.gone_unseen = 0
        self.start()

    def start(self) -> None:
        self.inherited = self.accepted = self.in_file
        self.in_memory = self.delivered = self.failed = 0
        self.last: WorkerTotals | None = None

    def die(self) -> None:
        self.true_lost += self.in_memory
        self.start()

    def die_with_file(self) -> None:
        """Die, and let somebody remove the file before the next process opens it."""
        self.true_lost += self.in_file
        self.gone_unseen += self.in_file
        self.in_file = 0
        self.die()

    def accept(self, records: int) -> None:
        if self.last is None:
            # A process reports before it takes requests.
            self.report()
        self.accepted += records
        self.in_memory += records
        self.counts[0] += records

    def keep(self, records: int) -> None:
        if self.has_file:
            kept = self._leave_memory(records)
            self.in_file += kept
            self.counts[2] += kept

    def deliver(self, records: int) -> None:
        delivered = self._leave_memory(records)
        self.counts[1] += delivered
        self._deliver(delivered)

    def replay(self, records: int) -> None:
        replayed = min(records, self.in_file)
        self.in_file -= replayed
        self.counts[4] += replayed
        self._deliver(replayed)

    def fail(self, records: int) -> None:
        failed = self._leave_memory(records)
        self.counts[3] += failed
        self.failed += failed
        self.true_failed += failed

    def _leave_memory(self, records: int) -> int:
        records = min(records, self.in_memory)
        self.in_memory -= records
        return records

    def _deliver(self, records: int) -> None:
        self.delivered += records
        self.true_delivered += records

    def report(self) -> None:
        self.gone_unseen = 0
        tenant = TenantStats(requests=self.accepted, accepted_records=self.accepted, waiting_records=self.in_memory)
        stats = StatsDocument(
            state="open",
            tenants={"t": tenant},
            records=RecordStats(
                accepted=self.accepted,
                delivered=self.delivered,
                failed={"Expired": self.failed} if self.failed else {},
                spooled=self.in_file,
                buffered=self.in_memory,
            ),
            answers={"202": self.accepted} if self.accepted else {},
        )
        counter: tuple[str, dict[str, str], float] = (
            "kinesis_producer_accepted_records_total",
            {},
            float(self.accepted),
        )
        self.last = WorkerTotals(
            worker=self.number,
            # A process may get the number of an earlier one; nothing is found by it.
            process_id=1,
            inherited=self.inherited,
            counts=Counts(*self.counts),
            stats=stats,
            families=[family("kinesis_producer_accepted_records", "counter", counter)],
        )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["accept", "keep", "deliver", "replay", "fail", "report", "die", "die_with_file"]),
        st.integers(0, 1),
        st.integers(1, 50),
    ),
    max_size=60,
)


@given(steps=STEPS, has_file=st.booleans())
@settings(max_examples=300)
def test_every_record_has_a_place_and_accepted_never_falls_whichever_worker_dies(steps, has_file):
    workers = [Worker(number, has_file=has_file) for number in (0, 1)]
    dead = DeadTotals()
    accepted_before = 0

    def stats() -> RecordStats:
        nonlocal accepted_before
        totals = sum_of([each.last for each in workers if each.last is not None], dead)
        records = totals.stats.records
        assert records_in_all_places(records) == records.accepted >= accepted_before
        assert records.accepted <= sum(each.counts[0] for each in workers)
        accepted_before = records.accepted
        families = [each for each in totals.families if each.name == "kinesis_producer_accepted_records"]
        assert [sample.value for each in families for sample in each.samples] in ([], [accepted_before])
        return records

    for what, number, records in steps:
        worker = workers[number]
        if what == "report":
            worker.report()
        elif what in {"die", "die_with_file"}:
            dead.add(number, worker.last, Counts(*worker.counts))
            getattr(worker, what)()
            # At once, without a report of the replacement, which finds out what its file has not.
            assert stats().lost == sum(each.true_lost - each.gone_unseen for each in workers)
        else:
            getattr(worker, what)(records)
        stats()
    for worker in workers:
        worker.report()
    final = stats()
    # An independent count: no record is counted twice or forgotten.
    assert final.accepted == sum(each.counts[0] for each in workers)
    assert final.lost == sum(each.true_lost for each in workers)
    assert final.delivered == sum(each.true_delivered for each in workers)
    assert sum(final.failed.values()) == sum(each.true_failed for each in workers)
    assert final.buffered == sum(each.in_memory for each in workers)
    assert final.spooled == sum(each.in_file for each in workers)
    for worker in workers:
        assert worker.last is not None
        dead.add_ended(worker.last)
        worker.last = None
        assert stats() == final


def test_until_a_replacement_reports_the_files_of_the_dead_worker_count_as_spooled():
    worker = Worker(0, has_file=True)
    worker.accept(10)
    worker.keep(7)
    dead = DeadTotals()
    dead.add(0, worker.last, Counts(*worker.counts))
    records = sum_of([], dead).stats.records
    assert records == RecordStats(accepted=10, spooled=7, lost=3)
    worker.die()
    worker.report()
    assert worker.last is not None
    assert sum_of([worker.last], dead).stats.records == records


def test_what_the_replacement_does_not_find_is_lost_but_for_what_the_dead_process_delivered_after_its_report():
    worker = Worker(0, has_file=True)
    worker.accept(10)
    worker.keep(10)
    worker.replay(4)
    dead = DeadTotals()
    dead.add(0, worker.last, Counts(*worker.counts))
    worker.die_with_file()
    worker.report()
    assert worker.last is not None
    assert dead.missing(worker.last) == 6
    assert sum_of([worker.last], dead).stats.records == RecordStats(accepted=10, delivered=4, lost=6)


def test_what_a_process_delivered_from_a_file_before_its_first_report_is_not_lost():
    worker = Worker(0, has_file=True)
    worker.accept(10)
    worker.keep(10)
    dead = DeadTotals()
    dead.add(0, worker.last, Counts(*worker.counts))
    worker.die()
    worker.replay(3)
    dead.add(0, worker.last, Counts(*worker.counts))
    worker.die()
    worker.report()
    assert worker.last is not None
    assert sum_of([worker.last], dead).stats.records == RecordStats(accepted=10, delivered=3, spooled=7)


def test_what_failed_after_the_last_report_of_a_dead_worker_has_a_reason_of_its_own():
    worker = Worker(0, has_file=False)
    worker.accept(5)
    worker.fail(2)
    worker.report()
    worker.fail(3)
    dead = DeadTotals()
    dead.add(0, worker.last, Counts(*worker.counts))
    assert sum_of([], dead).stats.records == RecordStats(accepted=5, failed={"Expired": 2, "NotReported": 3})


def report(number: int, *families: Family, drains: str = "", **stats: object) -> WorkerTotals:
    given = msgspec.structs.replace(StatsDocument(state="open"), **stats)
    return WorkerTotals(
        worker=number,
        process_id=number,
        inherited=0,
        drains=drains,
        stats=given,
        families=list(families),
    )


def test_each_statistic_is_combined_by_its_own_rule():
    one = report(
        1,
        tenants={"a": TenantStats(requests=1, waiting_records=2, waiting_bytes=3, refused={"quota": 4})},
        room=BufferStats(outstanding_records=1, max_records=10, outstanding_bytes=2, max_bytes=20),
        answers={"200": 1, "429": 4},
        streams={"s": StreamStats(accepted=1, delivered=1, breakers={"": "closed", "shard": "open"})},
        state="draining",
    )
    other = report(
        0,
        tenants={"a": TenantStats(requests=10, cpu_seconds=0.5, refused={"quota": 1}), "b": TenantStats(requests=5)},
        room=BufferStats(outstanding_records=3, max_records=10, outstanding_bytes=4, max_bytes=20),
        answers={"200": 2},
        streams={"s": StreamStats(accepted=2, waiting=1, breakers={"": "half_open", "shard": "closed"})},
    )
    stats = sum_of([one, other], DeadTotals()).stats
    assert stats.state == "draining"
    tenant = TenantStats(requests=11, waiting_records=2, waiting_bytes=3, cpu_seconds=0.5, refused={"quota": 5})
    assert stats.tenants == {"a": tenant, "b": TenantStats(requests=5)}
    assert stats.room == BufferStats(outstanding_records=4, max_records=20, outstanding_bytes=6, max_bytes=40)
    assert stats.answers == {"200": 3, "429": 4}
    breakers = {"": "half_open", "shard": "open"}
    assert stats.streams == {"s": StreamStats(accepted=3, delivered=1, waiting=1, breakers=breakers)}
    assert list(stats.workers) == ["0", "1"]


def samples(totals: GatewayTotals) -> dict[str, float]:
    lines = exposition(totals.families).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_counters_of_dead_workers_stay_and_gauges_come_from_living_workers_only():
    def reported(number: int, value: float) -> WorkerTotals:
        state = ("kinesis_producer_breaker_state", {"shard": "1"}, value)
        waits: list[tuple[str, dict[str, str], float]] = [
            ("wait_bucket", {"le": "1"}, value),
            ("wait_count", {}, value),
            ("wait_created", {}, value),
        ]
        return report(
            number,
            family("sent", "counter", ("sent_total", {"shard": "1"}, value)),
            family("wait", "histogram", *waits),
            family("kinesis_producer_spool_bytes", "gauge", ("kinesis_producer_spool_bytes", {}, value)),
            family("kinesis_producer_breaker_state", "gauge", state),
            family("kinesis_ingest_open", "gauge", ("kinesis_ingest_open", {}, value)),
            family(f"only_{number}", "gauge", (f"only_{number}", {}, value)),
        )

    dead = DeadTotals()
    dead.add(2, reported(2, 4.0), Counts())
    found = samples(sum_of([reported(0, 1.0), reported(1, 2.0)], dead))
    assert found['sent_total{shard="1"}'] == found['wait_bucket{le="1"}'] == found["wait_count"] == 7.0
    assert found["wait_created"] == 1.0
    assert found["kinesis_producer_spool_bytes"] == 3.0
    assert found['kinesis_producer_breaker_state{shard="1"}'] == 2.0
    assert found["kinesis_ingest_open"] == 1.0
    assert (found["only_0"], found["only_1"], "only_2" in found) == (1.0, 2.0, False)
    assert found["kinesis_ingest_workers"] == 2.0
    assert found['kinesis_ingest_worker_silent_seconds{worker="1"}'] == 0.0


def test_a_worker_that_only_drained_an_orphaned_spool_does_not_close_the_gateway():
    def reported(number: int, *, drains: str) -> WorkerTotals:
        gauge = family("kinesis_ingest_open", "gauge", ("kinesis_ingest_open", {}, float(not drains)))
        return report(number, gauge, drains=drains, state="closed" if drains else "open")

    totals = sum_of([reported(0, drains=""), reported(1, drains="spool-1.db")], DeadTotals())
    assert (totals.stats.state, samples(totals)["kinesis_ingest_open"]) == ("open", 1.0)


def test_a_drainer_that_has_ended_is_no_worker_and_its_counters_stay():
    def reported(number: int, *, drains: str) -> WorkerTotals:
        part = ("kinesis_ingest_part", {"part": "spool", "state": "ok"}, 1.0)
        return report(
            number,
            family("sent", "counter", ("sent_total", {}, 5.0)),
            family("kinesis_ingest_part", "gauge", part),
            drains=drains,
            records=RecordStats(accepted=7, delivered=5, dead_lettered=2),
        )

    living, drainer = reported(0, drains=""), reported(-1, drains="spool.db")
    dead = DeadTotals()
    before = sum_of([living, drainer], dead)
    assert before.stats.workers["-1"].drains == "spool.db"
    dead.add_ended(drainer)
    after = sum_of([living], dead)
    assert after.stats.records == before.stats.records == RecordStats(accepted=14, delivered=10, dead_lettered=4)
    assert after.stats.workers == {"0": before.stats.workers["0"]}
    found = samples(after)
    assert found["sent_total"] == 10.0
    assert found['kinesis_ingest_part{part="spool",state="ok"}'] == found["kinesis_ingest_workers"] == 1.0
    assert 'kinesis_ingest_worker_silent_seconds{worker="-1"}' not in found


def test_records_that_the_dead_process_of_a_drainer_left_are_counted_once_when_the_next_one_has_ended():
    worker = Worker(1, has_file=True)
    worker.accept(10)
    worker.keep(10)
    dead = DeadTotals()
    dead.add(1, worker.last, Counts(*worker.counts))
    worker.die()
    worker.replay(10)
    worker.report()
    assert worker.last is not None
    dead.add_ended(worker.last)
    assert sum_of([], dead).stats.records == RecordStats(accepted=10, delivered=10)


def test_a_tenant_that_waits_at_two_workers_counts_once():
    waits = family("kinesis_ingest_waiting_tenants", "gauge", ("kinesis_ingest_waiting_tenants", {}, 1.0))
    tenants = {"a": TenantStats(waiting_records=1)}
    both = [report(number, waits, tenants=tenants) for number in (0, 1)]
    assert samples(sum_of(both, DeadTotals()))["kinesis_ingest_waiting_tenants"] == 1.0


def test_a_report_and_a_sum_are_one_line_and_survive_encoding():
    sent = report(0, family("a", "gauge", ("a", {"x": "line\nbreak"}, 1.5)), answers={"200": 1})
    total = sum_of([sent], DeadTotals())
    assert decode_report(encode(sent)) == sent
    assert decode_totals(encode(total)) == total
    assert b"\n" not in encode(sent) + encode(total)


def test_the_sum_over_no_workers_is_empty():
    stats = sum_of([], DeadTotals()).stats
    assert (stats.state, stats.records, stats.workers) == ("closed", RecordStats(), {})


def test_the_sum_over_four_workers_with_ten_thousand_tenants_each_is_exact():
    tenants = {
        f"tenant-{number}": TenantStats(requests=number, accepted_records=2 * number, refused={"quota": 1})
        for number in range(10_000)
    }
    sent = [encode(report(number, tenants=tenants)) for number in range(4)]
    dead = DeadTotals()
    dead.add(4, decode_report(encode(report(4, tenants=tenants))), Counts())
    totals = decode_totals(encode(sum_of([decode_report(each) for each in sent], dead)))
    assert len(totals.stats.tenants) == 10_000
    for number in (0, 1, 9_999):
        found = totals.stats.tenants[f"tenant-{number}"]
        assert (found.requests, found.accepted_records) == (5 * number, 10 * number)
        assert found.refused == {"quota": 5}
