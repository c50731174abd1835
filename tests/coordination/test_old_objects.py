"""Objects that are not needed any more, and claims whose answer was lost: neither stops syncs, plans or reports."""

from typing import Any

import anyio
import pytest

from kpl_core import CoordinationOptions
from kpl_core.coordination import MemoryStore, StoreFailed, Usage, Written
from kpl_core.coordination.bounded_calls import in_parallel
from kpl_core.coordination.lease_sync import REPORT_PREFIX, SUMMARY_NAME, SummaryWriter
from kpl_core.coordination.lease_table import TableRules
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store_objects import Summary, WorkerReport, decode, encode
from kpl_core.coordination.worker import CoordinationWorker, Coordinator, within_claim
from kpl_core.hooks import CoordinatorMet, Fact
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio

RESOURCE, OTHER = "orders/shard-0", "orders/shard-1"
LIMIT = (1_000.0, 1_000_000.0)
INTERVAL = 5.0
EPOCH = 1_800_000_000.0
GONE = f"{REPORT_PREFIX}gone.json"


@pytest.fixture
def anyio_backend() -> Backend:
    return virtual_time_backend("asyncio")


def now() -> float:
    return EPOCH + anyio.current_time()


def usages_of(*resources: str, sent: float) -> dict[str, Usage]:
    return {resource: Usage(LIMIT, (sent, sent * 1e3), sent=sent, throttled=0.1 * sent) for resource in resources}


def test_a_shard_that_disappears_while_the_report_is_written_is_not_counted() -> None:
    holder = Leaseholder(HolderRules(worker_id="a", interval_seconds=INTERVAL, max_workers=2, unenforced_part=0.5))
    holder.measure(usages_of(RESOURCE, OTHER, sent=100.0), 0.0)
    prepared = holder.report(0.0, at=EPOCH)
    holder.measure(usages_of(RESOURCE, sent=150.0), 1.0)
    holder.reported(prepared)
    assert holder.report(1.0, at=EPOCH + 1.0).report.claims[RESOURCE].sent == 50.0


def test_what_a_share_without_a_store_counted_while_the_report_was_written_is_not_counted_twice() -> None:
    holder = Leaseholder(HolderRules(worker_id="a", interval_seconds=INTERVAL, max_workers=2))
    holder.measure(usages_of(RESOURCE, sent=100.0), 0.0)
    prepared = holder.report(0.0, at=EPOCH)
    # All 150 lowered the share.
    holder.measure(usages_of(RESOURCE, sent=150.0), 1.0)
    holder.reported(prepared)
    assert holder.report(1.0, at=EPOCH + 1.0).report.claims[RESOURCE].sent == 0.0


class BadDeletions(MemoryStore):
    """Its deletions fail with an error, or never end."""

    def __init__(self, kind: str) -> None:
        super().__init__(now)
        self._kind = kind
        self.deleted: list[str] = []

    async def delete(self, name: str) -> None:
        self.deleted.append(name)
        if self._kind == "denied":
            message = "DeleteObject: AccessDenied"
            raise StoreFailed(message, reason="denied")
        await anyio.sleep_forever()

    async def leave_a_report(self) -> None:
        report = WorkerReport(worker_id="gone", written_at=now(), generation=0, claims={}, leaving=True)
        await self.write(GONE, encode(report))


@pytest.mark.parametrize(("kind", "failure"), [("denied", "denied"), ("silent", "slow")])
async def test_a_failed_deletion_is_logged_once_and_the_syncs_succeed(kind, failure, caplog):
    caplog.set_level("INFO", logger="kpl_core")
    store, facts = BadDeletions(kind), list[Fact]()
    await store.leave_a_report()
    worker = CoordinationWorker(
        store,
        CoordinationOptions(
            store="memory://x", max_workers=2, worker_id="a", interval_seconds=INTERVAL, store_timeout_seconds=0.5
        ),
        usages=lambda: usages_of(RESOURCE, sent=5_000 * anyio.current_time()),
        apply_shares=lambda _: None,
        tell=facts.append,
        clock=anyio.current_time,
        wall_clock=now,
        chance=lambda: 0.5,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await anyio.sleep(10 * INTERVAL)
        tasks.cancel_scope.cancel()
    failures = [fact.failure for fact in facts if isinstance(fact, CoordinatorMet)]
    # Twice an interval at least: each sync counts as a success, and some tell the problem too.
    assert failures.count("") >= 20
    assert set(failures) <= {"", failure}
    logged = [record.getMessage() for record in caplog.records]
    if kind == "denied":
        assert [": deleting old objects: DeleteObject: AccessDenied" in each for each in logged] == [True]
    assert worker.state() == "leased"


@pytest.mark.parametrize("kind", ["denied", "silent"])
async def test_a_coordinator_whose_deletions_fail_computes_all_the_same(kind):
    store, problems = BadDeletions(kind), list[str]()
    await store.leave_a_report()
    coordinator = Coordinator(
        store, interval_seconds=INTERVAL, on_problem=lambda reason, sentence: problems.append(f"{reason}: {sentence}")
    )
    assert (await coordinator.compute_once())[1] == "computed"
    assert anyio.current_time() <= INTERVAL
    assert problems == (["denied: deleting old objects: DeleteObject: AccessDenied"] if kind == "denied" else [])


async def test_a_failed_deletion_does_not_remove_the_report_of_a_worker_that_restarted_meanwhile():
    store = BadDeletions("denied")
    await store.leave_a_report()
    writer = SummaryWriter(store, TableRules(interval_seconds=INTERVAL), lambda *_: None, run_all=in_parallel)
    await writer.compute(None, "", at=now())
    with pytest.raises(StoreFailed):
        await writer.remove_old()
    assert store.deleted == [GONE]
    await store.write(GONE, encode(WorkerReport(worker_id="gone", written_at=now(), generation=0, claims={})))
    await writer.remove_old()
    reading = await store.read(SUMMARY_NAME)
    await writer.compute(decode(reading.body or b"", Summary), reading.version, at=now() + INTERVAL)
    await writer.remove_old()
    assert store.deleted == [GONE]


class LostClaim(MemoryStore):
    """Does the first write of the head, and does not answer it; another worker may write the next head meanwhile."""

    def __init__(self, next_head: bytes = b"") -> None:
        super().__init__(now)
        self._next_head = next_head
        self._is_lost = False

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        written = await super().write(name, body, expected=expected)
        if not self._is_lost:
            self._is_lost = True
            if self._next_head:
                await super().write(name, self._next_head)
            await anyio.sleep_forever()
        return written


async def compute_with(store: Any) -> Summary:
    writer = SummaryWriter(store, TableRules(interval_seconds=INTERVAL), lambda *_: None, run_all=in_parallel)
    with pytest.raises(StoreFailed, match="computing a summary took longer"):
        await within_claim(writer, 1.0, lambda: writer.compute(None, "", at=now()))
    return decode((await store.read(SUMMARY_NAME)).body or b"", Summary)


async def test_a_claim_whose_answer_is_lost_is_released():
    assert (await compute_with(LostClaim())).claimed_until == 0.0


async def test_a_claim_of_another_worker_is_not_released():
    other = Summary(generation=0, computed_at=0.0, began_at=0.0, claimed_until=EPOCH + 7.0)
    assert (await compute_with(LostClaim(encode(other)))).claimed_until == EPOCH + 7.0
