"""Fleets with unassigned capacity: workers report about once a minute, and nothing is slower once it is needed."""

import itertools

from kpl_core.coordination.lease_sync import REPORT_PREFIX, SUMMARY_NAME
from kpl_core.coordination.lease_table import CALM_INTERVALS
from kpl_core.coordination.store_objects import Summary, WorkerReport, decode
from tests.coordination.stepping import LIMIT, OTHER, RESOURCE, SteppedWorker, SteppingStore

INTERVAL = 5.0
WORKERS = 8


class CalmFleet:
    """Eight workers on three resources, one of them idle. They use a quarter of the first and a tenth of the second."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.store = SteppingStore(lambda: self.now)
        self.workers = [
            SteppedWorker(f"w{index}", self.store, lambda: self.now, max_workers=WORKERS) for index in range(WORKERS)
        ]
        for worker in self.workers:
            worker.demand, worker.other_demand = 250.0 / WORKERS, 100.0 / WORKERS
        self.run(20 * INTERVAL)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 20)):
            self.now += 0.05
            for number, worker in enumerate(self.workers):
                if round(self.now * 20) % 20 == number:
                    worker.measure()
                if worker.holder.sync_due(self.now, usual_seconds=INTERVAL):
                    worker.sync()
            assert self.total() <= LIMIT[0] * (1 + 1e-9)
            assert self.total(OTHER) <= LIMIT[0] * (1 + 1e-9)

    def total(self, resource: str = RESOURCE) -> float:
        return sum(worker.share(resource=resource) for worker in self.workers)

    def head(self) -> Summary:
        return decode(self.store.remembered()[SUMMARY_NAME][0], Summary)

    def report_of(self, worker: SteppedWorker) -> WorkerReport:
        return decode(self.store.remembered()[f"{REPORT_PREFIX}{worker.name}.json"][0], WorkerReport)


def test_calm_workers_report_every_48_to_60_seconds_and_the_summary_is_renewed() -> None:
    fleet = CalmFleet()
    head = fleet.head()
    written = {worker.name: {fleet.report_of(worker).written_at} for worker in fleet.workers}
    for _ in range(24):
        fleet.run(INTERVAL)
        for worker in fleet.workers:
            written[worker.name].add(fleet.report_of(worker).written_at)
        assert fleet.now - fleet.head().computed_at <= 0.6 * INTERVAL
        assert set(fleet.head().members) == {worker.name for worker in fleet.workers}
    assert (fleet.head().generation, fleet.head().token) == (head.generation, head.token)
    for times in map(sorted, written.values()):
        spacings = [later - before for before, later in itertools.pairwise(times)]
        assert all(0.8 * CALM_INTERVALS * INTERVAL <= each <= (CALM_INTERVALS + 0.6) * INTERVAL for each in spacings)
        assert len(spacings) >= 2


def test_a_calm_worker_with_a_burst_has_the_unassigned_capacity_in_a_second_and_the_rest_in_an_interval() -> None:
    fleet = CalmFleet()
    before = fleet.workers[0].share()
    unassigned = fleet.head().resources[RESOURCE].unassigned[0]
    fleet.workers[0].demand = 5_000.0
    fleet.run(1.0 + 1.0)  # measured within a second
    assert fleet.workers[0].share() >= before + 0.95 * unassigned
    fleet.run(INTERVAL)
    assert fleet.total() >= 0.95 * LIMIT[0]
    assert fleet.workers[0].share() >= 0.6 * LIMIT[0]


def test_a_calm_worker_whose_load_its_own_share_limits_gets_the_unassigned_capacity() -> None:
    """A caller that sends one record after the other offers no more than the share, and may never be seen to wait."""
    fleet = CalmFleet()
    for worker in fleet.workers[1:]:
        worker.demand = 1.0
    for _ in range(40):
        fleet.workers[0].demand = fleet.workers[0].share()
        fleet.run(1.0)
    assert fleet.workers[0].share() >= 0.85 * LIMIT[0]


def test_leases_of_killed_calm_workers_are_free_two_intervals_after_they_are_needed() -> None:
    fleet = CalmFleet()
    del fleet.workers[4:]
    fleet.run(4 * INTERVAL)
    # No worker needs them, so they are kept.
    assert len(fleet.head().members) == WORKERS
    for worker in fleet.workers:
        worker.demand = 5_000.0
    fleet.run(3 * INTERVAL)
    assert len(fleet.head().members) == 4
    assert fleet.total() >= 0.95 * LIMIT[0]


def test_killed_calm_workers_are_forgotten_after_fourteen_intervals() -> None:
    fleet = CalmFleet()
    del fleet.workers[4:]
    fleet.run(15 * INTERVAL)
    assert len(fleet.head().members) == 4


def test_a_new_worker_and_one_that_leaves_are_seen_at_once() -> None:
    fleet = CalmFleet()
    fleet.workers.append(SteppedWorker("new", fleet.store, lambda: fleet.now, max_workers=WORKERS))
    fleet.workers[-1].demand = 30.0
    fleet.run(1.0)
    assert "new" in fleet.head().members
    leaving = fleet.workers.pop()
    leaving.leave()
    fleet.run(INTERVAL)
    assert "new" not in fleet.head().members


def test_throttled_records_are_reported_within_an_interval() -> None:
    """A foreign writer uses the resource, so the estimate must fall as fast as in a busy fleet."""
    fleet = CalmFleet()
    for worker in fleet.workers:
        worker.throttled_share = 0.2
    fleet.run(2 * INTERVAL)
    assert fleet.head().resources[RESOURCE].estimate < 0.9
