"""The handle of one user record, awaitable on asyncio and trio.

Nothing is made for a delivery nobody awaits. Whoever awaits one early waits for
the Kinesis record it travels in, and looks again when that is final or when the
user records in it part company.
"""

import asyncio
import contextlib
import threading
from asyncio import _get_running_loop
from collections.abc import Generator
from typing import Any, Final

import anyio

from kpl_core.errors import ResultPending
from kpl_core.records.outcome import Outcome, ResultHandle, Waiter
from kpl_core.records.record_result import RecordResult

__all__ = ["Delivery", "wait_with"]

# Two threads that both found no list of waiters would each make one, and one of the two would be forgotten.
_waiting: Final = threading.Lock()


# Compared and hashed by identity: `asyncio.gather` and `wait` keep what they are given in sets and dicts.
class Delivery(ResultHandle, gc=False, eq=False):
    """What `put` returns: `await` it, any number of times, for the `RecordResult`."""

    def __repr__(self) -> str:
        result = self.peek()
        return "<Delivery pending>" if result is None else f"<Delivery {result!r}>"

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
            alarm = _alarm()
            waiters = wait_with(current, alarm)
            try:
                # Looked at once more, because the producer's loop may run in another thread: whether it is settled
                # now, and whether the user record has moved on, which wakes those who were there and nobody later.
                if self.follow() is current and not current.settled:
                    yield from alarm.wait().__await__()
            finally:
                if not alarm.is_set():
                    # Cancelled: the list is still the outcome's, and may outlive us by far.
                    waiters.remove(alarm)
        result = current.shared_result
        return current.result_of(self.index) if result is None else result


def wait_with(outcome: Outcome, alarm: Waiter) -> list[Waiter]:
    """Let `alarm` be set when something becomes of `outcome`; return the list that it is in until then."""
    with _waiting:
        waiters = outcome.waiters
        if waiters is None:
            waiters = outcome.waiters = []
        waiters.append(alarm)
    return waiters


class _FutureAlarm:
    """What wakes a task of asyncio, at a third of the price of an event."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        loop = self._future.get_loop()
        if _get_running_loop() is loop:
            self._wake()
        else:
            # Awaited in another loop than the producer's: only that loop may touch its future. It may be closed.
            with contextlib.suppress(RuntimeError):
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
