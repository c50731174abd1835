"""Puts the backlog of a spool back into the producer: one task, woken by results, by new backlog, or by the clock.

`ReplayOrder` decides which record may go (per partition key), `DeliveryPace` how fast. Records of one key go together
if they share an aggregated record: waiting for each result before the next record would limit a key to ten records a
second. A record is confirmed as soon as its result says that Kinesis stored it, even after the replayer has stopped. A
record that can never be delivered moves to the dead-letter queue. While that has no place for it, it waits in the spool
and delays no other record. Any other failure is retried for as long as it takes.
"""

import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.durability.dead_letters.dead_letter_queue import DeadLetterQueue
from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.replay.replay_order import ReplayOrder
from kpl_core.durability.spool.async_spool import AsyncSpool
from kpl_core.durability.spool.claims import Claimed
from kpl_core.durability.spool.envelope import DeadLetter, SharedPut, SpooledPut
from kpl_core.durability.spool.spool_error import SpoolError, SpoolFull, SpoolUnavailable
from kpl_core.errors import BufferFull, InvalidUserRecord
from kpl_core.options.reliability import SpoolOptions
from kpl_core.records.record_result import INCURABLE, RecordResult, reason_of

# Read ahead this many times the records in flight, so that keys that wait do not stop other keys.
_READ_AHEAD: Final = 4
# Each try reads and puts again all records that no dead letter could replace.
_NO_PLACE: Final = ExponentialBackoff(base_seconds=0.5, cap_seconds=60.0)
_log: Final = logging.getLogger(__name__)


class Replayer:
    """Runs from `run()` until it is cancelled.

    A `put` that is a `SharedPut` says which records share a result. With any other `put`, no two records do.
    `on_dead_letter` gets each letter that replaces a record, and the future of its commit.
    """

    def __init__(
        self,
        spool: AsyncSpool,
        put: SpooledPut | SharedPut,
        options: SpoolOptions,
        *,
        dead_letters: DeadLetterQueue,
        on_dead_letter: Callable[[DeadLetter, "Future[None]"], object] = lambda _letter, _committed: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._spool = spool
        self._put = put
        self._dead_letters = dead_letters
        self._on_dead_letter = on_dead_letter
        self._shared = put if isinstance(put, SharedPut) else None
        # What `put` returned for each record in flight: the ticket, if it is a `SharedPut`.
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
        self._chance = chance
        self._undeliverable: deque[tuple[Claimed, RecordResult | None]] = deque()
        # The ids of undeliverable records without a dead letter. They stay claimed until `_try_at`.
        self._without_place: list[int] = []
        self._tries = 0
        self._try_at = math.inf
        self._backlog_may_have_more = True
        self._running = False
        self._wakeup = anyio.Event()

    async def run(self) -> None:
        """Replay the backlog, present and future, until cancelled.

        At the end it releases the records it has not put. Records it has put are confirmed or released when their
        result arrives.

        Raises:
            ProducerClosed: the producer accepts nothing any more.
            SpoolError: the spool is closed or broken.
        """
        self._spool.listen(self._backlog_grew)
        self._backlog_may_have_more = True
        self._running = True
        try:
            while True:
                self._wakeup = anyio.Event()
                await self._add_letters()
                await self._fill()
                self._release_without_place(anyio.current_time())
                wait = min(self._send(), self._try_at) - anyio.current_time()
                if self._undeliverable or self._wants_more():
                    # The calls above may all return at once: results may be immediate, and a full dead-letter queue
                    # rejects at once.
                    await anyio.lowlevel.checkpoint()
                else:
                    with anyio.move_on_after(None if wait == math.inf else wait):
                        await self._wakeup.wait()
        finally:
            self._running = False
            self._spool.release([*self._order.take_waiting(), *self._without_place])
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
        # Cleared before the query, so that backlog that arrives meanwhile is not missed.
        self._backlog_may_have_more = False
        limit = self._window_records - self._order.waiting
        claimed = await self._spool.claim_backlog(limit, max_bytes=self._window_bytes)
        for each in claimed:
            self._order.offer(each)
        if claimed:
            self._backlog_may_have_more = True

    def _send(self) -> float:
        """Put the records that may go; return when more may, `math.inf` if a result must come first."""
        now = anyio.current_time()
        ready_at = math.inf
        while (claimed := self._order.peek()) is not None:
            joined = self._order.must_join(claimed)
            if joined is not None and not self._joins(claimed, joined):
                self._order.cannot_join()
                continue
            size = claimed.record.size_bytes
            if not self._pace.try_send(size, now):
                ready_at = self._pace.ready_at(size, now)
                break
            self._order.take()
            try:
                self._put_one(claimed, joined)
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
            self._shared.send_now()
        return ready_at

    def _joins(self, claimed: Claimed, joined: int) -> bool:
        return (
            self._shared is not None
            and joined in self._tickets
            and self._shared.joins(claimed.record, self._tickets[joined])
        )

    def _put_one(self, claimed: Claimed, joined: int | None) -> None:
        finished = partial(self._finished, claimed)
        if joined is None or self._shared is None:
            ticket = self._put(claimed.record, finished)
        else:
            ticket = self._shared(claimed.record, finished, self._tickets[joined])
        # Its result may have arrived during the call.
        if self._order.is_in_flight(claimed.id):
            self._tickets[claimed.id] = ticket

    def _finished(self, claimed: Claimed, result: RecordResult) -> None:
        self._tickets.pop(claimed.id, None)
        size = claimed.record.size_bytes
        if result.successful:
            self._order.succeeded(claimed.id)
            self._pace.succeeded(size)
            # A closed or broken spool cannot confirm it, so it will be delivered again after the restart. The caller is
            # the producer, which cannot help.
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

    async def _add_letters(self) -> None:
        """Move records that can never be delivered to the dead letters; those without a place stay in the spool."""
        while self._undeliverable:
            # It stays there until it has its place, so that `run` releases it if this is cancelled or fails.
            claimed, result = self._undeliverable[0]
            now = anyio.current_time()
            try:
                await self._add_letter(claimed, result, time.time() - now)
            except (SpoolFull, SpoolUnavailable) as error:
                self._no_place(claimed, error, now)
            self._order.succeeded(claimed.id)
            self._undeliverable.popleft()

    def _no_place(self, claimed: Claimed, error: SpoolError, now: float) -> None:
        if not self._without_place:
            self._tries += 1
            self._try_at = now + _NO_PLACE.seconds(self._tries, self._chance)
            _log.warning(
                "a record of stream %s in the spool can never be delivered, and there is no place for its dead letter: "
                "%s. It stays in the spool; the replay goes on, and tries again in %.1f s",
                claimed.record.stream,
                error,
                self._try_at - now,
            )
        self._without_place.append(claimed.id)

    def _release_without_place(self, now: float) -> None:
        if now >= self._try_at:
            self._spool.release(self._without_place)
            self._without_place, self._try_at = [], math.inf
            self._backlog_may_have_more = True

    async def _add_letter(self, claimed: Claimed, result: RecordResult | None, wall_offset: float) -> None:
        queue = self._dead_letters
        reason = "invalid" if result is None else reason_of(result)
        letter = queue.letter(claimed.record, reason, result=result, wall_offset=wall_offset)
        committed = queue.add_nowait([letter], spooled_ids=[claimed.id])
        self._on_dead_letter(letter, committed)
        await self._spool.mailbox.wait_for(committed)
