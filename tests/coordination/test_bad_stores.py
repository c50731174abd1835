"""A store that is slow, down, denied, full of garbage, of another release, or ten minutes off: one table, row by row.

In each the worker goes on within its safe share, warns once, and tells a fact with the reason; when
it is over it says so once.
"""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import anyio
import pytest

from kpl_core import CoordinationOptions
from kpl_core.coordination import CoordinationStore, Listing, MemoryStore, Reading, StoreFailed, Usage
from kpl_core.coordination.lease_sync import REPORT_PREFIX, SUMMARY_NAME
from kpl_core.coordination.store_objects import Pair
from kpl_core.coordination.worker import CoordinationWorker, read_plan
from kpl_core.hooks import CoordinatorMet, Fact
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio

RESOURCE = "orders/shard-0"
LIMIT = (1_000.0, 1_000_000.0)
INTERVAL = 5.0
EPOCH = 1_800_000_000.0


class StoreProblem(NamedTuple):
    reason: str
    warning: str
    # Whether shares are still divided.
    is_bearable: bool = False


PROBLEMS = {
    "down": StoreProblem("down", "no answer"),
    "denied": StoreProblem("denied", "AccessDenied; allow this role"),
    "slow": StoreProblem("slow", "no answer within 2 s"),
    # Only a sync that computes lists objects, so other syncs succeed; the problem must not be logged as over in
    # between.
    "a listing that is denied": StoreProblem("denied", "ListBucket: AccessDenied"),
    "an error that no store may raise": StoreProblem("broken", "KeyError; the log at DEBUG has the traceback"),
    "garbage in the summary": StoreProblem("garbage", "leases.json: it cannot be decoded", is_bearable=True),
    "garbage in a report": StoreProblem("garbage", "report-other.json: it cannot be decoded", is_bearable=True),
    "a summary of another release": StoreProblem("version", "it has version 99 and this release reads 1"),
    "a clock ten minutes ahead": StoreProblem("clock", "clock differs from the store's by +600 s", is_bearable=True),
    "a clock ten minutes behind": StoreProblem("clock", "clock differs from the store's by -600 s", is_bearable=True),
}


class BadStore(MemoryStore):
    """Has one problem at a time; its clock is right."""

    def __init__(self) -> None:
        super().__init__(lambda: EPOCH + anyio.current_time())
        self.problem = ""

    async def read(self, name: str) -> Reading:
        match self.problem:
            case "down":
                message = "no answer"
                raise StoreFailed(message, reason="down")
            case "denied":
                message = "s3://bucket/: AccessDenied; allow this role to read and write there"
                raise StoreFailed(message, reason="denied")
            case "slow":
                await anyio.sleep(60)
            case "an error that no store may raise":
                raise KeyError(name)
        return await super().read(name)

    async def read_all(self, prefix: str) -> Listing:
        if self.problem == "a listing that is denied":
            message = "s3://bucket/: ListBucket: AccessDenied; allow this role to read and write there"
            raise StoreFailed(message, reason="denied")
        return await super().read_all(prefix)

    async def begin(self, problem: str) -> None:
        self.problem = problem
        match problem:
            case "garbage in the summary":
                await self.write(SUMMARY_NAME, b"\xff\x00<html>")
            case "garbage in a report":
                await self.write(f"{REPORT_PREFIX}other.json", b"[1, 2")
            case "a summary of another release":
                await self.write(SUMMARY_NAME, b'{"version": 99, "unknown": true}')

    async def end(self) -> None:
        if self.problem == "a summary of another release":
            await self.delete(SUMMARY_NAME)
        self.problem = ""
        await self.delete(f"{REPORT_PREFIX}other.json")


class Fleet:
    """Two workers, the first of which has the problem with its clock, where it is the clock's."""

    def __init__(self, store: CoordinationStore) -> None:
        self.facts: list[Fact] = []
        self.shares: list[Mapping[str, Pair]] = [{}, {}]
        self.clock_error = 0.0
        self.workers = [self._worker(store, index) for index in range(2)]

    def _worker(self, store: CoordinationStore, index: int) -> CoordinationWorker:
        def apply_shares(shares: Mapping[str, Pair]) -> None:
            self.shares[index] = shares

        def usages() -> Mapping[str, Usage]:
            offered = anyio.current_time() * 5_000
            return {RESOURCE: Usage(LIMIT, (offered, offered * 1_000))}

        options = CoordinationOptions(store="memory://x", max_workers=2, worker_id=f"w{index}")
        return CoordinationWorker(
            store,
            options,
            usages=usages,
            apply_shares=apply_shares,
            tell=self.facts.append,
            clock=anyio.current_time,
            chance=random.Random(index).random,
            wall_clock=lambda: EPOCH + anyio.current_time() + (self.clock_error if index == 0 else 0.0),
        )

    def total(self) -> float:
        return sum(share.get(RESOURCE, (0.0, 0.0))[0] for share in self.shares)

    def failures(self) -> set[str]:
        return {fact.failure for fact in self.facts if isinstance(fact, CoordinatorMet)}


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


