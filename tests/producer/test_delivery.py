import asyncio
import gc
import threading
from collections.abc import Generator
from typing import Any

import anyio
import pytest

from kpl_core import BlockingDelivery, Delivery, NotSpooled, ResultPending
from kpl_core.producer import delivery as module
from kpl_core.producer.delivery import wait_for_spool_of_all
from kpl_core.records.outcome import History, Outcome
from kpl_core.records.record_result import NOT_SPOOLED, Attempt, RecordResult

pytestmark = pytest.mark.anyio

SUCCESS = Attempt(True, None, None, 0.0, 1.0)


def settle(outcome: Outcome, number: str = "1") -> None:
    outcome.attempted(SUCCESS)
    outcome.settle(shard_id="shardId-000000000000", sequence_number=number)


async def test_it_can_be_awaited_before_after_and_again():
    outcome = Outcome()
    delivery = Delivery(outcome, 0)
    awaited = []

    async def wait() -> None:
        awaited.append(await delivery)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert awaited == []
        settle(outcome)
    assert len(awaited) == 3
    assert await delivery == await delivery == delivery.result() == awaited[0]
    assert awaited[0].successful


async def test_a_result_read_too_early_is_an_error_that_says_what_to_do():
    delivery = Delivery(Outcome(), 0)
    with pytest.raises(ResultPending, match="await the delivery, or flush"):
        delivery.result()
    assert not delivery.done
    assert delivery.peek() is None


