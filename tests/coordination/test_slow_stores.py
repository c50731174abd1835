"""A slow store: plans are still written, a report that is not written has no effect, and no late write replaces it."""

import itertools
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from functools import partial
from typing import Any

import anyio
import pytest
from botocore.exceptions import ClientError

from kpl_core import CoordinationOptions
from kpl_core.coordination import MemoryStore, StoreFailed, Usage, Written
from kpl_core.coordination.bounded_calls import BoundedStore, in_parallel
from kpl_core.coordination.lease_sync import SUMMARY_NAME, LeaseSync, SummaryWriter
from kpl_core.coordination.lease_table import TableRules
from kpl_core.coordination.leaseholder import MAX_QUICK_SYNCS, READ_SPACING, HolderRules, Leaseholder
from kpl_core.coordination.store_objects import Claim, Pair, Summary, WorkerReport, decode, encode
from kpl_core.coordination.stores.s3 import S3Store
from kpl_core.coordination.worker import CoordinationWorker, within_claim
from kpl_core.hooks import ShareChanged
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio

RESOURCE = "orders/shard-0"
LIMIT = (1_000.0, 1_000_000.0)
INTERVAL = 5.0
EPOCH = 1_800_000_000.0
_S3Call = Callable[..., Awaitable[Mapping[str, Any]]]


@pytest.fixture
def anyio_backend() -> Backend:
    return virtual_time_backend("asyncio")


def now() -> float:
    return EPOCH + anyio.current_time()


