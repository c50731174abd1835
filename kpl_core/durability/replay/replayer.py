"""Gives the backlog back to the producer: one task, woken by results, by growth, or by the clock.

What may go is decided by `ReplayOrder` (per key) and `DeliveryPace` (how fast). Records of one
key go together where they share an aggregated record: waiting for each to arrive before the next
would give a key ten records a second. A record is
marked as soon as its result says that Kinesis has it, also after the replayer was stopped. A
record that can never be delivered moves to the dead-letter queue; any other failure is tried
again, however long that takes.
"""

import contextlib
import math
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel

from kpl_core.durability.dead_letters.dead_letter_queue import DeadLetterQueue
from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.replay.replay_order import ReplayOrder
from kpl_core.durability.spool.async_spool import AsyncSpool
from kpl_core.durability.spool.claims import Claimed
from kpl_core.durability.spool.envelope import SharedPut, SpooledPut
from kpl_core.durability.spool.spool_error import SpoolError, SpoolFull, SpoolUnavailable
from kpl_core.errors import BufferFull, InvalidUserRecord
from kpl_core.options.reliability import SpoolOptions
from kpl_core.records.failure_reason import INCURABLE, reason_of
from kpl_core.records.record_result import RecordResult

__all__ = ["Replayer"]

# Read ahead this many times what may be in flight, so that keys that wait do not stop the others.
_READ_AHEAD: Final = 4


