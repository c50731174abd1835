"""fair_merge in virtual time: the order of items, and that no stream is delayed, lost or left open."""

import gc
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kpl_core.limits import fair_merge, rate_limited
from kpl_core.options.policy import FairnessPolicy, RateLimitPolicy
from tests.limits.sources import Source, collect, collect_scoped, endless, gather, scoped
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


async def test_streams_take_turns():
    assert await collect_scoped(fair_merge([Source("abc"), Source("xyz")])) == list("axbycz")


@pytest.mark.parametrize("buffer", [1, 2, 16])
async def test_three_to_one_holds_within_two_thousandths(buffer):
    policy = FairnessPolicy(weights={0: 3, 1: 1}, max_buffer_per_flow=buffer)

    received = await collect_scoped(fair_merge([endless("a"), endless("b")], policy), 20_000)

    assert abs(received.count("a") / 20_000 - 0.75) <= 0.002


@pytest.mark.parametrize("buffer", [1, 3, 16])
async def test_when_all_are_ready_the_stream_with_the_smallest_emitted_for_weight_is_next(buffer):
    weights: dict[str | int, float] = {0: 3, 1: 1, 2: 7, 3: 2}
    policy = FairnessPolicy(weights=weights, max_buffer_per_flow=buffer)

    received = await collect_scoped(fair_merge([endless(place) for place in weights], policy), 500)

    emitted = dict.fromkeys(weights, 0)
    for place in received:
        assert place == min(weights, key=lambda each: (emitted[each] / weights[each], each))
        emitted[place] += 1


async def test_streams_can_be_named():
    policy = FairnessPolicy(weights={"gold": 2})
    streams = {"trial": endless("t"), "gold": endless("g")}

    assert Counter(await collect_scoped(fair_merge(streams, policy), 300)) == {"g": 200, "t": 100}


async def test_an_unknown_flow_in_the_policy_changes_nothing():
    policy = FairnessPolicy(weights={"nobody": 5, 9: 3}, default_weight=2)

    assert await collect_scoped(fair_merge([Source("ab"), Source("xy")], policy)) == list("axby")


async def test_items_pass_through_unchanged():
    items: list[Any] = [None, ValueError("as a value"), ("err", 1), StopAsyncIteration()]

    received = await collect_scoped(fair_merge([Source(items)]))

    assert all(got is sent for got, sent in zip(received, items, strict=True))


async def test_a_stalled_stream_does_not_delay_the_others():
    stalled, quick = Source("s", delay=3_600.0), Source(range(100), delay=0.001)

    async with fair_merge([stalled, quick])() as items:
        received = [await anext(items) for _ in range(100)]

    assert received == list(range(100))
    assert anyio.current_time() < 0.11


def refilled_in_turn(streams: list[Callable[[], AsyncIterator[Any]]], buffer: int) -> Callable[[], AsyncIterator[Any]]:
    """Merge as the seed does: one loop selects a stream, and refills it before it selects the next."""

    async def run() -> AsyncIterator[Any]:
        running = [stream() for stream in streams]
        buffers: list[deque[Any]] = [deque() for _ in running]
        live = set(range(len(running)))

        async def refill(place: int, count: int) -> None:
            while place in live and len(buffers[place]) < count:
                try:
                    buffers[place].append(await anext(running[place]))
                except StopAsyncIteration:
                    live.discard(place)

        for place in range(len(running)):
            await refill(place, 1)
        emitted = [0] * len(running)
        while live:
            place = min((each for each in live if buffers[each]), key=lambda each: (emitted[each], each))
            yield buffers[place].popleft()
            emitted[place] += 1
            await refill(place, buffer)

    return run


async def test_a_sequential_refill_delays_all_streams_and_loses_the_last_items():
    def slow() -> Source:
        return Source("s" * 4, delay=60.0)

    def quick() -> Source:
        return Source(range(8))

    waits: list[float] = []
    received: list[Any] = []
    async for item in refilled_in_turn([slow(), quick()], 4)():
        received.append(item)
        waits.append(anyio.current_time())
    assert waits[0] == 60.0
    assert waits[1] == 240.0
    assert len(received) < 12

    started = anyio.current_time()
    received = []
    async with fair_merge([slow(), quick()])() as items:
        async for item in items:
            received.append(item)
            if len(received) == 8:
                assert anyio.current_time() == started
    assert len(received) == 12


async def test_an_idle_stream_earns_no_credit():
    may_start = anyio.Event()

    async def late() -> AsyncIterator[str]:
        await may_start.wait()
        while True:
            yield "late"

    async with fair_merge([endless("busy"), late])() as items:
        assert await gather(items, 1_000) == ["busy"] * 1_000
        may_start.set()
        received = Counter(await gather(items, 200))

    assert abs(received["late"] - 100) <= 2


async def test_the_buffered_items_of_an_ended_stream_are_delivered():
    short, long = Source("abc"), Source(range(9))

    assert await collect_scoped(fair_merge([short, long], FairnessPolicy({1: 5}))) == [
        "a", 0, 1, 2, 3, 4, "b", 5, 6, 7, 8, "c",
    ]  # fmt: skip
    assert (short.closed, long.closed) == (1, 1)


