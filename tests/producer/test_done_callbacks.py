"""`add_done_callback` of both deliveries: when, where, in which order, and what is left afterwards."""

import asyncio
import gc
import logging
import threading
import weakref
from contextvars import ContextVar
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from kpl_core import BlockingProducer, Config, Delivery, Producer, ProducerClosed
from kpl_core.background.blocking_delivery import BlockingDelivery
from kpl_core.producer import delivery as module
from kpl_core.records.outcome import Outcome, Waiter
from kpl_core.records.record_result import Attempt
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.producer_scene import STREAM

SUCCESS = Attempt(True, None, None, 0.0, 1.0)
QUICK = Config(record_max_buffered_time_ms=5)


def transport(*, latency_seconds: float = 0.0) -> FakeTransport:
    return FakeTransport(FakeKinesis({STREAM: 2}, enforce_limits=False), latency_seconds=latency_seconds)


def settle(outcome: Outcome) -> None:
    outcome.attempted(SUCCESS)
    outcome.settle(shard_id="shardId-000000000000", sequence_number="1")


async def turn() -> None:
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    await anyio.wait_all_tasks_blocked()


@pytest.mark.anyio
async def test_it_is_called_once_with_the_delivery_in_the_thread_of_the_loop():
    calls: list[tuple[Delivery, int]] = []
    async with Producer(QUICK, transport=transport()) as producer:
        delivery = await producer.put(STREAM, partition_key="k", data=b"x")
        delivery.add_done_callback(lambda done: calls.append((done, threading.get_ident())))
        assert calls == []
        assert (await delivery).successful
        await producer.flush()
        await turn()
    assert calls == [(delivery, threading.get_ident())]


@pytest.mark.anyio
async def test_it_runs_outside_of_the_pipelines_work_so_it_may_put():
    later: list[Delivery] = []
    async with Producer(QUICK, transport=transport()) as producer:
        delivery = await producer.put(STREAM, partition_key="k", data=b"x")
        delivery.add_done_callback(
            lambda _: later.append(producer.put_nowait(STREAM, partition_key="k", data=b"second"))
        )
        await delivery
        await turn()
        report = await producer.close()
    assert report.delivered == 2
    assert later[0].result().successful


@pytest.mark.anyio
async def test_a_finished_delivery_calls_at_once():
    outcome = Outcome()
    calls: list[Delivery] = []
    settle(outcome)
    delivery = Delivery(outcome, 0)
    delivery.add_done_callback(calls.append)
    assert calls == [delivery]