class SlowS3:
    """The calls of an S3 client; each takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.gets = 0
        self._seconds = seconds
        self._etags = itertools.count(1)
        self.get_object: _S3Call = partial(self._call, self._get)
        self.put_object: _S3Call = partial(self._call, self._put)
        self.delete_object: _S3Call = partial(self._call, self._delete)
        self.list_objects_v2: _S3Call = partial(self._call, self._list)

    async def _call(self, act: Callable[[dict[str, Any]], dict[str, Any]], **options: Any) -> Mapping[str, Any]:
        self.gets += act == self._get
        await anyio.sleep(self._seconds)
        return act(options) | {"ResponseMetadata": {"HTTPHeaders": {"date": formatdate(now(), usegmt=True)}}}

    def put(self, key: str, body: bytes) -> str:
        etag = str(next(self._etags))
        self.objects[key] = (body, etag)
        return etag

    def _get(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["Key"] not in self.objects:
            code = "NoSuchKey"
            raise _refused(code)
        body, etag = self.objects[options["Key"]]
        return {"Body": Body(body), "ETag": etag}

    def _put(self, options: dict[str, Any]) -> dict[str, Any]:
        etag = self.objects.get(options["Key"], (b"", ""))[1]
        if options.get("IfMatch", etag) != etag or ("IfNoneMatch" in options and etag):
            code = "PreconditionFailed"
            raise _refused(code)
        return {"ETag": self.put(options["Key"], options["Body"])}

    def _delete(self, options: dict[str, Any]) -> dict[str, Any]:
        self.objects.pop(options["Key"], None)
        return {}

    def _list(self, options: dict[str, Any]) -> dict[str, Any]:
        found = [{"Key": key, "ETag": etag} for key, (_, etag) in self.objects.items()]
        return {"Contents": [each for each in found if str(each["Key"]).startswith(options["Prefix"])]}


class Body:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body


def _refused(code: str) -> ClientError:
    headers = {"date": formatdate(now(), usegmt=True)}
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPHeaders": headers}}
    return ClientError(answer, "Operation")


class Worker(CoordinationWorker):
    def __init__(self, store: Any, name: str, *, demand: float = 5_000.0, interval: float = INTERVAL) -> None:
        self.applied: list[tuple[float, Pair]] = []
        options = CoordinationOptions(store="memory://x", max_workers=2, worker_id=name, interval_seconds=interval)
        super().__init__(
            store,
            options,
            usages=lambda: {RESOURCE: Usage(LIMIT, (demand * now(), demand * 1_000 * now()))},
            apply_shares=lambda shares: self.applied.append((anyio.current_time(), shares[RESOURCE])),
            clock=anyio.current_time,
            wall_clock=now,
        )


def report_of(index: int) -> bytes:
    claim = Claim((5_000.0, 5e6), (1.0, 1_000.0), LIMIT)
    return encode(WorkerReport(worker_id=f"w{index}", written_at=now(), generation=0, claims={RESOURCE: claim}))


@pytest.mark.parametrize(("workers", "seconds"), [(1_000, 0.1), (200, 0.3), (50, 0.25), (8, 1.0)])
async def test_a_plan_is_written_within_two_intervals_at_a_slow_store(workers, seconds):
    """All but one of the workers are reports that are written again each interval, so that each must be read."""
    s3 = SlowS3(seconds)
    plans: list[float] = [0.0]

    async def rewrite() -> None:
        while True:
            for index in range(workers - 1):
                s3.put(f"report-w{index}.json", report_of(index))
            await anyio.sleep(INTERVAL)

    async def watch() -> None:
        generation = 0
        while True:
            if SUMMARY_NAME in s3.objects:
                head = decode(s3.objects[SUMMARY_NAME][0], Summary)
                if head.generation > generation:
                    generation = head.generation
                    plans.append(anyio.current_time())
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rewrite)
        tasks.start_soon(watch)
        tasks.start_soon(Worker(S3Store(s3, "bucket", ""), "own").run)
        await anyio.sleep(8 * INTERVAL)
        tasks.cancel_scope.cancel()
    gaps = [after - before for before, after in itertools.pairwise([*plans, 8 * INTERVAL])]
    assert max(gaps) <= 2 * INTERVAL, gaps


async def test_a_plan_that_takes_longer_than_a_short_interval_is_not_overtaken():
    plans: list[bool] = []

    class Slow(MemoryStore):
        """A listing takes two intervals of 0.5 s, within the 2 s of a call."""

        async def read_all(self, prefix: str) -> Any:
            await anyio.sleep(1.0)
            return await super().read_all(prefix)

        async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
            await anyio.sleep(0.05)
            written = await super().write(name, body, expected=expected)
            if name == SUMMARY_NAME:
                head = decode(body, Summary)
                if head.computed_at > 0.0 and head.claimed_until == 0.0:
                    plans.append(written.version is not None)
            return written

    store = Slow(now)
    async with anyio.create_task_group() as tasks:
        for name in ("a", "b", "c"):
            tasks.start_soon(Worker(store, name, interval=0.5).run)
            await anyio.sleep(0.17)
        await anyio.sleep(60.0)
        tasks.cancel_scope.cancel()
    # No worker computed in vain because another one had claimed meanwhile.
    assert plans.count(False) == 0
    assert len(plans) >= 20


async def test_a_listing_that_is_cancelled_continues_where_it_was():
    s3 = SlowS3(0.1)
    store = S3Store(s3, "bucket", "")
    for index in range(100):
        s3.put(f"report-w{index}.json", report_of(index))
    with anyio.move_on_after(0.35):
        await store.read_all("report-")
    assert s3.gets == 96
    listing = await store.read_all("report-")
    assert len(listing.bodies) == 100
    # 64 were read, and 32 were on their way.
    assert s3.gets == 96 + 36


async def test_the_parts_of_former_plans_are_forgotten_and_the_reports_are_not():
    s3 = SlowS3(0.0)
    store = S3Store(s3, "bucket", "")
    s3.put("report-w0.json", report_of(0))
    for plan in range(5):
        s3.put(f"part-{plan}-0.json", b"part")
        await store.read_all("report-")
        await store.read_all(f"part-{plan}-")
    # One for each part, and one for the report.
    assert s3.gets == 6
    await store.read_all("part-0-")
    assert s3.gets == 7


async def test_an_owner_that_cannot_finish_a_plan_gives_its_claim_up():
    class NoListing(MemoryStore):
        async def read_all(self, prefix: str) -> Any:
            await anyio.sleep_forever()

    store = NoListing(now)
    writer = SummaryWriter(store, TableRules(interval_seconds=INTERVAL), lambda *_: None, run_all=in_parallel)
    with pytest.raises(StoreFailed, match="computing a summary took longer than 5 s") as caught:
        await within_claim(writer, INTERVAL, lambda: writer.compute(None, "", at=now()))
    assert caught.value.reason == "slow"
    head = decode((await store.read(SUMMARY_NAME)).body or b"", Summary)
    assert (head.generation, head.claimed_until) == (0, 0.0)


class Silent(MemoryStore):
    async def read(self, name: str) -> Any:
        await anyio.sleep_forever()

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        await anyio.sleep_forever()
        raise AssertionError


async def test_a_call_of_a_store_that_does_not_answer_fails_in_time():
    with pytest.raises(StoreFailed, match=r"no answer within 0\.5 s"):
        await BoundedStore(Silent(now), 0.5).read("a")
    assert anyio.current_time() == pytest.approx(0.5)


async def test_a_slow_sync_is_logged_with_the_time_that_it_may_take(caplog):
    class Slow(MemoryStore):
        async def read(self, name: str) -> Any:
            await anyio.sleep(2.0)
            return await super().read(name)

        async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
            await anyio.sleep(2.0)
            return await super().write(name, body, expected=expected)

    options = CoordinationOptions(store="memory://x", max_workers=2, interval_seconds=1.0, store_timeout_seconds=3.0)
    worker = CoordinationWorker(
        Slow(now),
        options,
        usages=lambda: {RESOURCE: Usage(LIMIT, (5_000.0, 5e6))},
        apply_shares=lambda _: None,
        clock=anyio.current_time,
        wall_clock=now,
    )
    await worker.step()
    assert anyio.current_time() == pytest.approx(3.0)
    assert "slow: reading the summary and reporting took 3 s; check" in caplog.records[0].getMessage()


class Order(MemoryStore):
    """Notes what is in force when a report is written; fails the next write if asked to."""

    def __init__(self) -> None:
        super().__init__(now)
        self.worker: Worker
        self.seen: list[tuple[float, float]] = []
        self.fails = False

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        if name == "report-a.json" and self.fails:
            self.fails = False
            message = "lost"
            raise StoreFailed(message, reason="down")
        if name == "report-a.json":
            claims = decode(body, WorkerReport).claims
            said = claims[RESOURCE].holding[0] if RESOURCE in claims else 0.0
            self.seen.append((self.worker.applied[-1][1][0], said))
        return await super().write(name, body, expected=expected)


async def test_no_report_says_less_than_what_is_in_force():
    store = Order()
    store.worker, other = Worker(store, "a"), Worker(store, "b")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.worker.run)
        await anyio.sleep(3 * INTERVAL)
        tasks.start_soon(other.run)
        await anyio.sleep(4 * INTERVAL)
        before = store.worker.applied[-1][1][0]
        await store.worker.leave()
        tasks.cancel_scope.cancel()
    assert all(in_force <= said for in_force, said in store.seen[:-1])
    in_force, said = store.seen[-1]
    assert said == 0.0
    # At most what every plan reserves for a worker that has not started.
    assert in_force <= 0.04 * LIMIT[0] / 2
    assert before > 10 * in_force


def holder() -> Leaseholder:
    each = Leaseholder(HolderRules(worker_id="a", interval_seconds=INTERVAL, max_workers=2))
    each.measure({RESOURCE: Usage(LIMIT, (100.0, 1e5), sent=100.0, throttled=7.0)}, 0.0)
    return each


async def test_a_report_whose_write_failed_is_repeated_with_its_counts():
    store = Order()
    store.worker = Worker(store, "a")
    store.worker.applied.append((0.0, LIMIT))
    reporter = holder()
    sync = LeaseSync(store, reporter, may_compute=False, on_problem=lambda *_: None)
    await sync.sync(anyio.current_time, now)
    await anyio.sleep(INTERVAL)
    reporter.measure({RESOURCE: Usage(LIMIT, (200.0, 2e5), sent=200.0, throttled=14.0)}, INTERVAL)
    store.fails = True
    with pytest.raises(StoreFailed):
        await sync.sync(anyio.current_time, now)
    assert reporter.wants_to_report(None, anyio.current_time())
    await sync.sync(anyio.current_time, now)
    report = decode((await store.read("report-a.json")).body or b"", WorkerReport)
    assert report.claims[RESOURCE].throttled == pytest.approx(7.0)


async def test_a_write_that_arrives_late_does_not_replace_a_newer_report():
    """The first write is lost for its caller, and arrives after the second one."""
    late: list[Any] = []

    class Late(MemoryStore):
        async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
            if not late:
                late.append((name, body, expected))
                message = "no answer"
                raise StoreFailed(message, reason="slow")
            return await super().write(name, body, expected=expected)

    store, reporter = Late(now), holder()
    sync = LeaseSync(store, reporter, may_compute=False, on_problem=lambda *_: None)
    with pytest.raises(StoreFailed):
        await sync.sync(anyio.current_time, now)
    await anyio.sleep(1.0)
    await sync.sync(anyio.current_time, now)
    name, body, expected = late[0]
    assert (await MemoryStore.write(store, name, body, expected=expected)).version is None
    report = decode((await store.read("report-a.json")).body or b"", WorkerReport)
    assert report.written_at == pytest.approx(EPOCH + 1.0)


def test_a_worker_without_a_lease_asks_early_only_so_many_times():
    each, at, spacings = holder(), 0.0, list[float]()
    for _ in range(MAX_QUICK_SYNCS + 3):
        each.sync_started(at)
        spacings.append(round(each.next_sync_at(usual_seconds=INTERVAL) - at, 6))
        at += spacings[-1]
    assert sum(spacing < READ_SPACING * INTERVAL for spacing in spacings) == MAX_QUICK_SYNCS - 1


def worker_of(store: MemoryStore, options: CoordinationOptions, **options_of_test: Any) -> CoordinationWorker:
    kept: dict[str, Any] = {"usages": lambda: {RESOURCE: Usage(LIMIT, (5_000.0, 5e6))}, **options_of_test}
    return CoordinationWorker(
        store, options, apply_shares=lambda _: None, clock=anyio.current_time, wall_clock=now, **kept
    )


async def test_a_worker_leaves_within_a_second_though_the_store_does_not_answer():
    worker = worker_of(Silent(now), CoordinationOptions(store="memory://x", max_workers=2, interval_seconds=INTERVAL))
    await worker.step()
    began = anyio.current_time()
    await worker.leave()
    assert anyio.current_time() - began == pytest.approx(1.0)


async def test_without_a_store_a_worker_uses_its_part_of_the_usual_workers():
    options = CoordinationOptions(store="memory://x", interval_seconds=INTERVAL, max_workers=100, usual_workers=4)
    worker = worker_of(Silent(now), options)
    await worker.step()
    assert worker.share(RESOURCE, LIMIT) == (LIMIT[0] / 4, LIMIT[1] / 4)


async def test_the_share_of_a_resource_that_comes_back_is_told_again():
    facts: list[Any] = []
    used = {RESOURCE: Usage(LIMIT, (5_000.0, 5e6))}
    options = CoordinationOptions(store="memory://x", interval_seconds=INTERVAL, max_workers=4, usual_workers=4)
    worker = worker_of(Silent(now), options, usages=lambda: dict(used), tell=facts.append)

    async def told() -> list[str]:
        facts.clear()
        await worker.step()
        return [fact.shard_id for fact in facts if isinstance(fact, ShareChanged)]

    assert await told() == ["shard-0"]
    assert await told() == []
    usage = used.pop(RESOURCE)
    assert await told() == []
    assert worker.fractions() == {}
    used[RESOURCE] = usage
    assert await told() == ["shard-0"]
