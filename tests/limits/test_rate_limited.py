"""rate_limited in virtual time: when each item is emitted, what it costs, and edge cases."""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from kpl_core.limits import fair_merge, rate_limited
from kpl_core.options.policy import RateLimitPolicy
from tests.limits.sources import Source, collect, collect_scoped, endless, scoped
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


def running(stream: Any) -> AsyncGenerator[Any, None]:
    generator: AsyncGenerator[Any, None] = stream()
    return generator


async def instants(stream: Any) -> list[float]:
    return [anyio.current_time() async for _ in stream()]


async def test_the_burst_passes_at_once_and_the_rest_at_the_rate():
    stream = rate_limited(Source(range(6)), RateLimitPolicy(tokens_per_second=8.0, burst_tokens=3))

    assert await instants(stream) == [0.0, 0.0, 0.0, 0.125, 0.25, 0.375]


async def test_a_slow_stream_is_not_slowed_down_further():
    stream = rate_limited(Source(range(3), delay=1.0), RateLimitPolicy(tokens_per_second=1.0, burst_tokens=1))

    assert await instants(stream) == [1.0, 2.0, 3.0]


async def test_tokens_accumulate_up_to_the_burst_while_the_stream_is_idle():
    async def bursts():
        for pause in (0.0, 100.0):
            await anyio.sleep(pause)
            for number in range(4):
                yield number

    stream = rate_limited(bursts, RateLimitPolicy(tokens_per_second=1.0, burst_tokens=2))

    assert await instants(stream) == [0.0, 0.0, 1.0, 2.0, 102.0, 102.0, 103.0, 104.0]


async def test_items_pass_through_unchanged():
    items: list[Any] = [None, ValueError("as a value"), ("ok", 1), [], object()]

    received = await collect(rate_limited(Source(items), RateLimitPolicy()))

    assert all(got is sent for got, sent in zip(received, items, strict=True))


async def test_each_item_can_have_its_own_cost():
    stream = rate_limited(Source(["a", "bb", "cccc"]), RateLimitPolicy(tokens_per_second=1.0, burst_tokens=2), cost=len)

    # The third costs more than the capacity, so it waits for a full bucket.
    assert await instants(stream) == [0.0, 1.0, 3.0]


async def test_an_item_of_cost_zero_does_not_wait():
    stream = rate_limited(endless("x"), RateLimitPolicy(1e-3, 1), cost=lambda _: 0)

    assert len(await collect(stream, 1_000)) == 1_000
    assert anyio.current_time() == 0.0


async def test_it_sleeps_exactly_the_minimum():
    naps: list[float] = []
    now = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        naps.append(seconds)
        now += seconds

    stream = rate_limited(
        Source(range(4)), RateLimitPolicy(tokens_per_second=4.0, burst_tokens=2), clock=lambda: now, sleep=sleep
    )

    assert await collect(stream) == [0, 1, 2, 3]
    assert naps == [0.25, 0.25]
    assert anyio.current_time() == 0.0


async def test_a_rate_that_floats_cannot_represent_needs_one_sleep_per_item():
    naps = 0
    now = 123_456.789

    async def sleep(seconds: float) -> None:
        nonlocal now, naps
        naps += 1
        now += seconds

    stream = rate_limited(
        Source(range(2_000)), RateLimitPolicy(tokens_per_second=1.9, burst_tokens=1), clock=lambda: now, sleep=sleep
    )

    await collect(stream)
    assert naps == 1_999


async def test_a_sleep_that_ends_early_is_repeated():
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds / 2

    times: list[float] = []
    stream = rate_limited(endless("x"), RateLimitPolicy(1.0, 1), clock=lambda: now, sleep=sleep)
    async with aclosing(running(stream)) as items:
        async for _ in items:
            times.append(now)
            if len(times) == 5:
                break

    assert times == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])


async def test_every_run_of_a_description_starts_with_a_full_bucket():
    source = Source(range(3))
    stream = rate_limited(source, RateLimitPolicy(tokens_per_second=1.0, burst_tokens=2))

    assert await instants(stream) == [0.0, 0.0, 1.0]
    assert await instants(stream) == [1.0, 1.0, 2.0]
    assert source.started == 2


async def test_building_a_description_starts_nothing():
    source = Source(range(3))

    rate_limited(source, RateLimitPolicy())

    assert source.started == 0


async def test_the_rate_limit_of_a_scoped_stream_is_scoped():
    merged = fair_merge([Source("ab"), Source("cd")])

    async with rate_limited(merged, RateLimitPolicy(tokens_per_second=1.0, burst_tokens=1))() as items:
        received = [(item, anyio.current_time()) async for item in items]

    assert received == [("a", 0.0), ("c", 1.0), ("b", 2.0), ("d", 3.0)]


async def test_the_source_is_closed_when_the_consumer_leaves():
    source = Source(range(10))
    async with aclosing(running(rate_limited(source, RateLimitPolicy()))) as items:
        async for _ in items:
            break

    assert source.closed == 1


@pytest.mark.parametrize("is_scoped", [False, True])
async def test_the_source_is_closed_when_the_wait_is_cancelled(is_scoped):
    source = Source(range(10))
    policy = RateLimitPolicy(tokens_per_second=0.001, burst_tokens=1)
    with anyio.move_on_after(5.0):
        if is_scoped:
            await collect_scoped(rate_limited(lambda: scoped(source), policy))
        else:
            async with aclosing(running(rate_limited(source, policy))) as items:
                async for _ in items:
                    pass

    assert anyio.current_time() == 5.0
    assert source.closed == 1


async def test_an_error_of_the_source_passes_through():
    source = Source([1, 2], error=LookupError("gone"))
    received: list[Any] = []
    with pytest.raises(LookupError, match="gone"):
        await collect(rate_limited(source, RateLimitPolicy()), into=received)

    assert received == [1, 2]
    assert source.closed == 1


async def test_a_source_that_ends_at_once_ends_at_once():
    assert await collect(rate_limited(Source([]), RateLimitPolicy())) == []


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf])
async def test_an_invalid_cost_ends_and_closes_the_stream(cost):
    source = Source([1, 2])

    with pytest.raises(ValueError, match="cost is"):
        await collect(rate_limited(source, RateLimitPolicy(), cost=lambda _: cost))
    assert source.closed == 1


async def test_a_running_generator_is_not_a_description():
    started = Source([])()

    with pytest.raises(TypeError, match="stream is of type async_generator; give the callable that starts the stream"):
        rate_limited(started, RateLimitPolicy())  # type: ignore[type-var]
    await started.aclose()