async def order_of_callbacks_and_tasks() -> list[str]:
    outcome = Outcome()
    order: list[str] = []
    delivery = Delivery(outcome, 0)

    async def wait() -> None:
        await delivery
        order.append("task")

    delivery.add_done_callback(lambda _: order.append("first"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait())
        await asyncio.sleep(0)
        delivery.add_done_callback(lambda _: order.append("second"))
        settle(outcome)
        assert order == []
    return order


def test_on_asyncio_callbacks_run_in_the_order_they_were_added_and_a_task_is_woken_in_its_place():
    order = asyncio.run(order_of_callbacks_and_tasks())
    assert order == ["first", "task", "second"]


@pytest.mark.anyio
async def test_it_follows_a_user_record_that_moves():
    first, second = Outcome(), Outcome()
    calls: list[Delivery] = []
    delivery = Delivery(first, 0)
    delivery.add_done_callback(calls.append)
    first.move(0, second, 3)
    first.wake()
    settle(first)
    await turn()
    assert calls == []
    settle(second)
    await turn()
    assert calls == [delivery]


@pytest.mark.anyio
async def test_an_exception_is_logged_and_the_next_callback_is_called(caplog):
    outcome = Outcome()
    calls: list[Delivery] = []
    delivery = Delivery(outcome, 0)

    def fail(_: Delivery) -> None:
        message = "boom"
        raise ValueError(message)

    with caplog.at_level(logging.ERROR, "kpl_core"):
        delivery.add_done_callback(fail)
        delivery.add_done_callback(calls.append)
        settle(outcome)
        await turn()
        delivery.add_done_callback(fail)
    assert calls == [delivery]
    assert [record.getMessage() for record in caplog.records] == ["a callback of a delivery failed"] * 2


@pytest.mark.anyio
async def test_it_sees_the_context_of_the_call_that_added_it():
    tenant: ContextVar[str] = ContextVar("tenant")
    outcome = Outcome()
    seen: list[str] = []
    tenant.set("a")
    Delivery(outcome, 0).add_done_callback(lambda _: seen.append(tenant.get()))
    tenant.set("b")
    settle(outcome)
    await turn()
    assert seen == ["a"]


class Thing:
    """What a callback refers to."""

    def finished(self, delivery: object) -> None:
        self.delivery = delivery


@pytest.mark.anyio
async def test_nothing_refers_to_a_callback_after_its_call():
    # The garbage collector does not see deliveries and outcomes, so a cycle through them would stay.
    gc.disable()
    try:
        outcome, thing = Outcome(), Thing()
        Delivery(outcome, 0).add_done_callback(thing.finished)
        settle(outcome)
        await turn()
        del thing.delivery
        trace = weakref.ref(thing)
        del thing
        assert trace() is None
    finally:
        gc.enable()


@pytest.mark.anyio
async def test_a_delivery_without_callbacks_has_no_field_for_them():
    assert Delivery.__struct_fields__ == ("outcome", "index")
    assert BlockingDelivery.__struct_fields__ == ("outcome", "index")


def test_each_of_many_callbacks_added_by_other_threads_is_called_once():
    calls: list[int] = []
    with BlockingProducer(QUICK, transport=transport(latency_seconds=0.002)) as producer:

        def note(number: int, _: BlockingDelivery) -> None:
            calls.append(number)

        def work(thread: int) -> None:
            for number in range(200):
                delivery = producer.put(STREAM, partition_key="k", data=b"x")
                delivery.add_done_callback(partial(note, thread * 1000 + number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(calls) == sorted(thread * 1000 + number for thread in range(4) for number in range(200))


def test_a_blocking_producer_calls_in_its_own_thread_and_a_finished_delivery_in_the_callers():
    threads: list[tuple[BlockingDelivery, int]] = []

    def note(delivery: BlockingDelivery) -> None:
        threads.append((delivery, threading.get_ident()))

    with BlockingProducer(Config(record_max_buffered_time_ms=50), transport=transport(latency_seconds=0.5)) as producer:
        delivery = producer.put(STREAM, partition_key="k", data=b"x")
        delivery.add_done_callback(note)
        assert delivery.result(10).successful
        producer.flush(10)
    assert [first is delivery for first, _ in threads] == [True]
    assert threads[0][1] != threading.get_ident()
    delivery.add_done_callback(note)
    assert threads[1] == (delivery, threading.get_ident())


def test_a_callback_during_the_close_puts_or_learns_that_the_producer_is_closed():
    results: list[bool | str] = []
    producer = BlockingProducer(QUICK, transport=transport())
    with producer:
        first = producer.put(STREAM, partition_key="k", data=b"x")

        def again(_: BlockingDelivery) -> None:
            try:
                delivery = producer.put_nowait(STREAM, partition_key="k", data=b"y")
            except ProducerClosed:
                results.append("closed")
            else:
                delivery.add_done_callback(lambda done: results.append(done.result(0).successful))

        first.add_done_callback(again)
    assert len(results) == 1


def test_a_callback_added_while_the_list_of_waiters_is_taken_is_called(monkeypatch):
    """Another record of the outcome moves between the look at the list and the append to it."""
    outcome = Outcome()
    delivery = Delivery(outcome, 0)
    calls: list[Delivery] = []
    real = module.wait_with

    def late(to: Outcome, waiter: Waiter) -> list[Waiter]:
        monkeypatch.setattr(module, "wait_with", real)
        waiters = real(to, waiter)
        to.waiters = None
        return waiters

    monkeypatch.setattr(module, "wait_with", late)
    delivery.add_done_callback(calls.append)
    settle(outcome)
    assert calls == [delivery]
