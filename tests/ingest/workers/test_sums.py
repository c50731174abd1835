"""All workers as one: the books close and no counter falls, whoever dies when; found by Hypothesis."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from prometheus_client.metrics_core import Metric as Family

from kpl_integrations.gateway_figures import BufferStats, RecordStats, StatsDocument, StreamStats, TenantStats
from kpl_integrations.ingest.stats.metrics import exposition
from kpl_integrations.ingest.stats.totals import GatewayTotals
from kpl_integrations.ingest.workers.past import Past, folded
from kpl_integrations.ingest.workers.seat import Seat
from kpl_integrations.ingest.workers.snapshot import Snapshot, decode_snapshot, encode_snapshot, snapshot_of
from kpl_integrations.ingest.workers.sums import sum_of


def books(records: RecordStats) -> int:
    finished = records.delivered + sum(records.failed.values())
    return finished + records.spooled + records.dead_lettered + records.buffered + records.lost


def family(name: str, kind: str, *samples: tuple[str, Mapping[str, str], float]) -> Family:
    made = Family(name, "meaning", kind)
    for sample, labels, value in samples:
        made.add_sample(sample, dict(labels), value)
    return made


class Worker:
    """A worker of which Hypothesis decides what happens; its file outlives it."""

    def __init__(self, number: int, *, keeps: bool) -> None:
        self.number, self.keeps = number, keeps
        self.in_file = 0
        self.begin(life=1)

    def begin(self, life: int) -> None:
        self.seat = Seat(worker=self.number, life=life, count=2, folder="/nowhere")
        self.inherited = self.accepted = self.open = self.in_file
        self.delivered = self.failed = 0
        self.told: Snapshot | None = None

    def take(self, records: int) -> None:
        self.accepted += records
        self.open += records
        if self.keeps:
            self.in_file += records

    def finish(self, records: int, *, well: bool) -> None:
        done = min(records, self.open)
        self.open -= done
        self.in_file = max(0, self.in_file - done)
        if well:
            self.delivered += done
        else:
            self.failed += done

    def tell(self) -> None:
        stats = StatsDocument(
            state="open",
            tenants={
                "t": TenantStats(requests=self.accepted, accepted_records=self.accepted, waiting_records=self.open)
            },
            records=RecordStats(
                accepted=self.accepted,
                delivered=self.delivered,
                failed={"Expired": self.failed} if self.failed else {},
                buffered=self.open,
            ),
            answers={"202": self.accepted} if self.accepted else {},
        )
        counter: tuple[str, dict[str, str], float] = (
            "kinesis_producer_accepted_records_total",
            {},
            float(self.accepted),
        )
        families = [family("kinesis_producer_accepted_records", "counter", counter)]
        self.told = snapshot_of(GatewayTotals(stats, families), self.seat, process_id=1, inherited=self.inherited)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "deliver", "fail", "tell", "die", "die silently"]),
        st.integers(0, 1),
        st.integers(1, 50),
    ),
    max_size=60,
)


@given(steps=STEPS, keeps=st.booleans())
@settings(max_examples=300)
def test_the_books_close_and_accepted_never_falls_whoever_dies_when(steps, keeps):
    workers = [Worker(number, keeps=keeps) for number in (0, 1)]
    past = Past()
    accepted_before = 0
    for what, number, records in steps:
        worker = workers[number]
        if what == "take":
            worker.take(records)
        elif what in {"deliver", "fail"}:
            worker.finish(records, well=what == "deliver")
        elif what == "tell":
            worker.tell()
        else:
            if what == "die":
                # Else it died with something it had told nobody of.
                worker.tell()
            past = folded(past, worker.seat.name, number, worker.told)
            worker.begin(life=worker.seat.life + 1)
        living = [each.told for each in workers if each.told is not None]
        totals = sum_of(living, past)
        stats = totals.stats
        assert books(stats.records) == stats.records.accepted >= accepted_before
        accepted_before = stats.records.accepted
        families = [each for each in totals.families if each.name == "kinesis_producer_accepted_records"]
        assert [sample.value for each in families for sample in each.samples] in ([], [accepted_before])


@pytest.mark.parametrize(("keeps", "lost"), [(True, 0), (False, 7)])
def test_what_a_dead_worker_left_is_lost_unless_its_successor_finds_it(keeps, lost):
    worker = Worker(0, keeps=keeps)
    worker.take(10)
    worker.finish(3, well=True)
    worker.tell()
    past = folded(Past(), worker.seat.name, 0, worker.told)
    assert sum_of([], past).stats.records.lost == 7
    worker.begin(life=2)
    worker.tell()
    assert worker.told is not None
    records = sum_of([worker.told], past).stats.records
    assert (records.accepted, records.delivered, records.lost) == (10, 3, lost)


def snapshot(number: int, *families: Family, **stats: object) -> Snapshot:
    seat = Seat(worker=number, life=1, count=2, folder="/nowhere")
    whole = msgspec.structs.replace(StatsDocument(state="open"), **stats)
    return snapshot_of(GatewayTotals(whole, families), seat, process_id=number, inherited=0)


def test_each_kind_of_count_is_added_as_it_should_be():
    one = snapshot(
        1,
        tenants={"a": TenantStats(requests=1, waiting_records=2, waiting_bytes=3, refused={"quota": 4})},
        room=BufferStats(outstanding_records=1, max_records=10, outstanding_bytes=2, max_bytes=20),
        answers={"200": 1, "429": 4},
        streams={"s": StreamStats(accepted=1, delivered=1, breakers={"": "closed", "shard": "open"})},
        state="draining",
    )
    other = snapshot(
        0,
        tenants={"a": TenantStats(requests=10, refused={"quota": 1}), "b": TenantStats(requests=5)},
        room=BufferStats(outstanding_records=3, max_records=10, outstanding_bytes=4, max_bytes=20),
        answers={"200": 2},
        streams={"s": StreamStats(accepted=2, waiting=1, breakers={"": "half_open", "shard": "closed"})},
    )
    stats = sum_of([one, other], Past()).stats
    assert stats.state == "draining"
    tenant = TenantStats(requests=11, waiting_records=2, waiting_bytes=3, refused={"quota": 5})
    assert stats.tenants == {"a": tenant, "b": TenantStats(requests=5)}
    assert stats.room == BufferStats(outstanding_records=4, max_records=20, outstanding_bytes=6, max_bytes=40)
    assert stats.answers == {"200": 3, "429": 4}
    breakers = {"": "half_open", "shard": "open"}
    assert stats.streams == {"s": StreamStats(accepted=3, delivered=1, waiting=1, breakers=breakers)}
    assert list(stats.workers) == ["0", "1"]


def samples(totals: GatewayTotals) -> dict[str, float]:
    lines = exposition(totals.families).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_counters_and_histograms_are_added_and_gauges_are_what_says_most():
    def told(number: int, value: float) -> Snapshot:
        state = ("kinesis_producer_breaker_state", {"shard": "1"}, value)
        waits: list[tuple[str, dict[str, str], float]] = [
            ("wait_bucket", {"le": "1"}, value),
            ("wait_count", {}, value),
            ("wait_created", {}, value),
        ]
        return snapshot(
            number,
            family("sent", "counter", ("sent_total", {"shard": "1"}, value)),
            family("wait", "histogram", *waits),
            family("kinesis_producer_spool_bytes", "gauge", ("kinesis_producer_spool_bytes", {}, value)),
            family("kinesis_producer_breaker_state", "gauge", state),
            family("kinesis_ingest_open", "gauge", ("kinesis_ingest_open", {}, value)),
            family(f"only_{number}", "gauge", (f"only_{number}", {}, value)),
        )

    living, dead = [told(0, 1.0), told(1, 2.0)], told(2, 4.0)
    found = samples(sum_of(living, folded(Past(), "worker-2-1", 2, dead)))
    assert found['sent_total{shard="1"}'] == found['wait_bucket{le="1"}'] == found["wait_count"] == 7.0
    assert found["wait_created"] == 1.0
    assert found["kinesis_producer_spool_bytes"] == 3.0
    assert found['kinesis_producer_breaker_state{shard="1"}'] == 2.0
    assert found["kinesis_ingest_open"] == 1.0
    assert (found["only_0"], found["only_1"], "only_2" in found) == (1.0, 2.0, False)
    assert found["kinesis_ingest_workers"] == 2.0


def test_who_only_emptied_an_old_spool_and_ended_does_not_close_the_gateway():
    def told(number: int, *, takes: bool, is_open: bool) -> Snapshot:
        gauge = family("kinesis_ingest_open", "gauge", ("kinesis_ingest_open", {}, float(is_open)))
        state = "open" if is_open else "closed"
        return msgspec.structs.replace(snapshot(number, gauge, state=state), takes=takes)

    both = [told(0, takes=True, is_open=True), told(1, takes=False, is_open=False)]
    totals = sum_of(both, Past())
    assert (totals.stats.state, samples(totals)["kinesis_ingest_open"]) == ("open", 1.0)
    seat = Seat(worker=1, life=1, count=2, folder="/nowhere", takes=False)
    assert not snapshot_of(GatewayTotals(StatsDocument(state="open"), []), seat, process_id=1, inherited=0).takes


def test_a_tenant_that_waits_at_two_workers_is_one_that_waits():
    waits = family("kinesis_ingest_waiting_tenants", "gauge", ("kinesis_ingest_waiting_tenants", {}, 1.0))
    tenants = {"a": TenantStats(waiting_records=1)}
    both = [snapshot(number, waits, tenants=tenants) for number in (0, 1)]
    assert samples(sum_of(both, Past()))["kinesis_ingest_waiting_tenants"] == 1.0


def test_a_snapshot_is_the_same_after_its_file():
    told = snapshot(0, family("a", "gauge", ("a", {"x": "y"}, 1.5)), answers={"200": 1})
    assert decode_snapshot(encode_snapshot(told)) == told


def test_of_nobody_the_sum_is_nothing():
    stats = sum_of([], Past()).stats
    assert (stats.state, stats.records, stats.workers) == ("closed", RecordStats(), {})
