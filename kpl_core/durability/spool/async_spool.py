"""The spool for an event loop (asyncio or trio): the same calls, awaited. Makes no decisions.

`LoopMailbox` brings results from the writer thread to the loop with one wake-up for all futures of a commit:
`call_soon_threadsafe` writes to a socket, and one commit may complete hundreds of futures.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from kpl_core.durability.spool.claims import Claimed
from kpl_core.durability.spool.envelope import SpooledRecord
from kpl_core.durability.spool.spool import Spool, SpoolStatistics
from kpl_core.event_loop import running_clock, running_loop
from kpl_core.options.kinesis_limits import MIB

_Result = TypeVar("_Result")


class LoopMailbox:
    """Calls from any thread into the event loop (asyncio or trio) in which it was created."""

    def __init__(self) -> None:
        loop: Any = running_loop()
        is_asyncio = isinstance(loop, asyncio.AbstractEventLoop)
        self._wake: Callable[..., Any] = loop.call_soon_threadsafe if is_asyncio else loop.run_sync_soon
        # For posted calls: outside a task anyio does not know which loop is running.
        self.clock = running_clock()
        self._ready: deque[Callable[[], object]] = deque()
        self._woken = False

    async def wait_for(self, future: "Future[_Result]") -> _Result:
        """Wait for a future that another thread completes; return its result or raise its exception.

        Cancelling ends the wait, not the work behind the future.
        """
        if not future.done():
            completed = anyio.Event()
            future.add_done_callback(lambda _: self.post(completed.set))
            await completed.wait()
        else:
            await anyio.lowlevel.checkpoint()
        return future.result()

    def post(self, call: Callable[[], object]) -> None:
        """Let the loop run `call` soon. May be called from any thread."""
        self._ready.append(call)
        # Append first, check second: if the loop is already woken, it will find the call.
        if not self._woken:
            self._call_loop()

    def _call_loop(self) -> None:
        self._woken = True
        try:
            self._wake(self._drain)
        except RuntimeError:
            # The loop is closed (trio's RunFinishedError is a RuntimeError), so no task waits any more.
            self._ready.clear()

    def _drain(self) -> None:
        self._woken = False
        try:
            while self._ready:
                self._ready.popleft()()
        finally:
            # A call that raises must not delay the others until the next post.
            if self._ready and not self._woken:
                self._call_loop()


async def shielded(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run `work` to completion even if the caller is cancelled, then re-raise the cancellation. `work` must be bounded.

    A shielded scope stops the cancellations of anyio and trio. asyncio's own (`task.cancel()`, as used by
    `asyncio.timeout`, `wait_for` and Ctrl-C) ignore it, so on asyncio the work runs in its own task.
    """
    with anyio.CancelScope(shield=True):
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            await work()
            return
        task = asyncio.ensure_future(work())
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        await task
        if cancelled is not None:
            raise cancelled


class AsyncSpool:
    """A spool used from one event loop (asyncio or trio); `async with AsyncSpool(Spool(options)) as spool:`."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._mailbox: LoopMailbox | None = None

    async def __aenter__(self) -> Self:
        """Open the spool in a worker thread, because it reads the whole file."""
        self._mailbox = LoopMailbox()
        try:
            await shielded(partial(anyio.to_thread.run_sync, self.spool.open))
        except BaseException:
            # Cancelled while opening: close the file, or the next attempt would find it locked.
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Commit what was submitted and close, even if cancelled."""
        await self._close()

    async def _close(self) -> None:
        await shielded(partial(anyio.to_thread.run_sync, self.spool.close))

    @property
    def mailbox(self) -> LoopMailbox:
        """The mailbox in which this spool's futures are awaited. `async with` creates it."""
        if self._mailbox is None:
            self._mailbox = LoopMailbox()
        return self._mailbox

    async def append(self, records: Sequence[SpooledRecord], *, claim: bool) -> range:
        """Store `records` and return their ids once they are durable; see `Spool.append_nowait`.

        If the wait is cancelled, the records are still stored, and they join the backlog: the caller got no ids, but an
        accepted write cannot be undone.
        """
        stored = self.spool.append_nowait(records, claim=claim)
        try:
            return await self.mailbox.wait_for(stored)
        except BaseException:
            if claim:
                stored.add_done_callback(self._release_stored)
            raise

    def confirm(self, ids: Iterable[int]) -> None:
        """Mark claimed records as delivered; the next commit deletes their rows."""
        self.spool.confirm(ids)

    def release(self, ids: Iterable[int]) -> int:
        """Return claimed records to the backlog; return how many."""
        return self.spool.release(ids)

    async def claim_backlog(self, limit: int, *, max_bytes: int = MIB) -> list[Claimed]:
        """Claim up to `limit` records of the backlog, oldest first; see `Spool.claim_backlog_nowait`."""
        claimed = self.spool.claim_backlog_nowait(limit, max_bytes=max_bytes)
        try:
            return await self.mailbox.wait_for(claimed)
        except BaseException:
            claimed.add_done_callback(self._release_claimed)
            raise

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` on the loop soon after the backlog grew."""
        mailbox = self.mailbox
        self.spool.listen(lambda: mailbox.post(listener))

    def statistics(self) -> SpoolStatistics:
        """Return a snapshot; cheap."""
        return self.spool.statistics()

    def _release_stored(self, stored: "Future[range]") -> None:
        if stored.exception() is None:
            self.spool.release(stored.result())

    def _release_claimed(self, claimed: "Future[list[Claimed]]") -> None:
        if claimed.exception() is None:
            self.spool.release(each.id for each in claimed.result())
