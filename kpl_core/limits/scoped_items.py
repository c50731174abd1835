"""The running form of a stream with tasks of its own: an async context manager, and an async iterator too.

A task group must not stay open across the `yield` of a generator, because the consumer may leave the loop at any item
and in any task. So a plain `async for` has a task beside it that keeps the context open:

    async with stream() as items:                       the context is open during the block
        async for item in items: ...

    async with aclosing(stream()) as items:             a task keeps it open until `aclose`
        async for item in items: ...

    async for item in stream(): ...                     the same, until the loop ends or the iterator is collected
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, TypeVar

import anyio

from kpl_core.event_loop import caller_from_any_thread, start_detached

T = TypeVar("T")

_Context = Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]]


class ScopedItems(AbstractAsyncContextManager[AsyncIterator[T]], AsyncIterator[T]):
    """One run of a stream. `open_context` is called once, at the start of either form.

    Leave a loop without a block early only inside `aclosing`. Otherwise the streams are closed when the iterator is
    garbage, which is at once in CPython, but not awaited.
    """

    def __init__(self, open_context: _Context[T]) -> None:
        self._open_context = open_context
        self._context: AbstractAsyncContextManager[AsyncIterator[T]] | None = None
        self._keeper: _Keeper[T] | None = None

    async def __aenter__(self) -> AsyncIterator[T]:
        """Start the stream, and return its items."""
        self._context = self._open_context()
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Close the stream."""
        assert self._context is not None  # noqa: S101 - entered before
        return await self._context.__aexit__(kind, error, traceback)

    async def __anext__(self) -> T:
        """Return the next item. The first call starts the stream."""
        if self._keeper is None:
            self._keeper = _Keeper(self._open_context)
        try:
            return await anext(await self._keeper.items())
        except Exception:
            # Its end, or its failure.
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the stream, and wait until it is closed; later items are not delivered. Idempotent."""
        if self._keeper is not None:
            await self._keeper.close()

    def __del__(self) -> None:
        if self._keeper is not None:
            self._keeper.abandon()


class _Keeper(Generic[T]):
    """The task that keeps the context of one iteration open. It has no reference to the iterator."""

    def __init__(self, open_context: _Context[T]) -> None:
        self._open_context = open_context
        self._items: AsyncIterator[T] | None = None
        self._failure: BaseException | None = None
        self._started, self._left, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._call_soon = caller_from_any_thread()
        start_detached(self._keep)

    async def items(self) -> AsyncIterator[T]:
        """Return the items, once the context is open."""
        await self._started.wait()
        if self._items is None:
            if self._failure is not None:
                raise self._failure
            raise StopAsyncIteration
        return self._items

    async def close(self) -> None:
        """Close the context, and wait until it is closed."""
        self._left.set()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def abandon(self) -> None:
        """Close the context soon. Any thread may call this."""
        if not self._left.is_set():
            self._call_soon(self._left.set)

    async def _keep(self) -> None:
        try:
            async with self._open_context() as self._items:
                self._started.set()
                await self._left.wait()
        except Exception as error:  # noqa: BLE001 - raised where the items are awaited
            self._failure = error
        finally:
            self._items = None
            self._started.set()
            self._ended.set()