class Replayer:
    """Runs from `run()` until it is cancelled.

    A `put` that is a `SharedPut` says which records share a fate; another one is taken to keep all of them apart.
    """

    def __init__(
        self,
        spool: AsyncSpool,
        put: SpooledPut | SharedPut[Any],
        options: SpoolOptions,
        *,
        dead_letters: DeadLetterQueue,
        wall_clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._spool = spool
        self._put = put
        self._dead_letters = dead_letters
        self._wall_clock = wall_clock
        self._shared = put if isinstance(put, SharedPut) else None
        # What `SharedPut` gave for a record in flight.
        self._tickets: dict[int, Any] = {}
        per_key = options.replay_in_flight_per_key
        self._order = ReplayOrder(in_flight_per_key=per_key, may_share=self._shared is not None)
        self._pace = DeliveryPace(
            records_per_second=options.replay_records_per_second,
            bytes_per_second=options.replay_bytes_per_second,
            in_flight_records=options.replay_in_flight_records,
            in_flight_bytes=options.replay_in_flight_bytes,
            chance=chance,
        )
        self._window_records = options.replay_in_flight_records * _READ_AHEAD
        self._window_bytes = options.replay_in_flight_bytes * _READ_AHEAD
        self._undeliverable: deque[tuple[Claimed, RecordResult | None]] = deque()
        self._backlog_may_have_more = True
        self._running = False
        self._wakeup = anyio.Event()

    async def run(self) -> None:
        """Replay whatever is and comes into the backlog, for ever.

        On the way out it releases what was not handed over; what was, is marked or released when
        its result arrives.

        Raises:
            ProducerClosed: the producer takes nothing any more.
            SpoolError: the spool is closed or broken.
        """
        self._spool.listen(self._backlog_grew)
        self._backlog_may_have_more = True
        self._running = True
        try:
            while True:
                self._wakeup = anyio.Event()
                await self._bury()
                await self._fill()
                wait = self._send() - anyio.current_time()
                if self._undeliverable or self._wants_more():
                    # Nothing above need wait: results may come at once, and full dead letters refuse at once.
                    await anyio.lowlevel.checkpoint()
                else:
                    with anyio.move_on_after(None if wait == math.inf else wait):
                        await self._wakeup.wait()
        finally:
            self._running = False
            self._spool.release(self._order.take_waiting())
            while self._undeliverable:
                claimed, _ = self._undeliverable.popleft()
                self._order.succeeded(claimed.id)
                self._spool.release([claimed.id])

    def _backlog_grew(self) -> None:
        self._backlog_may_have_more = True
        self._wakeup.set()

    def _wants_more(self) -> bool:
        return (
            self._backlog_may_have_more
            and self._order.waiting < self._window_records // 2
            and self._order.waiting_bytes < self._window_bytes // 2
        )

    async def _fill(self) -> None:
        if not self._wants_more():
            return
        # Before the question: what grows meanwhile must not be forgotten.
        self._backlog_may_have_more = False
        limit = self._window_records - self._order.waiting
        claimed = await self._spool.claim_backlog(limit, max_bytes=self._window_bytes)
        for each in claimed:
            self._order.offer(each)
        if claimed:
            self._backlog_may_have_more = True

    def _send(self) -> float:
        """Hand over what may go; return when there may be more, `math.inf` for "not before a result"."""
        now = anyio.current_time()
        ready_at = math.inf
        while (claimed := self._order.peek()) is not None:
            company = self._order.company_of(claimed)
            if company is not None and not self._joins(claimed, company):
                self._order.travels_apart()
                continue
            size = claimed.record.size_bytes
            if not self._pace.try_send(size, now):
                ready_at = self._pace.ready_at(size, now)
                break
            self._order.take()
            try:
                self._put_one(claimed, company)
            except InvalidUserRecord:
                self._pace.succeeded(size)
                self._undeliverable.append((claimed, None))
            except BufferFull:
                self._order.failed(claimed.id)
                self._pace.failed(size, now)
            except BaseException:
                self._order.failed(claimed.id)
                raise
        if self._shared is not None and ready_at == math.inf:
            self._shared.hurry()
        return ready_at

    def _joins(self, claimed: Claimed, company: int) -> bool:
        return (
            self._shared is not None
            and company in self._tickets
            and self._shared.joins(claimed.record, self._tickets[company])
        )

    def _put_one(self, claimed: Claimed, company: int | None) -> None:
        finished = partial(self._finished, claimed)
        if self._shared is None:
            self._put(claimed.record, finished)
            return
        if company is None:
            ticket = self._shared(claimed.record, finished)
        else:
            ticket = self._shared.beside(claimed.record, self._tickets[company], finished)
        # Its result may have come at once.
        if self._order.is_in_flight(claimed.id):
            self._tickets[claimed.id] = ticket

    def _finished(self, claimed: Claimed, result: RecordResult) -> None:
        self._tickets.pop(claimed.id, None)
        size = claimed.record.size_bytes
        if result.successful:
            self._order.succeeded(claimed.id)
            self._pace.succeeded(size)
            # A spool that is closed or broken takes no mark: the record will be delivered once more
            # after the restart. Our caller is the producer, who cannot help it.
            with contextlib.suppress(SpoolError):
                self._spool.confirm([claimed.id])
        elif not self._running:
            self._order.succeeded(claimed.id)
            with contextlib.suppress(SpoolError):
                self._spool.release([claimed.id])
        elif reason_of(result) in INCURABLE:
            self._pace.succeeded(size)
            self._undeliverable.append((claimed, result))
        else:
            self._order.failed(claimed.id)
            self._pace.failed(size, self._spool.mailbox.clock())
        self._wakeup.set()

    async def _bury(self) -> None:
        """Move to the dead letters what can never be delivered; if they are full, it waits in the spool."""
        while self._undeliverable:
            claimed, result = self._undeliverable.popleft()
            now = anyio.current_time()
            try:
                await self._bury_one(claimed, result, self._wall_clock() - now)
                self._order.succeeded(claimed.id)
            except (SpoolFull, SpoolUnavailable):
                self._order.failed(claimed.id)
                self._pace.pause(now)
            except BaseException:
                self._order.failed(claimed.id)
                raise

    async def _bury_one(self, claimed: Claimed, result: RecordResult | None, wall_offset: float) -> None:
        queue = self._dead_letters
        reason = "invalid" if result is None else reason_of(result)
        letter = queue.letter(claimed.record, reason, result=result, wall_offset=wall_offset)
        await self._spool.mailbox.wait_for(queue.bury_nowait([letter], spooled_ids=[claimed.id]))
