"""The spool for an event loop: the same calls, awaited. Decides nothing."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from kpl_core.durability.spool.envelope import SpooledRecord
from kpl_core.durability.spool.ledger import Claimed
from kpl_core.durability.spool.loop_mailbox import LoopMailbox
from kpl_core.durability.spool.spool import Spool, SpoolStatistics
from kpl_core.durability.spool.to_the_end import to_the_end
from kpl_core.options.kinesis_limits import MIB

__all__ = ["AsyncSpool"]


class AsyncSpool:
    """A spool used from one event loop (asyncio or trio); `async with AsyncSpool(Spool(options)) as spool:`."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._mailbox: LoopMailbox | None = None

    async def __aenter__(self) -> Self:
        """Open the spool in a worker thread: it reads the file once."""
        self._mailbox = LoopMailbox()
        try:
            await to_the_end(partial(anyio.to_thread.run_sync, self.spool.open))
        except BaseException:
            # Cancelled meanwhile: a file that stayed open would be locked for whoever tries again.
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit what was submitted and close, even if cancelled."""
        await self._close()

    async def _close(self) -> None:
        await to_the_end(partial(anyio.to_thread.run_sync, self.spool.close))

    @property
    def mailbox(self) -> LoopMailbox:
        """Where the futures of this spool are awaited; `async with` makes it."""
        if self._mailbox is None:
            self._mailbox = LoopMailbox()
        return self._mailbox

    async def append(self, records: Sequence[SpooledRecord], *, claim: bool) -> range:
        """Store `records` and return their ids once they are durable; see `Spool.append_nowait`.

        If the wait is cancelled the records are stored all the same, and join the backlog: nobody
        was told so, but nothing accepted can be taken back.
        """
        stored = self.spool.append_nowait(records, claim=claim)
        try:
            return await self.mailbox.wait_for(stored)
        except BaseException:
            if claim:
                stored.add_done_callback(self._give_up)
            raise

    def confirm(self, ids: Iterable[int]) -> None:
        """Mark claimed records as delivered; their rows go with the next commit."""
        self.spool.confirm(ids)

    def release(self, ids: Iterable[int]) -> int:
        """Put claimed records back into the backlog; return how many."""
        return self.spool.release(ids)

    async def claim_backlog(self, limit: int, *, max_bytes: int = MIB) -> list[Claimed]:
        """Claim up to `limit` records of the backlog, oldest first; see `Spool.claim_backlog_nowait`."""
        claimed = self.spool.claim_backlog_nowait(limit, max_bytes=max_bytes)
        try:
            return await self.mailbox.wait_for(claimed)
        except BaseException:
            claimed.add_done_callback(self._give_back)
            raise

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` on the loop, soon after the backlog grew."""
        mailbox = self.mailbox
        self.spool.listen(lambda: mailbox.post(listener))

    def statistics(self) -> SpoolStatistics:
        """Return a snapshot; cheap."""
        return self.spool.statistics()

    def _give_up(self, stored: "Future[range]") -> None:
        if stored.exception() is None:
            self.spool.release(stored.result())

    def _give_back(self, claimed: "Future[list[Claimed]]") -> None:
        if claimed.exception() is None:
            self.spool.release(each.id for each in claimed.result())
