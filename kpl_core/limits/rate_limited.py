"""A stream that flows no faster than its policy allows, and not a moment slower.

Each item costs one token of a token bucket (seed: "rate limiting as pure data"; the bucket is
the pipeline's own, token_bucket.py). Where we differ from a bucket that counts: the wait is
computed once, exactly, and asked again at its end the bucket admits.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar, overload

import anyio

from kpl_core.limits.description import AnyStream, ScopedStream, Stream, opened, require_description
from kpl_core.options.policy import RateLimitPolicy
from kpl_core.pipeline.token_bucket import TokenBucket

__all__ = ["rate_limited"]

T = TypeVar("T")


@overload
def rate_limited(
    stream: Stream[T],
    policy: RateLimitPolicy,
    *,
    clock: Callable[[], float] = ...,
    sleep: Callable[[float], Awaitable[object]] = ...,
    cost: Callable[[T], float] = ...,
) -> Stream[T]: ...
@overload
def rate_limited(
    stream: ScopedStream[T],
    policy: RateLimitPolicy,
    *,
    clock: Callable[[], float] = ...,
    sleep: Callable[[float], Awaitable[object]] = ...,
    cost: Callable[[T], float] = ...,
) -> ScopedStream[T]: ...
def rate_limited(
    stream: AnyStream[T],
    policy: RateLimitPolicy,
    *,
    clock: Callable[[], float] = anyio.current_time,
    sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    cost: Callable[[T], float] = lambda _item: 1,
) -> AnyStream[T]:
    """Describe `stream`, slowed down to `policy`; its items pass through untouched.

    In any `t` seconds at most `tokens_per_second * t + burst_tokens` tokens' worth of items come
    out; the first `burst_tokens` at once. An item that is short of tokens waits exactly until they
    are there. One that costs more than the burst waits for a full bucket and leaves it in debt.
    Every run of the description has a full bucket of its own.

    Args:
        stream: a description of either form; the result has the same.
        policy: the rate and the burst.
        clock: returns seconds and never goes back; the event loop's by default.
        sleep: waits for a number of seconds of that clock.
        cost: the tokens an item costs: 0 or more, finite. One by default.

    Raises:
        TypeError: `stream` is no description.
        ValueError: when an item's cost is negative or not finite; the stream ends there, closed.
    """
    require_description("stream", stream)

    limit = partial(_limit, policy=policy, clock=clock, sleep=sleep, cost=cost)

    @asynccontextmanager
    async def scoped(running: AbstractAsyncContextManager[AsyncIterator[T]]) -> AsyncIterator[AsyncIterator[T]]:
        async with running as items, aclosing(limit(items)) as limited:
            yield limited

    def description() -> AsyncIterator[T] | AbstractAsyncContextManager[AsyncIterator[T]]:
        running = stream()
        return scoped(running) if isinstance(running, AbstractAsyncContextManager) else limit(running)

    return description


async def _limit(
    running: AsyncIterator[T],
    *,
    policy: RateLimitPolicy,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]],
    cost: Callable[[T], float],
) -> AsyncGenerator[T]:
    bucket = TokenBucket([(policy.tokens_per_second, policy.burst_tokens)], clock=clock)
    async with opened(running) as items:
        async for item in items:
            costs = [cost(item)]
            now = clock()
            while not bucket.try_take(costs, now):
                ready_at = bucket.ready_at(costs, now)
                await sleep(ready_at - now)
                # The difference was rounded, so the sum may miss `ready_at` by what a float cannot tell apart.
                now = clock()
                if now < ready_at <= now + 2 * math.ulp(ready_at):
                    now = ready_at
            yield item
