"""Puts from threads, such as those of sync routes: real threads, a real event loop, a Kinesis in memory."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from kpl_core import (
    BufferFull,
    Config,
    Delivery,
    FairnessPolicy,
    InvalidUserRecord,
    Producer,
    ProducerClosed,
    SpoolOptions,
    UserRecord,
    WrongEventLoop,
)
from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.consumers import read_everything
from tests.support.producer_scene import STREAM, EndOfTheDriver

pytestmark = pytest.mark.anyio
THREADS, PUTS = 8, 200


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def producer(fake: FakeKinesis | None = None, *, hooks: Any = (), **options: Any) -> Producer:
    fake = FakeKinesis({STREAM: 2}, enforce_limits=False) if fake is None else fake
    return Producer(Config(**options), transport=FakeTransport(fake), hooks=hooks)


def put(orders: Producer, text: str) -> Delivery:
    return orders.put_nowait(STREAM, partition_key=text[:2], data=text.encode())


async def in_threads(count: int, work: Callable[[int], object]) -> list[Any]:
    return await asyncio.gather(*[asyncio.to_thread(work, number) for number in range(count)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
async def test_a_put_in_a_forked_child_raises():
    async with producer() as orders:
        child = os.fork()
        if not child:
            # The child has no running loop, as a thread.
            try:
                _ = put(orders, "lost")
            except WrongEventLoop as error:
                os._exit(7 if f"process {os.getppid()}" in str(error) else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
        assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize("fairness", [None, FairnessPolicy()])
async def test_every_record_of_every_thread_arrives_and_has_the_same_results(fairness: FairnessPolicy | None):
    fake = FakeKinesis({STREAM: 2}, enforce_limits=False)
    async with producer(fake, fairness=fairness) as orders:

        def work(number: int) -> list[Delivery]:
            return [put(orders, f"{number} {index}") for index in range(PUTS)]

        from_loop = [put(orders, f"l {index}") for index in range(PUTS)]
        deliveries = sum(await in_threads(THREADS, work), from_loop)
        assert {(await delivery).successful for delivery in deliveries} == {True}
        report = await orders.flush()
    expected = {f"{number} {index}" for number in range(THREADS) for index in range(PUTS)}
    expected |= {f"l {index}" for index in range(PUTS)}
    stored = [record.data.decode() for record in read_everything(fake, STREAM)]
    assert len(stored) == len(expected)
    assert set(stored) == expected
    assert (report.accepted, report.delivered) == (len(expected), len(expected))
    assert orders.buffer_limit.outstanding_records == 0
    assert orders.buffer_limit.outstanding_bytes == 0


async def test_many_puts_of_threads_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch):
    loop = asyncio.get_running_loop()
    wakeups: list[object] = []
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counting(callback: Any, *args: Any, **options: Any) -> Any:
        wakeups.append(callback)
        return call_soon_threadsafe(callback, *args, **options)

    async with producer() as orders:
        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        # The loop waits for the thread without running, so that it cannot take the queue in between.
        thread = threading.Thread(target=lambda: [put(orders, str(number)) for number in range(100)])
        thread.start()
        thread.join()
        assert len(wakeups) == 1
        report = await orders.flush()
    assert report.delivered == 100


async def test_a_put_that_finds_no_room_raises_at_the_call():
    async with producer(max_outstanding_records=3) as orders:
        accepted: list[Delivery] = []

        def work() -> None:
            with pytest.raises(BufferFull, match="3 of 3 records and 6 of"):
                accepted.extend(put(orders, str(number)) for number in range(5))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(accepted) == 3
        # The loop's own put may take the room before the loop sees the queue; what was accepted stays accepted.
        _ = put(orders, "l")
        assert {(await delivery).successful for delivery in accepted} == {True}
    assert orders.report().delivered == 4


async def test_a_blocking_put_waits_for_room_and_gives_up_after_its_timeout():
    fake = FakeKinesis({STREAM: 1}, enforce_limits=False)
    async with producer(fake, max_outstanding_records=1, record_max_buffered_time_ms=10_000) as orders:

        def blocking(timeout: float | None) -> Delivery:
            return orders.put_blocking(STREAM, partition_key="1", data=b"x", timeout=timeout)

        first = put(orders, "1")
        with pytest.raises(BufferFull, match="1 of 1 records"):
            _ = await asyncio.to_thread(blocking, 0.0)
        # The waiting put sends the open batch, which frees room.
        second = await asyncio.to_thread(blocking, 10.0)
        assert first.done
        with pytest.raises(WrongEventLoop, match="await put"):
            _ = blocking(10.0)
        with pytest.raises(ValueError, match="timeout is -1"):
            _ = await asyncio.to_thread(blocking, -1)
    assert second.result().successful


async def test_a_thread_waits_for_its_result():
    async with producer() as orders:
        assert (await asyncio.to_thread(lambda: put(orders, "1").wait(10))).successful
        with pytest.raises(WrongEventLoop, match="await the delivery"):
            put(orders, "2").wait()
        called = threading.Event()

        def late() -> Delivery:
            delivery = put(orders, "3")
            delivery.add_done_callback(lambda _: called.set())
            return delivery

        delivery = await asyncio.to_thread(late)
        assert (await delivery) is delivery.result()
        await asyncio.to_thread(called.wait, 10)
    assert called.is_set()


async def test_a_result_that_does_not_come_in_time_is_a_timeout():
    async with producer(record_max_buffered_time_ms=10_000) as orders:
        with pytest.raises(TimeoutError, match=r"no result after 0\.01 s"):
            _ = await asyncio.to_thread(lambda: put(orders, "1").wait(0.01))


async def test_bad_records_raise_in_the_thread_and_reserve_nothing():
    async with producer() as orders:
        with pytest.raises(InvalidUserRecord, match="partition_key has 0 characters"):
            _ = await asyncio.to_thread(put, orders, "")
        with pytest.raises(TypeError, match="encode it first"):
            _ = await asyncio.to_thread(lambda: orders.put_nowait(STREAM, partition_key="1", data="x"))  # type: ignore[arg-type]
        await orders.flush()
        assert orders.report().accepted == 0


async def test_what_threads_put_before_a_close_is_delivered_and_later_puts_are_refused():
    fake = FakeKinesis({STREAM: 1}, enforce_limits=False)
    async with producer(fake) as orders:
        thread = threading.Thread(target=lambda: [put(orders, str(number)) for number in range(50)])
        thread.start()
        thread.join()
        report = await orders.close()
        assert (report.accepted, report.delivered) == (50, 50)
        with pytest.raises(ProducerClosed, match="put while the application runs"):
            _ = await asyncio.to_thread(put, orders, "late")
        with pytest.raises(ProducerClosed):
            _ = await asyncio.to_thread(lambda: orders.put_blocking(STREAM, partition_key="1", data=b"late"))


async def test_with_a_write_ahead_spool_a_blocking_put_is_acknowledged(tmp_path: Path):
    fake = FakeKinesis({STREAM: 1}, enforce_limits=False)
    async with producer(fake, spool=SpoolOptions(path=tmp_path / "spool", mode="write_ahead")) as orders:

        def work(number: int) -> Delivery:
            return orders.put_blocking(STREAM, partition_key="1", data=b"%d" % number, timeout=10)

        deliveries = await in_threads(4, work)
        assert [(await delivery).successful for delivery in deliveries] == [True] * 4
    assert len(read_everything(fake, STREAM)) == 4


async def test_a_hook_sees_the_context_of_the_thread_that_put():
    request: ContextVar[str] = ContextVar("request", default="none")

    class Spans:
        def __init__(self) -> None:
            self.opened: list[object] = []

        def __call__(self, fact: Fact) -> None: ...

        def opening_context(self) -> object:
            self.opened.append(request.get())
            return None

    spans = Spans()
    async with producer(hooks=[spans]) as orders:

        def work(number: int) -> Delivery:
            request.set(f"request {number}")
            return put(orders, f"{number}")

        for number in range(2):
            await (await asyncio.to_thread(work, number))
    assert spans.opened == ["request 0", "request 1"]


@pytest.mark.parametrize("is_in_thread", [False, True])
@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_put_that_waits_for_a_loop_that_does_not_run_raises(is_in_thread: bool, is_blocking: bool):
    orders = producer(fairness=FairnessPolicy())
    raised: list[str] = []

    async def run(opened: asyncio.Event, end: asyncio.Event) -> None:
        async with orders:
            opened.set()
            await end.wait()

    def work() -> None:
        try:
            _ = orders.put_blocking(STREAM, partition_key="1", data=b"x") if is_blocking else put(orders, "1")
        except WrongEventLoop as error:
            raised.append(str(error))

    with asyncio.Runner() as runner:
        loop, opened, end = runner.get_loop(), asyncio.Event(), asyncio.Event()
        running = loop.create_task(run(opened, end))
        loop.run_until_complete(opened.wait())
        if is_in_thread:
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(10)
        else:
            work()
        end.set()
        loop.run_until_complete(running)
    assert len(raised) == 1
    assert "does not run" in raised[0]
    assert orders.report().accepted == 0


async def test_a_signal_handler_that_puts_in_the_middle_of_a_put_is_counted(monkeypatch: pytest.MonkeyPatch):
    loop = asyncio.get_running_loop()
    call_soon_threadsafe = loop.call_soon_threadsafe

    async with producer() as orders:

        def interrupted(callback: Any, *args: Any, **options: Any) -> Any:
            handle = call_soon_threadsafe(callback, *args, **options)
            monkeypatch.undo()
            _ = put(orders, "2, of the handler")
            return handle

        monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
        thread = threading.Thread(target=put, args=(orders, "1"))
        thread.start()
        thread.join()
        report = await orders.flush()
        assert (report.accepted, report.delivered) == (2, 2)
        assert (orders.buffer_limit.outstanding_records, orders.buffer_limit.outstanding_bytes) == (0, 0)


async def test_a_blocking_put_that_needs_room_comes_behind_what_its_thread_put_before():
    fake = FakeKinesis({STREAM: 1}, enforce_limits=False)
    async with producer(fake, max_outstanding_records=1_000, rate_limit_records_per_sec_per_shard=1e6) as orders:

        def work() -> None:
            for number in range(1_500):
                _ = orders.put_blocking(STREAM, partition_key="k", data=f"{number}".encode(), timeout=20)

        working = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0)
        # Meanwhile the thread fills the buffer, with more than the loop puts in one step.
        time.sleep(0.3)  # noqa: ASYNC251 - a loop that is busy
        await working
        await orders.flush()
    assert [int(read.data) for read in read_everything(fake, STREAM)] == list(range(1_500))


async def test_a_blocking_put_does_not_overtake_a_put_that_waits_for_room():
    transport = FakeTransport(FakeKinesis({STREAM: 1}, enforce_limits=False), latency_seconds=0.2)
    order: list[str] = []
    async with Producer(Config(max_outstanding_bytes=10_000), transport=transport) as orders:
        _ = orders.put_nowait(STREAM, partition_key="1", data=bytes(6_000))

        async def put_large() -> None:
            _ = await orders.put(STREAM, partition_key="1", data=bytes(8_000))
            order.append("large")

        def put_small() -> None:
            _ = orders.put_blocking(STREAM, partition_key="1", data=b"small", timeout=10)
            order.append("small")

        waiting = asyncio.create_task(put_large())
        await asyncio.sleep(0)
        await asyncio.to_thread(put_small)
        await waiting
    assert order == ["large", "small"]


@pytest.mark.parametrize("is_limit", [True, False])
async def test_a_record_that_fails_after_its_put_is_counted_and_the_others_are_delivered(
    monkeypatch: pytest.MonkeyPatch, is_limit: bool
):
    facts: list[Fact] = []
    async with producer(hooks=[facts.append]) as orders:
        _ = put(orders, "from the loop")
        await orders.flush()
        deliveries: list[Delivery] = []
        texts = ["1", "2, longer than ten bytes", "3"]
        thread = threading.Thread(target=lambda: deliveries.extend(put(orders, text) for text in texts))
        thread.start()
        thread.join()
        if is_limit:
            orders._open[STREAM].max_record_bytes = 10  # noqa: SLF001 - as the stream's description does
        else:
            put_record_nowait = orders.internal.put_record_nowait

            def failing(stream: str, record: UserRecord) -> Delivery:
                if record.data == texts[1].encode():
                    message = "partition_key and data"
                    raise RuntimeError(message)
                return put_record_nowait(stream, record)

            def failing_together(pairs: list[Any], *_: object) -> int:
                assert len(pairs) == len(texts)
                message = "one of these"
                raise RuntimeError(message)

            monkeypatch.setattr(orders._open[STREAM], "put_pairs", failing_together)  # noqa: SLF001 - to make it fail
            monkeypatch.setattr(orders.internal, "put_record_nowait", failing)
        results = [await delivery for delivery in deliveries]
        assert [result.error_code for result in results] == [None, "Internal", None]
        assert "partition_key and data" in str(results[1].attempts[-1].error_message)
        report = await orders.flush()
        assert (report.accepted, report.delivered, report.failed) == (4, 3, {"Internal": 1})
        assert report.complete
        assert (orders.buffer_limit.outstanding_records, orders.buffer_limit.outstanding_bytes) == (0, 0)
    failed = [fact for fact in facts if isinstance(fact, RecordsFinished) and fact.outcome == "failed"]
    assert [fact.reason for fact in failed] == ["Internal"]


async def test_a_record_for_a_stream_that_a_failed_producer_never_knew_has_a_result():
    class Dying(FakeTransport):
        async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
            raise EndOfTheDriver

    orders = Producer(Config(record_max_buffered_time_ms=1), transport=Dying(FakeKinesis({STREAM: 1, "other": 1})))
    with contextlib.suppress(BaseException):
        async with orders:
            _ = put(orders, "1")
            delivery: list[Delivery] = []

            def at_the_end() -> None:
                thread = threading.Thread(
                    target=lambda: delivery.append(orders.put_nowait("other", partition_key="k", data=b"x"))
                )
                thread.start()
                thread.join()

            # In the step in which the driver ends: what is in the inbox then, no step of the loop will take.
            fail = orders._life._fail  # noqa: SLF001 - the instant is seen nowhere else

            def failing(error: BaseException) -> None:
                at_the_end()
                fail(error)

            orders._life._fail = failing  # type: ignore[method-assign] # noqa: SLF001
            await asyncio.sleep(5)
    assert [each.result().error_code for each in delivery] == ["Internal"]
