"""The producer for threads: the same one, in a loop and a thread of its own.

A put checks the user record and leaves it in an inbox; the loop takes over
whatever is there in one go, so many puts cost one wake-up. Results and room are
announced through one condition. Where more than room decides about a put (a
spool, dead letters, shares of flows), it is made in the loop, and the thread
waits until it is: it then has the promises of `Producer`, at the price of a
wake-up for each put.
"""

import asyncio
import logging
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import copy_context
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from kpl_core.background.blocking_delivery import BlockingDelivery, Parcel
from kpl_core.background.loop_thread import LoopEnded, LoopStuck, LoopThread
from kpl_core.background.process_end import take_part
from kpl_core.errors import BufferFull, InvalidUserRecord, ProducerClosed, WrongEventLoop
from kpl_core.hooks import Hook, OpeningHook, require_hooks
from kpl_core.options.config import Config
from kpl_core.producer.checked_records import checked_records
from kpl_core.producer.delivery import Delivery
from kpl_core.producer.lifecycle import DEFAULT_CLOSE_SECONDS, require_timeout
from kpl_core.producer.producer import Producer
from kpl_core.producer.report import ProducerReport
from kpl_core.records.record_result import INTERNAL, SHUTDOWN
from kpl_core.records.user_record import BytesLike, Tier, UserRecord, as_bytes, check_user_record
from kpl_core.transport.transport import KinesisTransport

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

    from kpl_core.durability.dead_letters import DeadLetterSink

__all__ = ["BlockingDelivery", "BlockingProducer"]

_logger: Final = logging.getLogger("kpl_core")
# How long past its timeout a close waits for the loop's thread to come to its end.
_JOIN_GRACE_SECONDS: Final = 0.4
# How long past its timeout a flush or close waits for an answer; a loop on a machine that is merely busy is in time.
_STUCK_SECONDS: Final = 5.0

T = TypeVar("T")


