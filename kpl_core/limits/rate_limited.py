"""Limit the rate of an async iterator, described as a stream.

A stream is a description: a callable without arguments that starts it. Nothing runs while descriptions are built or
combined, and every call starts a new run. A call returns one of two running forms:

    Stream        an async iterator, such as a call of an async generator function
    ScopedStream  an async context manager that gives one, for a stream with tasks of its own;
                  those of this package are iterators too (`scoped_items.py`)

    async for item in stream(): ...
    async with scoped_stream() as items:
        async for item in items: ...

Combinators accept both, and return a scoped stream only if they start tasks or were given one.

Each item costs one token of a token bucket (seed 004, "rate limiting as pure data"), the pipeline's own
(`token_bucket.py`). We differ from a counting bucket: the wait is computed once and exactly, and the bucket admits
the item when the wait ends.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

import anyio

from kpl_core.limits.scoped_items import ScopedItems
from kpl_core.options.policy import RateLimitPolicy
from kpl_core.pipeline.token_bucket import TokenBucket

T = TypeVar("T")

Stream: TypeAlias = Callable[[], AsyncIterator[T]]
ScopedStream: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]]
AnyStream: TypeAlias = Callable[[], AsyncIterator[T] | AbstractAsyncContextManager[AsyncIterator[T]]]
AnyDescription = TypeVar("AnyDescription", bound=AnyStream[Any])

# How long a source may take to close while its task is cancelled.
_CLOSE_SECONDS: Final = 5.0


def require_description(name: str, stream: object) -> None:
    """Check that a stream is a description.

    Raises:
        TypeError: it is not callable. The usual mistake is a running generator instead of its function.
    """
    if not callable(stream):
        message = (
            f"{name} is of type {type(stream).__name__}; give the callable that starts the stream, not what it returns"
        )
        raise TypeError(message)


@asynccontextmanager
async def opened(
    running: AsyncIterator[T] | AbstractAsyncContextManager[AsyncIterator[T]],
) -> AsyncIterator[AsyncIterator[T]]:
    """Yield the items of a running stream of either form, and close it at the end, also when cancelled."""
    if isinstance(running, AbstractAsyncContextManager):
        async with running as items:
            yield items
        return
    try:
        yield running
    finally:
        close = getattr(running, "aclose", None)
        if close is not None:
            # A cancelled task cannot await without a shield; the timeout bounds a source that does not return.
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                await close()


def rate_limited(
    stream: AnyDescription,
    policy: RateLimitPolicy,
    *,
    clock: Callable[[], float] = anyio.current_time,
    sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    cost: Callable[[Any], float] = lambda _item: 1,
) -> AnyDescription:
    """Return a description of `stream` limited to `policy`. The items pass through unchanged.

    In any `t` seconds, items worth at most `tokens_per_second * t + burst_tokens` tokens come out, the first
    `burst_tokens` at once. An item without tokens waits exactly until they are available. An item that costs more
    than the burst waits for a full bucket and leaves it in debt. Every run has its own bucket, which starts full.

    Args:
        stream: a description of either form; the result has the same form.
        policy: the rate and the burst.
        clock: returns seconds and never goes back; the event loop's by default.
        sleep: waits for a number of seconds of that clock.
        cost: returns the tokens that an item costs: finite, 0 or more. One by default.

    Raises:
        TypeError: `stream` is not a description.
        ValueError: an item's cost is negative or not finite. The stream is closed and ends there.
    """
    require_description("stream", stream)

    limit = partial(_limit, policy=policy, clock=clock, sleep=sleep, cost=cost)

    @asynccontextmanager
    async def scoped(running: AbstractAsyncContextManager[AsyncIterator[T]]) -> AsyncIterator[AsyncIterator[T]]:
        async with running as items, aclosing(limit(items)) as limited:
            yield limited

    def description() -> AsyncIterator[Any] | AbstractAsyncContextManager[AsyncIterator[Any]]:
        running = stream()
        if isinstance(running, AbstractAsyncContextManager):
            return ScopedItems(partial(scoped, running))
        return limit(running)

    return cast("AnyDescription", description)


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
                # `ready_at - now` was rounded, so the clock may show one rounding error less than `ready_at`.
                now = clock()
                if now < ready_at <= now + 2 * math.ulp(ready_at):
                    now = ready_at
            yield item
