"""The handle of one user record, awaitable on asyncio and trio.

Nothing is made for a delivery nobody awaits. Whoever awaits one early waits for
the Kinesis record it travels in, and looks again when that is final or when the
user records in it part company.
"""

import asyncio
from asyncio import _get_running_loop
from collections.abc import Generator
from typing import Any

import anyio

from kpl_core import outcome
from kpl_core.errors import ResultPending
from kpl_core.record_result import RecordResult

__all__ = ["Delivery"]


class Delivery(outcome.Delivery, gc=False):
    """What `put` returns: `await` it, any number of times, for the `RecordResult`."""

    def result(self) -> RecordResult:
        """Return the result.

        Raises:
            ResultPending: it is not known yet.
        """
        result = self.peek()
        if result is None:
            message = "this user record has no result yet; await the delivery, or flush the producer first"
            raise ResultPending(message)
        return result

    def __await__(self) -> Generator[Any, Any, RecordResult]:
        """Wait for the result. A failed put is a value too, never an exception."""
        current = self.outcome
        while not current.settled or current.moved is not None:
            current = self.follow()
            if current.settled:
                break
            if current.waiters is None:
                current.waiters = []
            waiters = current.waiters
            alarm = _alarm()
            waiters.append(alarm)
            try:
                # Looked at once more: the producer's loop may run in another thread.
                if not current.settled:
                    yield from alarm.wait().__await__()
            finally:
                if not alarm.is_set():
                    # Cancelled: the list is still the outcome's, and may outlive us by far.
                    waiters.remove(alarm)
        shared = current.shared_result
        return current.result_of(self.index) if shared is None else shared


class _FutureAlarm:
    """What wakes a task of asyncio, at a third of the price of an event."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        loop = self._future.get_loop()
        if _get_running_loop() is loop:
            self._wake()
        elif not loop.is_closed():
            # Awaited in another loop than the producer's: only that loop may touch its future.
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Cancelled, but not yet gone: the task has not run since.
        if not self._future.done():
            self._future.set_result(None)

    def is_set(self) -> bool:
        return self._future.done() and not self._future.cancelled()

    def wait(self) -> asyncio.Future[None]:
        return self._future


def _alarm() -> "_FutureAlarm | anyio.Event":
    try:
        return _FutureAlarm(asyncio.get_running_loop())
    except RuntimeError:
        return anyio.Event()