class BlockingProducer:
    """A producer for threads, any number of them; a context manager. A forked child makes its own.

    One that nobody closes is closed as the interpreter exits, in 5 seconds at most.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        session: "AioSession | None" = None,
        transport: KinesisTransport | None = None,
        hooks: Sequence[Hook] = (),
        dead_letter_sink: "DeadLetterSink | None" = None,
    ) -> None:
        self._config = Config() if config is None else config
        hooks = require_hooks(hooks)
        self._make: Callable[[], Producer] = lambda: Producer(
            self._config, session=session, transport=transport, hooks=hooks, dead_letter_sink=dead_letter_sink
        )
        self._is_made_in_the_loop = (
            self._config.spool is not None or self._config.dead_letters is not None or self._config.fairness is not None
        )
        self._asks_for_context = any(isinstance(hook, OpeningHook) for hook in hooks)
        # Guards the inbox and its counts; notified when results or room have come.
        self._changed = threading.Condition(lock := threading.RLock())
        self._inbox: deque[Parcel] = deque()
        self._inbox_bytes = 0
        self._drain_scheduled = False
        # By error code: what was accepted here, and never by the producer.
        self._refused: Counter[str] = Counter()
        self._is_open = False
        self._ready = threading.Event()
        self._thread = LoopThread(self._main, name="kpl-producer", ended=self._ended, lock=lock)
        self._was_entered = False
        self._report: ProducerReport | None = None

    def __enter__(self) -> Self:
        """Start the thread, and wait until the producer takes user records."""
        if self._was_entered:
            message = "this producer was entered before; make a new one"
            raise ProducerClosed(message)
        self._was_entered = True
        self._process = os.getpid()
        take_part(self)
        self._thread.start()
        self._ready.wait()
        if self._thread.failure is not None:
            self._thread.join()
            raise self._thread.failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close with the default timeout."""
        self.close()

    # Putting

    def put_nowait(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        explicit_hash_key: str | None = None,
        flow: str | None = None,
        tier: Tier = "normal",
        metadata: Mapping[str, Any] | None = None,
    ) -> BlockingDelivery:
        """Accept a user record now, or not at all; raises like `Producer.put_nowait`."""
        record = UserRecord(partition_key, as_bytes(data), explicit_hash_key, flow, tier, metadata)
        if self._is_made_in_the_loop:
            return self._put_in_the_loop(stream, record)
        return self._put(stream, record, wait_until=None)

    def put(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        explicit_hash_key: str | None = None,
        flow: str | None = None,
        tier: Tier = "normal",
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> BlockingDelivery:
        """Accept a user record, waiting up to `timeout` seconds (None: however long) for room.

        With a write-ahead spool it also waits until the spool has it, as `Producer.put` does.

        Raises:
            BufferFull: there was no room in that time. Else as `Producer.put`.
            ValueError: the timeout is negative or NaN.
        """
        require_timeout(timeout)
        record = UserRecord(partition_key, as_bytes(data), explicit_hash_key, flow, tier, metadata)
        if self._is_made_in_the_loop:
            if self._thread.is_current:
                return self._put_in_the_loop(stream, record)
            self._require_open()
            return self._handed_over([self._wait_for(lambda: self._put_in_time(stream, record, timeout))])[0]
        return self._put(stream, record, wait_until=math.inf if timeout is None else monotonic() + timeout)

    def put_many(self, stream: str, records: Iterable[tuple[str, BytesLike] | UserRecord]) -> list[BlockingDelivery]:
        """Accept many user records in their order, waiting for room; all are checked before any is put."""
        self._require_open()
        checked = checked_records(records, max_record_bytes=self._producer.max_record_bytes(stream))
        if self._is_made_in_the_loop:
            return self._handed_over(self._wait_for(lambda: self._producer.put_many(stream, checked)))
        user_records = (record if isinstance(record, UserRecord) else UserRecord(*record) for record in checked)
        return [self._put(stream, record, wait_until=math.inf) for record in user_records]

    def _put_in_the_loop(self, stream: str, record: UserRecord) -> BlockingDelivery:
        """Put as the producer itself does: to the spool if there is no room, within the share of a flow."""
        self._require_open()

        def put() -> Delivery:
            return self._producer.put_record_nowait(stream, record)

        try:
            delivery = put() if self._thread.is_current else self._thread.call(put)
        except LoopEnded as ended:
            raise self._closed() from ended
        return self._handed_over([delivery])[0]

    async def _put_in_time(self, stream: str, record: UserRecord, timeout: float | None) -> Delivery:
        try:
            async with asyncio.timeout(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
                delivery = await self._producer.put_unacknowledged(stream, record)
        except TimeoutError:
            raise self._full() from None
        await self._producer.acknowledged([delivery])
        return delivery

    def _handed_over(self, deliveries: Sequence[Delivery]) -> list[BlockingDelivery]:
        handles = [BlockingDelivery(self._changed) for _ in deliveries]
        for handle, delivery in zip(handles, deliveries, strict=True):
            handle.handed_over(delivery)
        return handles

    def _put(self, stream: str, record: UserRecord, *, wait_until: float | None) -> BlockingDelivery:
        """Leave a checked user record in the inbox; `wait_until` None: only if there is room now."""
        self._require_open()
        size = check_user_record(record, max_record_bytes=self._producer.max_record_bytes(stream))
        with self._changed:
            if not self._has_room(size, record.tier):
                self._wait_for_room(size, record.tier, wait_until)
            self._require_open()
            context = copy_context() if self._asks_for_context else None
            parcel = Parcel(stream, record, size, BlockingDelivery(self._changed), context)
            self._inbox.append(parcel)
            self._inbox_bytes += size
            if not self._drain_scheduled:
                self._drain_scheduled = True
                self._thread.run_soon(self._drain)
            if self._thread.has_ended and parcel in self._inbox:
                # Closed by a signal's handler in the middle of this put.
                self._inbox.remove(parcel)
                raise self._closed()
        return parcel.delivery

    def _require_open(self) -> None:
        if not self._is_open:
            raise self._closed() from self._thread.failure

    @property
    def is_open(self) -> bool:
        """Say whether it takes user records."""
        return self._is_open

    def begin_child(self) -> None:
        """Be closed, in a fork's child: the loop's thread is the parent's, and whoever held the lock may be."""
        self._changed = threading.Condition(lock := threading.RLock())
        self._thread.begin_child(lock)
        self._inbox = deque()
        self._is_open = False
        self._report = ProducerReport(accepted=0, delivered=0, failed={}, buffered=0, buffered_bytes=0, complete=True)

    def _closed(self) -> ProducerClosed:
        if self._was_entered and self._process != os.getpid():
            message = f"this producer is that of process {self._process}; make one in each process, after the fork"
        elif self._thread.failure is not None:
            message = f"this producer's thread has ended with {self._thread.failure!r}; make a new producer"
        else:
            message = "this producer takes no user records; put inside `with BlockingProducer(...)`"
        return ProducerClosed(message)

    def _has_room(self, size: int, tier: Tier) -> bool:
        return self._producer.buffer_limit.has_room(
            size_bytes=self._inbox_bytes + size, records=len(self._inbox) + 1, tier=tier
        )

    def _wait_for_room(self, size: int, tier: Tier, wait_until: float | None) -> None:
        if wait_until is None or self._thread.is_current:
            # Who waited in the loop's thread would keep room from coming.
            raise self._full()
        timeout = min(max(0.0, wait_until - monotonic()), threading.TIMEOUT_MAX)
        if not self._changed.wait_for(lambda: not self._is_open or self._has_room(size, tier), timeout):
            raise self._full()

    def _full(self) -> BufferFull:
        return self._producer.buffer_limit.full(more_records=len(self._inbox), more_bytes=self._inbox_bytes)

    # In the loop's thread

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        async with self._make() as self._producer:
            self._producer.on_progress(self._progressed)
            self._is_open = True
            self._ready.set()
            await self._stopped.wait()

    def _ended(self) -> None:
        """Give whatever is left a result; called last, however the loop came to its end."""
        with self._changed:
            self._is_open = False
            for parcel in self._inbox:
                self._refuse(parcel, SHUTDOWN, "the producer's thread ended before it took this record")
            self._inbox.clear()
            self._inbox_bytes = 0
            self._changed.notify_all()
        if self._thread.failure is not None and self._ready.is_set():
            _logger.error("the producer's thread has ended", exc_info=self._thread.failure)
        self._ready.set()

    def _progressed(self) -> None:
        if self._inbox and not self._drain_scheduled:
            self._drain()
        with self._changed:
            self._changed.notify_all()

    def _drain(self) -> None:
        """Hand over what is in the inbox, as far as there is room."""
        with self._changed:
            self._drain_scheduled = False
            while self._inbox:
                parcel = self._inbox[0]
                try:
                    delivery = parcel.put_into(self._producer)
                except BufferFull:
                    # `_progressed` comes back when there is room.
                    return
                except ProducerClosed as error:
                    self._refuse(parcel, SHUTDOWN, str(error))
                except (InvalidUserRecord, TypeError) as error:
                    # The record limit became known after the put, and lower; or a flow is none. Others wait behind it.
                    self._refuse(parcel, INTERNAL, str(error))
                else:
                    parcel.delivery.handed_over(delivery)
                self._inbox.popleft()
                self._inbox_bytes -= parcel.size_bytes

    def _refuse(self, parcel: Parcel, code: str, message: str) -> None:
        self._refused[code] += 1
        parcel.delivery.refused(code, message, self._loop.time())

    # Waiting

    def flush(self, timeout: float | None = None) -> ProducerReport:
        """Wait until everything put before has its final result, for `timeout` seconds at most.

        Raises:
            ValueError: the timeout is negative or NaN.
            WrongEventLoop: it was called in the producer's own thread, by a hook.
        """
        require_timeout(timeout)
        if self._report is not None:
            return self._report
        return self._report_of(lambda: self._flush(timeout), timeout)

    async def _flush(self, timeout: float | None) -> ProducerReport:
        self._drain()
        started_at = self._loop.time()
        while self._inbox:
            report = await self._producer.flush(timeout)
            if not report.complete and timeout is not None and self._loop.time() - started_at >= timeout:
                return report
            # What another thread left since may have had nothing to wait for: its turn of the loop would never come.
            self._drain()
        left = None if timeout is None else max(0.0, timeout - (self._loop.time() - started_at))
        return await self._producer.flush(left)

    def close(self, timeout: float | None = DEFAULT_CLOSE_SECONDS) -> ProducerReport:
        """Deliver what is there, for `timeout` seconds at most (None: however long), stop the thread, and report.

        Raises:
            ProducerClosed: the producer was never entered.
            ValueError: the timeout is negative or NaN; nothing was closed.
            WrongEventLoop: it was called in the producer's own thread, by a hook.
        """
        require_timeout(timeout)
        if not self._was_entered:
            message = "this producer was never entered; there is nothing to close"
            raise ProducerClosed(message)
        if self._thread.is_current:
            message = "the producer's own thread cannot close it, because it would wait for itself; close it elsewhere"
            raise WrongEventLoop(message)
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        report = self._report if self._report is not None else self._report_of(lambda: self._close(timeout), timeout)
        self._thread.join(timeout=None if timeout is None else timeout + _JOIN_GRACE_SECONDS)
        return report

    async def _close(self, timeout: float | None) -> ProducerReport:
        started_at = self._loop.time()
        await self._flush(timeout)
        left = None if timeout is None else max(0.0, timeout - (self._loop.time() - started_at))
        report = await self._producer.close(left)
        self._drain()
        failed = Counter(report.failed)
        failed.update(self._refused)
        self._report = msgspec.structs.replace(
            report,
            accepted=report.accepted + self._refused.total(),
            failed=dict(failed),
            complete=report.complete and not self._refused,
        )
        self._stopped.set()
        return self._report

    def _report_of(self, ask: Callable[[], Coroutine[Any, Any, ProducerReport]], wait: float | None) -> ProducerReport:
        """Run a coroutine on the loop; if that ends meanwhile, its last report is the answer."""
        try:
            return self._thread.wait_for(ask, math.inf if wait is None else wait + _STUCK_SECONDS)
        except LoopStuck:
            _logger.warning("the producer's thread is held up, by a hook or a callback that does not return")
            return msgspec.structs.replace(self._producer.report(), complete=False)
        except LoopEnded as ended:
            if self._report is not None:
                return self._report
            raise self._closed() from ended

    def _wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return self._thread.wait_for(work)
        except LoopEnded as ended:
            raise self._closed() from ended
