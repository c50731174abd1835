"""Streams for tests: steady, stalled, raising, infinite. Each records whether it was closed."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

__all__ = ["Source", "collect", "collect_scoped", "endless", "gather", "scoped"]


class Source:
    """A stream of `items` with `delay` seconds before each. It counts how often it was started and closed."""

    def __init__(self, items: Iterable[Any], *, delay: float = 0.0, error: BaseException | None = None) -> None:
        self._items = items
        self._delay = delay
        self._error = error
        self.started = 0
        self.closed = 0
        self.given = 0

    def __call__(self) -> AsyncGenerator[Any, None]:
        return self._run()

    async def _run(self) -> AsyncGenerator[Any, None]:
        self.started += 1
        try:
            for item in self._items:
                if self._delay:
                    await anyio.sleep(self._delay)
                self.given += 1
                yield item
            if self._error is not None:
                raise self._error
        finally:
            # A real source closes a connection. That needs an await, which the source must shield itself
            # if the cancellation hits it while it is running.
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            self.closed += 1


def endless(item: Any) -> Callable[[], AsyncGenerator[Any, None]]:
    """Return a stream that is always ready."""

    async def run() -> AsyncGenerator[Any, None]:
        while True:
            yield item

    return run


async def collect(stream: Any, limit: int | None = None, into: list[Any] | None = None) -> list[Any]:
    """Return the items of a plain stream, at most `limit`, and close it."""
    async with aclosing(stream()) as items:
        return await gather(items, limit, into)


async def collect_scoped(stream: Any, limit: int | None = None, into: list[Any] | None = None) -> list[Any]:
    """Return the items of a scoped stream, at most `limit`."""
    async with stream() as items:
        return await gather(items, limit, into)


async def gather(items: AsyncIterator[Any], limit: int | None = None, into: list[Any] | None = None) -> list[Any]:
    """Return items of a running stream, at most `limit`."""
    gathered: list[Any] = [] if into is None else into
    async for item in items:
        gathered.append(item)
        if len(gathered) == limit:
            break
    return gathered


@asynccontextmanager
async def scoped(source: Source) -> AsyncIterator[AsyncIterator[Any]]:
    """Run a source in its own scope."""
    async with aclosing(source()) as items:
        yield items