def warnings_with(caplog: Any, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize("name", PROBLEMS)
async def test_a_worker_keeps_its_share_and_logs_the_problem_once(name, caplog):
    caplog.set_level("INFO", logger="kpl_core")
    problem = PROBLEMS[name]
    store = BadStore()
    fleet = Fleet(store)
    async with anyio.create_task_group() as tasks:
        for worker in fleet.workers:
            tasks.start_soon(worker.run)
        await anyio.sleep(6 * INTERVAL)
        assert 0.95 * LIMIT[0] <= fleet.total() <= LIMIT[0]
        assert fleet.failures() == {""}

        await store.begin(name)
        fleet.clock_error = {"ahead": 600.0, "behind": -600.0}.get(name.rpartition(" ")[2], 0.0)
        fleet.facts.clear()
        for _ in range(60):
            await anyio.sleep(1.0)
            assert 0.8 * LIMIT[0] <= fleet.total() <= LIMIT[0] * (1 + 1e-9)
        assert problem.reason in fleet.failures()
        warnings = warnings_with(caplog, problem.warning)
        # Once for each worker that noticed it.
        assert 1 <= len(warnings) <= 2
        assert warnings[0].endswith("This worker keeps its present share.")
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == len(warnings)

        await store.end()
        fleet.clock_error = 0.0
        await anyio.sleep(8 * INTERVAL)
        fleet.facts.clear()
        await anyio.sleep(2 * INTERVAL)
        assert fleet.failures() == {""}
        assert 1 <= len(warnings_with(caplog, f"works again ({problem.reason})")) <= 2
        assert 0.95 * LIMIT[0] <= fleet.total() <= LIMIT[0] * (1 + 1e-9)
        tasks.cancel_scope.cancel()


async def test_a_worker_with_a_wrong_clock_still_gets_its_share():
    store = BadStore()
    fleet = Fleet(store)
    fleet.clock_error = 600.0
    async with anyio.create_task_group() as tasks:
        for worker in fleet.workers:
            tasks.start_soon(worker.run)
        await anyio.sleep(6 * INTERVAL)
        tasks.cancel_scope.cancel()
    assert [share[RESOURCE][0] for share in fleet.shares] == pytest.approx([500.0, 500.0], rel=0.02)


async def test_an_object_of_another_release_is_not_overwritten():
    store = BadStore()
    await store.begin("a summary of another release")
    fleet = Fleet(store)
    async with anyio.create_task_group() as tasks:
        for worker in fleet.workers:
            tasks.start_soon(worker.run)
        await anyio.sleep(6 * INTERVAL)
        tasks.cancel_scope.cancel()
    assert (await store.read(SUMMARY_NAME)).body == b'{"version": 99, "unknown": true}'
    # Two workers, each with a sixth of its half.
    assert fleet.total() == pytest.approx(LIMIT[0] / 6)


@pytest.mark.parametrize(("body", "reason"), [(b"\x00\xff", "garbage"), (b'{"version": 99}', "version")])
async def test_a_plan_that_cannot_be_read_is_an_error_with_its_reason(body, reason):
    store = BadStore()
    assert await read_plan(store) is None
    await store.write(SUMMARY_NAME, body)
    with pytest.raises(StoreFailed, match=r"leases\.json: ") as failed:
        await read_plan(store)
    assert failed.value.reason == reason


async def test_only_two_processes_with_one_worker_id_are_warned(caplog):
    """Both would use the same lease, so the total would be too high by one share."""
    store = BadStore()
    fleet = Fleet(store)
    async with anyio.create_task_group() as tasks:
        for worker in fleet.workers:
            tasks.start_soon(worker.run)
        await anyio.sleep(4 * INTERVAL)
        # A clean-up job deletes the report; that is not a second process.
        await store.delete(f"{REPORT_PREFIX}w1.json")
        await anyio.sleep(4 * INTERVAL)
        assert fleet.failures() == {""}
        tasks.start_soon(Fleet(store).workers[0].run)
        await anyio.sleep(20 * INTERVAL)
        tasks.cancel_scope.cancel()
    assert fleet.failures() == {"", "duplicate"}
    warnings = warnings_with(caplog, "report-w0.json: another process writes it; give each process its own worker_id")
    assert len(warnings) == 2
