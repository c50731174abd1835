"""Fleets with unassigned capacity: workers report about once a minute, and nothing is slower once it is needed."""

import itertools
from collections.abc import Callable, Mapping

import anyio
import pytest

from kpl_core import CoordinationOptions
from kpl_core.coordination import MemoryStore, Usage
from kpl_core.coordination.lease_sync import REPORT_PREFIX, SUMMARY_NAME
from kpl_core.coordination.lease_table import CALM_INTERVALS
from kpl_core.coordination.leaseholder import IDLE_INTERVALS
from kpl_core.coordination.store import Reading, StoreFailed
from kpl_core.coordination.store_objects import Summary, WorkerReport, decode
from kpl_core.coordination.worker import CoordinationWorker
from tests.coordination.stepping import LIMIT, OTHER, RESOURCE, SteppedWorker, SteppingStore
from tests.support.virtual_time import BackendName, run_in_virtual_time

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


def test_a_calm_worker_that_starts_again_with_its_name_has_its_grant_in_an_interval() -> None:
    """It must not use what it had before, and the plan that granted that was renewed for five minutes."""
    fleet = CalmFleet()
    before = fleet.workers[0].share()
    fleet.workers[0] = SteppedWorker("w0", fleet.store, lambda: fleet.now, max_workers=WORKERS)
    fleet.workers[0].demand = 250.0 / WORKERS
    assert fleet.workers[0].share() < before
    fleet.run(INTERVAL)
    assert fleet.workers[0].share() >= 0.9 * before


def test_a_calm_worker_that_claims_again_what_it_gave_up_has_its_grant_in_an_interval() -> None:
    """As a gateway does a tenant's rate; the others have kept their plan meanwhile."""
    fleet = CalmFleet()
    before = fleet.workers[0].share(resource=OTHER)
    fleet.workers[0].other_demand = 0.0
    fleet.run((IDLE_INTERVALS + 2) * INTERVAL)
    assert fleet.workers[0].share(resource=OTHER) < 0.5 * before
    fleet.workers[0].other_demand = 100.0 / WORKERS
    fleet.run(INTERVAL)
    assert fleet.workers[0].share(resource=OTHER) >= 0.9 * before


def test_throttled_records_are_reported_within_an_interval() -> None:
    """A foreign writer uses the resource, so the estimate must fall as fast as in a busy fleet."""
    fleet = CalmFleet()
    for worker in fleet.workers:
        worker.throttled_share = 0.2
    fleet.run(2 * INTERVAL)
    assert fleet.head().resources[RESOURCE].estimate < 0.9


class SlowStore(MemoryStore):
    """Answers a read after `read_seconds`; with `is_down` it fails."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.read_seconds = 0.0
        self.is_down = False
        self.read_started = anyio.Event()

    async def read(self, name: str) -> Reading:
        self.read_started.set()
        await anyio.sleep(self.read_seconds)
        if self.is_down:
            message = "down"
            raise StoreFailed(message, reason="down")
        return await super().read(name)


class MeasuredWorker:
    """A worker with one resource. It notes when it is measured."""

    def __init__(self, *, per_second: float) -> None:
        self.per_second = per_second
        self.store = SlowStore(anyio.current_time)
        self.waiting = 0.0
        self.measured: list[float] = [0.0]
        self._offered = 0.0
        options = CoordinationOptions(store="memory://x", max_workers=2, worker_id="w", interval_seconds=INTERVAL)
        self.worker = CoordinationWorker(
            self.store,
            options,
            usages=self._usages,
            apply_shares=lambda _: None,
            clock=anyio.current_time,
            wall_clock=anyio.current_time,
            chance=lambda: 0.5,
        )

    def _usages(self) -> Mapping[str, Usage]:
        now = anyio.current_time()
        self._offered += self.per_second * (now - self.measured[-1])
        self.measured.append(now)
        return {RESOURCE: Usage(LIMIT, (self._offered, self._offered * 1000), (self.waiting, self.waiting * 1000))}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_worker_that_uses_little_measures_when_it_syncs_and_soon_after_units_begin_to_wait(
    backend: BackendName,
) -> None:
    async def scene() -> None:
        little, busy = MeasuredWorker(per_second=200.0), MeasuredWorker(per_second=700.0)
        async with anyio.create_task_group() as tasks:
            for each in (little, busy):
                tasks.start_soon(each.worker.run)
            await anyio.sleep(20.2 * INTERVAL)
            del little.measured[:-1], busy.measured[:-1]
            await anyio.sleep(10 * INTERVAL)
            assert 18 <= len(little.measured) <= 22
            assert len(busy.measured) >= 50

            little.per_second, little.waiting = 5_000.0, 500.0
            little.measured.clear()
            little.measured.append(anyio.current_time())
            little.worker.units_wait()
            await anyio.sleep(0.03 * INTERVAL)
            assert len(little.measured) > 1
            await anyio.sleep(INTERVAL)
            assert little.worker.share(RESOURCE, LIMIT)[0] >= 0.9 * LIMIT[0]
            tasks.cancel_scope.cancel()

    run_in_virtual_time(scene, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_units_that_begin_to_wait_during_a_sync_are_measured_soon_after_it(backend: BackendName) -> None:
    async def scene() -> None:
        little = MeasuredWorker(per_second=200.0)
        little.store.read_seconds = 0.2
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(little.worker.run)
            await anyio.sleep(20 * INTERVAL)
            little.store.read_started = anyio.Event()
            await little.store.read_started.wait()
            # The worker has measured and now waits for the store.
            measured = len(little.measured)
            little.waiting = 500.0
            little.worker.units_wait()
            await anyio.sleep(little.store.read_seconds + 0.03 * INTERVAL)
            assert len(little.measured) == measured + 1
            tasks.cancel_scope.cancel()

    run_in_virtual_time(scene, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_worker_that_uses_little_measures_often_while_its_lease_is_expired(backend: BackendName) -> None:
    """Only measurements show throttled units, which then lower its share."""

    async def scene() -> None:
        little = MeasuredWorker(per_second=200.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(little.worker.run)
            await anyio.sleep(20 * INTERVAL)
            little.store.is_down = True
            await anyio.sleep(5 * INTERVAL)
            del little.measured[:-1]
            await anyio.sleep(10 * INTERVAL)
            assert all(later - before <= 1.0 + 1e-6 for before, later in itertools.pairwise(little.measured))
            tasks.cancel_scope.cancel()

    run_in_virtual_time(scene, backend=backend)