async def test_a_task_that_stops_waiting_leaves_no_trace_and_disturbs_no_other():
    outcome = Outcome()
    got = []

    async def wait() -> None:
        got.append(await Delivery(outcome, 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        for _ in range(100):
            with anyio.move_on_after(0.001):
                await Delivery(outcome, 0)
        assert outcome.waiters is not None
        assert len(outcome.waiters) == 1
        settle(outcome)
    assert len(got) == 1


async def test_waiting_goes_on_where_the_user_record_went():
    first, second, third = Outcome(), Outcome(), Outcome()
    got = []

    async def wait() -> None:
        got.append(await Delivery(first, 0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        first.move(0, second, 7)
        first.wake()
        await anyio.wait_all_tasks_blocked()
        second.move(7, third, 2)
        second.wake()
        await anyio.wait_all_tasks_blocked()
        assert got == []
        settle(third, "9")
    assert [result.sequence_number for result in got] == ["9"]


async def test_a_user_record_that_moves_on_just_before_it_is_waited_for_is_not_waited_for_where_it_was(monkeypatch):
    """As another thread's loop may do it: a waiter that came after the wake-up never woke."""
    first, second = Outcome(), Outcome()
    settle(second, "9")
    make_alarm = module._alarm  # noqa: SLF001 - the last thing that is done before the wait

    def alarm():
        first.move(0, second, 0)
        first.wake()
        return make_alarm()

    monkeypatch.setattr(module, "_alarm", alarm)
    with anyio.fail_after(30):
        result = await Delivery(first, 0)
    assert result.sequence_number == "9"


def test_loops_in_many_threads_all_get_the_result():
    """Each made a list of waiters where it found none, and all lists but one were forgotten."""
    rounds, loops = 200, 4
    outcomes = [Outcome() for _ in range(rounds)]
    together = threading.Barrier(loops + 1)

    async def wait_for_all() -> None:
        for outcome in outcomes:
            together.wait(30)
            with anyio.fail_after(30):
                await Delivery(outcome, 0)

    threads = [threading.Thread(target=anyio.run, args=(wait_for_all,)) for _ in range(loops)]
    for thread in threads:
        thread.start()
    for outcome in outcomes:
        together.wait(30)
        settle(outcome)
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


class _Leaving:
    """A waiter that leaves the list when it is woken, as one that another thread cancels at that moment."""

    def __init__(self, waiters: list[Any]) -> None:
        self._waiters = waiters
        self.was_told = False
        waiters.append(self)

    def set(self) -> None:
        self.was_told = True
        self._waiters.remove(self)


def test_a_waiter_that_leaves_during_the_wake_up_makes_no_other_miss_it():
    waiters: list[Any] = []
    outcome = Outcome(waiters=waiters)
    leaving = [_Leaving(waiters) for _ in range(4)]
    settle(outcome)
    assert all(each.was_told for each in leaving)


def test_a_loop_that_closes_while_its_waiters_wake_harms_no_producer(monkeypatch):
    outcome = Outcome()
    loop = asyncio.new_event_loop()
    # As it is when the loop closes between the question and the call.
    monkeypatch.setattr(loop, "is_closed", lambda: False)
    delivery = Delivery(outcome, 0)

    async def begin_to_wait() -> Generator[Any, Any, RecordResult]:
        waiting = delivery.__await__()
        next(waiting)
        return waiting

    waiting = loop.run_until_complete(begin_to_wait())
    loop.close()
    settle(outcome)
    waiting.close()
    assert delivery.result().successful


async def test_being_cancelled_at_the_very_moment_of_the_result_is_no_error():
    outcome = Outcome()
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            await Delivery(outcome, 0)

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        settle(outcome)
        tasks.cancel_scope.cancel()
    assert outcome.waiters is None


async def test_a_delivery_costs_the_garbage_collector_nothing():
    delivery = Delivery(Outcome(), 0)
    assert not gc.is_tracked(delivery)


def test_deliveries_compare_by_identity_so_that_gather_takes_them():
    outcome = Outcome()
    one, same = Delivery(outcome, 0), Delivery(outcome, 0)
    assert one != same
    assert len({one, same}) == 2


@pytest.mark.parametrize("handle", [Delivery, BlockingDelivery])
def test_a_delivery_shows_its_result_and_nothing_of_what_is_behind_it(handle):
    outcome = Outcome()
    delivery = handle(outcome, 0)
    assert repr(delivery) == f"<{handle.__name__} pending>"
    settle(outcome)
    assert repr(delivery) == f"<{handle.__name__} {delivery.result()!r}>"


def test_a_callback_hears_of_every_delivery_of_a_kinesis_record_through_one_waiter():
    outcome = Outcome()
    results: list[RecordResult] = []
    for index in range(3):
        module.call_when_finished(Delivery(outcome, index), results.append)
    module.call_when_finished(Delivery(outcome, 3), lambda _: results.clear())
    assert outcome.waiters is not None
    assert len(outcome.waiters) == 2
    settle(outcome)
    assert results == []
    module.call_when_finished(Delivery(outcome, 4), results.append)
    assert [result.sequence_number for result in results] == ["1"]


def test_a_callback_hears_of_deliveries_that_part_each_by_its_own_result():
    outcome, left, failed = Outcome(), Outcome(), Outcome()
    results: list[str | None] = []
    deliveries = [Delivery(outcome, index) for index in range(4)]

    def finished(result: RecordResult) -> None:
        results.append(result.sequence_number)

    for delivery in deliveries:
        module.call_when_finished(delivery, finished)
    outcome.move(0, failed, 0)
    outcome.move(1, left, 0)
    outcome.move(2, left, 1)
    failed.settle()
    # Another thread may read a delivery between the move and the wake-up.
    assert deliveries[0].done
    outcome.wake()
    assert results == [None]
    settle(outcome, "rest")
    settle(left, "left")
    assert results == [None, "rest", "left", "left"]


def test_a_callback_gets_the_attempts_of_each_delivery():
    outcome = Outcome()
    results: list[RecordResult] = []
    for index in range(2):
        module.call_when_finished(Delivery(outcome, index), results.append)
    outcome.histories = {1: History(SUCCESS, None)}
    settle(outcome)
    assert [len(result.attempts) for result in results] == [1, 2]


async def test_a_wait_for_the_spool_ends_when_it_is_known_of_every_record():
    full, later = Outcome(), Outcome()
    full.attempted(Attempt(False, NOT_SPOOLED, "the spool is full", 0.0, 0.0))
    full.settle()
    ended = anyio.Event()

    async def wait() -> None:
        with pytest.raises(NotSpooled, match="the spool is full"):
            await wait_for_spool_of_all([Delivery(full, 0), Delivery(later, 0)], {later})
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(1.0)
        assert not ended.is_set()
        later.settle(sequence_number="1")
    assert ended.is_set()
