"""What callers' code does in the middle of ours: it costs no record, and leaves no task waiting."""

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context, ContextVar

import anyio
import pytest

from kpl_core import Config, Producer, ProducerClosed
from kpl_core.hooks import Fact, RequestCompleted
from kpl_core.testing import RecordingHook
from tests.support.producer_scene import STREAM, assert_books_close, put, reasons, service, unmetered

pytestmark = pytest.mark.anyio


class Asked(RecordingHook):
    """A hook that is asked where Kinesis records come from, and says it or fails."""

    def __init__(self, error: type[BaseException] | None) -> None:
        super().__init__()
        self._error = error
        self.asked = 0

    def opening_context(self) -> object:
        self.asked += 1
        if self._error is not None:
            raise self._error
        return "here"


@pytest.mark.parametrize("aggregated", [True, False])
@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_hook_that_fails_to_give_the_context_refuses_no_record_and_leaks_no_room(
    aggregated: bool, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Asked(error), Asked(None)
    config = Config(aggregation_enabled=aggregated)
    async with Producer(config, transport=unmetered(2), hooks=[failing, other]) as orders:
        deliveries = put(orders, 50)
        await orders.flush()
        deliveries += put(orders, 50)
        await orders.flush()
        assert orders.buffer_limit.outstanding_records == 0
    assert_books_close(orders.report(), deliveries)
    assert reasons(deliveries) == {"": 100}
    assert failing.asked == 1
    assert other.asked > 0
    assert [record.levelno for record in caplog.records if "gets no more facts" in record.message] == [logging.ERROR]


class _PutsFromItsFacts(Asked):
    """A hook that puts a record when it gets its first request's first fact, as code of another task can."""

    def __init__(self) -> None:
        super().__init__(None)
        self.orders: Producer | None = None

    def __call__(self, fact: Fact) -> None:
        super().__call__(fact)
        if self.orders is not None and self._error is None:
            self._error = ValueError
            _ = Context().run(put, self.orders, 1, stream="other")


async def test_a_hook_dismissed_during_its_own_facts_gets_none_of_the_rest_and_others_get_all_in_order() -> None:
    before, failing, after = RecordingHook(), _PutsFromItsFacts(), RecordingHook()
    transport = service(2, streams={STREAM: 2, "other": 1}, enforce_limits=False)
    async with Producer(transport=transport, hooks=[before, failing, after]) as orders:
        put(orders, 50)
        failing.orders = orders
        await orders.flush()
    assert before.facts == after.facts
    assert len(before.facts) > 2
    assert failing.facts == before.facts[:1]


WHERE: ContextVar[str] = ContextVar("where", default="nowhere")


class _Placed(RecordingHook):
    """A hook that remembers in which context each Kinesis record opened."""

    def opening_context(self) -> object:
        return WHERE.get()

    def places(self) -> list[object]:
        return [place for fact in self.of(RequestCompleted) for place in fact.opened_in]


async def test_what_opens_by_no_put_is_not_taken_for_what_was_put_where_the_producer_was_entered() -> None:
    placed = _Placed()
    before = WHERE.set("startup")
    async with Producer(transport=unmetered(2), hooks=[placed]) as orders:
        WHERE.reset(before)
        # Aggregated as soon as the shards are known, by no put.
        put(orders, 10)
        await anyio.sleep(1.0)
        assert orders.report().delivered == 10
        assert placed.places() == []
        _ = WHERE.set("request")
        put(orders, 10)
        await orders.flush()
    assert set(placed.places()) == {"request"}


async def test_a_hook_that_meets_a_cancelled_future_ends_no_task(caplog: pytest.LogCaptureFixture) -> None:
    def hook(fact: Fact) -> None:
        raise asyncio.CancelledError

    def listener() -> None:
        raise asyncio.CancelledError

    async with Producer(transport=unmetered(), hooks=[hook]) as orders:
        orders.internal.on_progress(listener)
        deliveries = put(orders, 10)
        await orders.flush()
    assert reasons(deliveries) == {"": 10}
    assert caplog.text.count("gets no more facts") == 1


def _of_a_request(task: "asyncio.Task[object]") -> bool:
    return "_send" in task.get_name()


def _of_the_sleeper(task: "asyncio.Task[object]") -> bool:
    return "StreamRunner.run" in task.get_name()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("is_chosen", [_of_a_request, _of_the_sleeper])
async def test_cancelling_a_task_of_the_producer_raises_and_leaves_no_caller_waiting(
    is_chosen: Callable[["asyncio.Task[object]"], bool],
) -> None:
    orders = Producer(Config(max_outstanding_records=20), transport=unmetered(latency_seconds=5.0))
    waiting: list[asyncio.Task[object]] = []
    with anyio.fail_after(30), pytest.RaisesGroup(pytest.RaisesExc(ProducerClosed, match="cancelled a task")):
        async with orders:
            deliveries = put(orders, 20)
            await asyncio.sleep(0.3)
            waiting += [
                asyncio.create_task(orders.flush()),
                asyncio.create_task(orders.put(STREAM, partition_key="k", data=b"x")),
            ]
            await asyncio.sleep(0)
            (chosen,) = [task for task in asyncio.all_tasks() if is_chosen(task)]
            _ = chosen.cancel()
            await asyncio.sleep(20)
    flushed, refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert getattr(flushed, "buffered", None) == 0
    assert isinstance(refused, ProducerClosed)
    assert reasons(deliveries) == {"Unknown": 20}
    assert_books_close(orders.report(), deliveries)
    assert orders.buffer_limit.outstanding_records == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_close_is_not_delayed_by_a_cancelled_task() -> None:
    orders = Producer(transport=unmetered(latency_seconds=5.0))
    with anyio.fail_after(30), pytest.RaisesGroup(ProducerClosed):
        async with orders:
            deliveries = put(orders, 20)
            await asyncio.sleep(0.3)
            (chosen,) = [task for task in asyncio.all_tasks() if _of_a_request(task)]
            _ = asyncio.get_running_loop().call_later(0.1, chosen.cancel)
            await orders.close(timeout=None)
    assert reasons(deliveries) == {"Unknown": 20}
