"""Bounds for a worker's calls of its store: seconds for each, and how many at a time."""

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

import anyio

from kpl_core.coordination.store import PARALLEL_CALLS, CoordinationStore, Listing, Reading, StoreFailed, Written

Call = Callable[[], Awaitable[object]]
_Answer = TypeVar("_Answer")


async def one_after_another(calls: Iterable[Call]) -> None:
    """Await the calls in order; for tests that advance each call by hand."""
    for call in calls:
        _ = await call()


async def in_parallel(calls: Iterable[Call]) -> None:
    """Await the calls, at most PARALLEL_CALLS at a time; raise the first exception."""
    waiting: Iterator[Call] = iter(calls)

    async def some() -> None:
        for call in waiting:
            _ = await call()

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(PARALLEL_CALLS):
                tasks.start_soon(some)
    except* Exception as group:  # noqa: BLE001 - the first exception is raised again
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


class BoundedStore:
    """A store whose calls each fail after `seconds`. A listing has many calls, so its caller bounds it."""

    def __init__(self, store: CoordinationStore, seconds: float = math.inf) -> None:
        self._store = store
        self._seconds = seconds

    async def _bounded(self, call: Awaitable[_Answer]) -> _Answer:
        try:
            with anyio.fail_after(self._seconds):
                return await call
        except TimeoutError:
            message = f"no answer within {self._seconds:g} s; check whether the store is overloaded"
            raise StoreFailed(message, reason="slow") from None

    async def read(self, name: str) -> Reading:
        """Return one object."""
        return await self._bounded(self._store.read(name))

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version."""
        return await self._bounded(self._store.write(name, body, expected=expected))

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`, however long that takes."""
        return await self._store.read_all(prefix)

    async def delete(self, name: str) -> None:
        """Remove an object."""
        await self._bounded(self._store.delete(name))

    async def aclose(self) -> None:
        """Close the store."""
        await self._store.aclose()
