"""From the spool's thread to an event loop: one wake-up for all futures of a commit.

`call_soon_threadsafe` writes to a socket, and a commit may complete hundreds of futures. They
go into one deque; the loop is woken only if it has not been already.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

__all__ = ["LoopMailbox"]

_Result = TypeVar("_Result")


class LoopMailbox:
    """Belongs to the event loop (asyncio or trio) it was made in."""

    def __init__(self) -> None:
        self._wake = _waker()
        # The loop's clock, for what is called here: outside any task anyio does not know which loop it is in.
        self.clock = _clock()
        self._ready: deque[Callable[[], object]] = deque()
        self._woken = False

    async def wait_for(self, future: "Future[_Result]") -> _Result:
        """Wait for a future that another thread completes; return its result or raise its exception.

        Cancelling stops the wait, not what the future stands for.
        """
        if not future.done():
            completed = anyio.Event()
            future.add_done_callback(lambda _: self.post(completed.set))
            await completed.wait()
        else:
            await anyio.lowlevel.checkpoint()
        return future.result()

    def post(self, call: Callable[[], object]) -> None:
        """Let the loop call `call` soon; from any thread."""
        self._ready.append(call)
        # Appended first, looked at second: if the loop is on its way already, it will see the call.
        if not self._woken:
            self._call_loop()

    def _call_loop(self) -> None:
        self._woken = True
        try:
            self._wake(self._drain)
        except RuntimeError:
            # The loop is closed (trio's RunFinishedError is one too): nobody waits any more.
            self._ready.clear()

    def _drain(self) -> None:
        self._woken = False
        try:
            while self._ready:
                self._ready.popleft()()
        finally:
            # One call that raises must not keep the others waiting for the next post.
            if self._ready and not self._woken:
                self._call_loop()


def _waker() -> Callable[[Callable[[], None]], Any]:
    """Return the running loop's function that calls something soon and may be called from any thread."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        call_soon: Callable[[Callable[[], None]], Any] = trio.lowlevel.current_trio_token().run_sync_soon
        return call_soon
    return asyncio.get_running_loop().call_soon_threadsafe


def _clock() -> Callable[[], float]:
    """Return the running loop's clock, the one that sleeps use."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        current_time: Callable[[], float] = trio.lowlevel.current_clock().current_time
        return current_time
    return asyncio.get_running_loop().time