async def test_a_stream_that_raises_does_not_end_the_others():
    broken, sound = Source("ab", error=LookupError("gone")), Source(range(5))
    received: list[Any] = []

    with pytest.raises(ExceptionGroup, match="1 of 2 merged streams failed") as raised:
        await collect_scoped(fair_merge({"broken": broken, "sound": sound}), into=received)

    assert received == ["a", 0, "b", 1, 2, 3, 4]
    (error,) = raised.value.exceptions
    assert isinstance(error, LookupError)
    assert error.__notes__ == ["raised by stream 'broken' of a fair_merge"]
    assert (broken.closed, sound.closed) == (1, 1)


async def test_all_failures_are_raised_once():
    async with fair_merge([Source([], error=KeyError(1)), Source([], error=ValueError(2))])() as items:
        with pytest.raises(ExceptionGroup, match="2 of 2"):
            await anext(items)
        with pytest.raises(StopAsyncIteration):
            await anext(items)


@pytest.mark.parametrize("bad", [lambda: 5, lambda: None, lambda: iter([1]), lambda: 1 / 0])
async def test_a_description_that_starts_no_stream_is_a_failure_of_that_stream(bad):
    received: list[Any] = []
    with pytest.raises(ExceptionGroup) as raised:
        await collect_scoped(fair_merge([bad, Source("ab")]), into=received)

    assert received == ["a", "b"]
    assert isinstance(raised.value.exceptions[0], TypeError | ZeroDivisionError)


async def test_streams_that_end_at_once_end_the_merge_at_once():
    assert await collect_scoped(fair_merge([Source([]), Source([])])) == []
    assert await collect_scoped(fair_merge([])) == []
    assert anyio.current_time() == 0.0


async def test_no_more_items_are_buffered_than_the_buffers_allow():
    sources = [Source(range(1_000)) for _ in range(5)]

    async with fair_merge(sources, FairnessPolicy(max_buffer_per_flow=3))() as items:
        for taken in range(200):
            assert sum(source.given for source in sources) <= taken + 5 * 3
            await anext(items)


async def test_leaving_early_closes_every_source():
    sources = [Source(range(100)), Source("s", delay=3_600.0), Source(range(100), delay=0.5)]

    async with fair_merge(sources)() as items:
        await anext(items)

    assert [source.closed for source in sources] == [1, 1, 1]
    assert anyio.current_time() < 1.0


async def test_cancellation_closes_every_source_in_any_state():
    sources = [
        Source(range(100)),  # waits for space in the buffer
        Source("s", delay=3_600.0),  # waits for its next item
        Source("x"),  # has ended
    ]
    with anyio.move_on_after(5.0) as scope:
        await collect_scoped(fair_merge([*sources, fair_merge([sources[1]])], FairnessPolicy(max_buffer_per_flow=200)))

    assert scope.cancelled_caught
    assert [source.closed for source in sources] == [1, 2, 1]
    assert anyio.current_time() == 5.0


async def test_a_source_that_waits_for_buffer_space_may_await_while_it_closes():
    closed = []

    async def tidy() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            await anyio.sleep(2.0)
            closed.append(anyio.current_time())

    with anyio.move_on_after(1.0):
        async with fair_merge([tidy])() as items:
            await anext(items)
            await anyio.sleep_forever()

    assert closed == [3.0]


async def test_a_source_that_does_not_close_is_abandoned_after_five_seconds():
    async def clinging() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            await anyio.sleep(3_600.0)

    async with fair_merge([clinging])() as items:
        await anext(items)

    assert anyio.current_time() == 5.0


@pytest.mark.parametrize(
    "mine", [KeyError("mine"), SystemExit(3), KeyboardInterrupt(), ExceptionGroup("", [OSError()])]
)
async def test_an_exception_of_the_consumer_is_raised_unchanged(mine):
    source = Source(range(100))

    async def consume() -> None:
        async with fair_merge([source])() as items:
            await anext(items)
            raise mine

    with pytest.raises(type(mine)) as raised:
        await consume()
    assert raised.value is mine
    assert source.closed == 1


async def test_a_generator_that_merges_can_be_closed_without_errors():
    source = Source(range(100))

    async def merged() -> AsyncGenerator[int]:
        async with fair_merge([source])() as items:
            async for item in items:
                yield item

    generator = merged()
    assert await anext(generator) == 0
    await generator.aclose()
    assert source.closed == 1


async def test_iterating_after_the_block_is_an_error():
    async with fair_merge([Source("abc")])() as items:
        await anext(items)

    with pytest.raises(anyio.ClosedResourceError):
        await anext(items)


async def test_several_consumers_share_one_merge():
    received: list[int] = []

    async def consume(items: AsyncIterator[int]) -> None:
        received.extend(await gather(items))

    streams = [Source(range(50), delay=0.01), Source(range(50, 100))]
    async with fair_merge(streams)() as items, anyio.create_task_group() as consumers:
        for _ in range(4):
            consumers.start_soon(consume, items)

    assert sorted(received) == list(range(100))


