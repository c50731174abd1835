"""The spool on an event loop (asyncio and trio): awaited, cancelled, closed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kpl_core.durability.spool import AsyncSpool, Spool, SpoolClosed, SpoolFull, SpoolOptions
from kpl_core.durability.spool.async_spool import LoopMailbox
from kpl_core.durability.spool.store import SpoolStore
from tests.durability.receiver import Gate
from tests.support.durability_scene import spooled

pytestmark = pytest.mark.anyio


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[AsyncSpool]:
    async with AsyncSpool(
        Spool(SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0, max_bytes=1024 * 1024))
    ) as each:
        yield each


async def test_concurrent_appends_each_get_their_own_ids(spool: AsyncSpool) -> None:
    ids: list[int] = []

    async def append(number: int) -> None:
        ids.extend(await spool.append([spooled(number), spooled(number)], claim=True))

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(append, number)
    assert sorted(ids) == list(range(1, 101))
    assert spool.statistics().commits < 50


async def test_a_full_spool_raises_in_the_awaiting_task(spool: AsyncSpool) -> None:
    with pytest.raises(SpoolFull):
        await spool.append([spooled(data=bytes(1024 * 1024))], claim=True)


async def test_a_confirmed_record_is_not_in_the_backlog_and_a_released_one_is(spool: AsyncSpool) -> None:
    ids = await spool.append([spooled(1), spooled(2)], claim=True)
    spool.confirm([ids[0]])
    assert spool.release([ids[1]]) == 1
    assert [each.id for each in await spool.claim_backlog(10)] == [2]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_posted_call_that_raises_does_not_stop_the_others() -> None:
    # On trio the exception ends the loop, and no task waits any more.
    made: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: made.append(type(context["exception"]).__name__))
    mailbox = LoopMailbox()
    reached = anyio.Event()
    for call in (lambda: made.append("first"), lambda: 1 // 0, reached.set):
        mailbox.post(call)
    with anyio.fail_after(30):
        await reached.wait()
    assert made == ["first", "ZeroDivisionError"]


async def test_a_cancelled_append_joins_the_backlog(spool: AsyncSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: spool.append([spooled(7)], claim=True))
        await anyio.to_thread.run_sync(gate.reached.wait)
        tasks.cancel_scope.cancel()
    assert spool.statistics().backlog_records == 0
    gate.opened.set()
    while not (claimed := await spool.claim_backlog(1)):
        await anyio.lowlevel.checkpoint()
    assert claimed[0].record.data == b"7"


async def test_a_cancelled_claim_returns_to_the_backlog(spool: AsyncSpool) -> None:
    await spool.append([spooled()], claim=False)
    asked, go_on = threading.Event(), threading.Event()

    def hold(_: SpoolStore) -> None:
        asked.set()
        go_on.wait(20.0)

    held = spool.spool.ask(hold)
    await anyio.to_thread.run_sync(asked.wait)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(spool.claim_backlog, 10)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    go_on.set()
    await spool.mailbox.wait_for(held)
    assert [each.id for each in await spool.claim_backlog(10)] == [1]


async def test_a_listener_is_called_on_the_loop(spool: AsyncSpool) -> None:
    grew = anyio.Event()
    threads = []

    def listener() -> None:
        threads.append(threading.get_ident())
        grew.set()

    spool.listen(listener)
    await spool.append([spooled()], claim=False)
    await grew.wait()
    assert threads == [threading.get_ident()]


async def test_the_spool_is_closed_after_the_async_with_block(tmp_path: Path) -> None:
    async with AsyncSpool(Spool(SpoolOptions(path=tmp_path / "spool.db"))) as spool:
        pass
    with pytest.raises(SpoolClosed):
        await spool.append([spooled()], claim=True)


async def test_futures_that_complete_together_wake_the_loop_once() -> None:
    mailbox = LoopMailbox()
    wakes: list[object] = []
    wake = mailbox._wake  # noqa: SLF001 - the test counts its calls

    def count_and_wake(call: Callable[[], None]) -> None:
        wakes.append(call)
        wake(call)

    mailbox._wake = count_and_wake  # noqa: SLF001
    futures: list[Future[int]] = [Future() for _ in range(100)]
    results: list[int] = []

    async def wait_for(future: "Future[int]") -> None:
        results.append(await mailbox.wait_for(future))

    def complete() -> None:
        for number, future in enumerate(futures):
            future.set_result(number)

    async with anyio.create_task_group() as tasks:
        for future in futures:
            tasks.start_soon(wait_for, future)
        await anyio.wait_all_tasks_blocked()
        complete()
    assert sorted(results) == list(range(100))
    assert len(wakes) == 1


async def test_a_completed_future_returns_its_result_or_raises_at_once() -> None:
    mailbox = LoopMailbox()
    done: Future[int] = Future()
    done.set_result(5)
    assert await mailbox.wait_for(done) == 5
    failed: Future[int] = Future()
    failed.set_exception(SpoolClosed("gone"))
    with pytest.raises(SpoolClosed, match="gone"):
        await mailbox.wait_for(failed)


def test_a_post_to_a_closed_loop_is_ignored() -> None:
    async def make() -> LoopMailbox:
        return LoopMailbox()

    for backend in ("asyncio", "trio"):
        mailbox = anyio.run(make, backend=backend)
        mailbox.post(lambda: None)
        assert not mailbox._ready  # noqa: SLF001
