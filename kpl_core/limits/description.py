"""A stream is a description: a callable without arguments that starts it.

Nothing runs while a description is built or combined; every call of it starts anew. What it
returns is the running form:

    Stream        an async iterator, such as a call of an async generator function
    ScopedStream  an async context manager that gives one, for a stream with tasks of its own:
                  a task group must not stay open across the `yield` of a generator

    async for item in stream(): ...
    async with scoped_stream() as items:
        async for item in items: ...

Combinators take both, and return a scoped stream only if they start tasks or were given one.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeAlias, TypeVar

import anyio

__all__ = ["AnyStream", "ScopedStream", "Stream", "opened", "require_description"]

T = TypeVar("T")

Stream: TypeAlias = Callable[[], AsyncIterator[T]]
ScopedStream: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]]
AnyStream: TypeAlias = Callable[[], AsyncIterator[T] | AbstractAsyncContextManager[AsyncIterator[T]]]

# How long a source may take to close while everything around it is being cancelled.
_CLOSE_SECONDS: Final = 5.0


def require_description(name: str, stream: object) -> None:
    """Check that a stream is a description.

    Raises:
        TypeError: it cannot be called; the usual slip is a running generator in place of its function.
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
    """Give the items of a running stream of either form, and close it on the way out, cancelled or not."""
    if isinstance(running, AbstractAsyncContextManager):
        async with running as items:
            yield items
        return
    try:
        yield running
    finally:
        close = getattr(running, "aclose", None)
        if close is not None:
            # A cancelled task could not await anything; a source that never returns must not hold it for ever.
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                await close()