async def test_a_description_can_be_run_again_and_starts_nothing_before_it_runs():
    sources = [Source("ab"), Source("xy")]
    merged = fair_merge(sources)
    assert [source.started for source in sources] == [0, 0]

    assert await collect_scoped(merged) == await collect_scoped(merged) == list("axby")
    assert [source.started for source in sources] == [2, 2]


async def test_merges_can_be_nested():
    inner = fair_merge([Source("ab"), Source("cd")])

    received = await collect_scoped(fair_merge([inner, Source("xyz")]))

    assert [item for item in received if item in "abcd"] == list("acbd")
    assert [item for item in received if item in "xyz"] == list("xyz")


async def test_a_scoped_source_is_closed_by_its_scope():
    source = Source(range(100))

    async with fair_merge([lambda: scoped(source)])() as items:
        await anext(items)

    assert source.closed == 1


@pytest.mark.parametrize("bad", [None, 5, "ab"])
def test_an_argument_that_is_not_a_description_is_rejected_at_once(bad):
    with pytest.raises(TypeError, match="stream 1 is of type"):
        fair_merge([Source([]), bad])


async def test_a_rate_limit_for_each_stream_combines_with_fairness_for_all():
    slow = rate_limited(endless("slow"), RateLimitPolicy(tokens_per_second=1.0, burst_tokens=1))
    fast = rate_limited(endless("fast"), RateLimitPolicy(tokens_per_second=4.0, burst_tokens=1))

    received = []
    async with fair_merge([slow, fast])() as items:
        async for item in items:
            if anyio.current_time() > 10.0:
                break
            received.append(item)

    assert Counter(received) == {"slow": 11, "fast": 41}


async def test_fairness_applies_before_the_rate_limit():
    merged = fair_merge([endless("a"), endless("b")], FairnessPolicy({0: 3}))

    received = await collect_scoped(rate_limited(merged, RateLimitPolicy(tokens_per_second=100.0, burst_tokens=1)), 401)

    assert anyio.current_time() == pytest.approx(4.0)
    assert Counter(received) == {"a": 301, "b": 100}


async def test_a_plain_stream_needs_no_scope():
    assert await collect(rate_limited(Source("ab"), RateLimitPolicy())) == ["a", "b"]


async def test_a_plain_loop_as_the_specification_writes_it_reads_every_item_and_closes_every_source():
    sources = [Source("abc"), Source("xyz")]
    assert [item async for item in fair_merge(sources)()] == list("axbycz")
    assert [source.closed for source in sources] == [1, 1]


async def test_a_rate_limited_merge_is_a_plain_loop_too():
    fair = fair_merge([endless("A"), endless("B")], FairnessPolicy(weights={0: 1, 1: 4}))
    received = []
    async for item in rate_limited(fair, RateLimitPolicy(tokens_per_second=100.0, burst_tokens=10))():
        received.append(item)
        if len(received) == 100:
            break
    assert received.count("B") == 80
    assert anyio.current_time() == pytest.approx(0.9, abs=0.001)


async def test_a_loop_left_early_inside_aclosing_has_closed_every_source():
    sources = [Source(range(100)), Source(range(100))]
    async with aclosing(fair_merge(sources)()) as items:
        async for item in items:
            if item == 3:
                break
    assert [source.closed for source in sources] == [1, 1]
    await items.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(items)


async def test_an_abandoned_loop_closes_every_source_soon():
    sources = [Source(range(100)), Source(range(100))]
    async for item in fair_merge(sources)():
        if item == 3:
            break
    gc.collect()
    with anyio.fail_after(1):
        while [source.closed for source in sources] != [1, 1]:  # noqa: ASYNC110 - in virtual time
            await anyio.sleep(0.001)


async def test_a_run_that_was_never_started_and_is_garbage_has_no_effect():
    source = Source("abc")
    fair_merge([source])()
    gc.collect()
    await anyio.lowlevel.checkpoint()
    assert source.started == 0


async def test_an_iteration_may_begin_inside_a_scope_that_ends_before_it():
    """As a generator with a task group, it would end the wrong scope."""
    items = fair_merge([Source("abc", delay=1.0)])()
    with anyio.fail_after(1.5):
        assert await anext(items) == "a"
    with anyio.move_on_after(0.5) as early:
        await anext(items)
    assert early.cancelled_caught
    assert [item async for item in items] == ["b", "c"]


async def test_a_plain_loop_raises_the_failures_of_its_streams():
    sources = [Source("ab", error=ValueError("mine")), Source("xy")]
    items = fair_merge(sources)()
    assert [await anext(items) for _ in range(4)] == list("axby")
    with pytest.raises(ExceptionGroup) as raised:
        await anext(items)
    assert [str(error) for error in raised.value.exceptions] == ["mine"]


async def test_a_plain_loop_raises_what_prevents_its_start():
    @asynccontextmanager
    async def broken() -> AsyncGenerator[AsyncIterator[str], None]:
        message = "no connection"
        raise ConnectionError(message)
        yield

    with pytest.raises(ConnectionError, match="no connection"):
        await anext(rate_limited(broken, RateLimitPolicy(tokens_per_second=1.0))())  # type: ignore[call-overload]
