"""Puts from threads into a producer of an asyncio event loop, such as those of a sync route of a web framework.

A thread checks its user record against the buffer and appends it to a queue. The first put of a burst wakes the loop,
which then takes the whole queue. The record has a delivery with an outcome of its own, from which it moves to the
outcome of its Kinesis record. Where a put depends on more than the buffer (a spool, dead letters, fair shares of
flows), the loop makes it and the thread waits.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, copy_context
from typing import Any, Protocol, TypeVar

import anyio

from kpl_core.errors import BufferFull, ProducerClosed, WrongEventLoop
from kpl_core.hooks import Hook, OpeningHook
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.producer.delivery import Delivery
from kpl_core.producer.lifecycle import Lifecycle, require_timeout
from kpl_core.records.outcome import Outcome
from kpl_core.records.record_result import INTERNAL, Attempt
from kpl_core.records.user_record import Tier, UserRecord, check_user_record

T = TypeVar("T")


# Stream, record, its size in bytes, its delivery, and the context of the put if a hook asks for it.
_QueuedPut = tuple[str, UserRecord, int, Delivery, Context | None]


class RecordPuts(Protocol):
    """How the loop puts one user record."""

    config: Config
    buffer_limit: BufferLimit

    def max_record_bytes(self, stream: str) -> int:
        """Return the most bytes of key and data that a stream takes in one record."""

    def put_record_nowait(self, stream: str, record: UserRecord) -> Delivery:
        """Accept a user record now, or not at all."""

    async def put_unacknowledged(self, stream: str, record: UserRecord) -> Delivery:
        """Accept a user record, waiting for room but not for the spool."""

    async def acknowledged(self, deliveries: Iterable[Delivery]) -> None:
        """Wait until the write-ahead spool has what was put."""


class ThreadPuts:
    """The queue between the threads and the loop. Its lock is never held while the loop puts."""

    def __init__(self, producer: RecordPuts) -> None:
        config = producer.config
        self._producer = producer
        self._is_made_in_the_loop = (
            config.spool is not None or config.dead_letters is not None or config.fairness is not None
        )
        self._asks_for_context = False
        # Reentrant, because a signal handler may put in the middle of a put.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None
        self._process = 0
        self._queue: list[_QueuedPut] = []
        # What threads have reserved since the loop was here. It does not count in the producer's buffer yet.
        self._records = self._bytes = 0
        self._is_scheduled = False

    def open(self, life: Lifecycle, hooks: Iterable[Hook]) -> None:
        """Accept puts for the running loop of an open producer; on trio, accept none."""
        self._life = life
        self._loop, self._loop_thread, self._process = life.asyncio_loop, threading.get_ident(), os.getpid()
        self._asks_for_context = any(isinstance(hook, OpeningHook) for hook in hooks)

    # In a thread

    def put(self, stream: str, record: UserRecord) -> Delivery:
        """Accept a user record now, or not at all; raises as `Producer.put_nowait`."""
        if self._is_made_in_the_loop:

            async def put() -> Delivery:
                return self._producer.put_record_nowait(stream, record)

            return self.call(put)
        size = check_user_record(record, max_record_bytes=self._producer.max_record_bytes(stream))
        delivery = Delivery(Outcome(), 0)
        context = copy_context() if self._asks_for_context else None
        with self._lock:
            self._take(size, record.tier)
            self._queue.append((stream, record, size, delivery, context))
        return delivery

    def put_blocking(self, stream: str, record: UserRecord, timeout: float | None) -> Delivery:
        """Accept a user record, waiting for room; see `Producer.put_blocking`."""
        require_timeout(timeout)
        self._own_loop()
        # A put must not overtake those that wait in the loop.
        has_line = self._life.waiters.has_line(record.tier, record.flow)
        if not has_line and not self._is_made_in_the_loop and _get_running_loop() is None:
            with contextlib.suppress(BufferFull):
                return self.put(stream, record)
        return self.call(lambda: self.put_within(stream, record, timeout))

    def reserve(self, *, size_bytes: int, tier: Tier) -> None:
        """Take room for one user record; raises `BufferFull` and `ProducerClosed`."""
        with self._lock:
            self._take(size_bytes, tier)

    def _take(self, size_bytes: int, tier: Tier) -> None:
        loop, limit = self._own_loop(), self._producer.buffer_limit
        if not limit.has_room(size_bytes=self._bytes + size_bytes, records=self._records + 1, tier=tier):
            raise limit.full(more_records=self._records, more_bytes=self._bytes)
        if not self._is_scheduled:
            # First, because `drain` looks at it without the lock.
            self._is_scheduled = True
            try:
                loop.call_soon_threadsafe(self.drain)
            except RuntimeError as error:
                self._is_scheduled = False
                raise self._closed() from error
        # Added only now, because a signal handler may have put in the middle of this put.
        self._records += 1
        self._bytes += size_bytes

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the loop, and wait in this thread for what it returns or raises."""
        if _get_running_loop() is not None:
            message = "this call blocks its thread, in which an event loop runs; await put() there"
            raise WrongEventLoop(message)
        loop = self._own_loop()
        if not loop.is_closed() and (self._loop_thread == threading.get_ident() or not loop.is_running()):
            message = "this call waits for the producer's event loop, which does not run; await put() in the loop"
            raise WrongEventLoop(message)
        coroutine = work()
        try:
            waiting = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:
            coroutine.close()
            raise self._closed() from error
        try:
            return waiting.result()
        except concurrent.futures.CancelledError as error:
            raise self._closed() from error

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise self._closed()
        if self._process != os.getpid():
            message = f"this is the producer of process {self._process}, which forked this one; make one after the fork"
            raise WrongEventLoop(message)
        return self._loop

    @staticmethod
    def _closed() -> ProducerClosed:
        return ProducerClosed(
            "this producer is closed, its event loop has ended, or it runs on trio, where threads cannot put; "
            "put while the application runs"
        )

    # In the loop

    def drain(self) -> None:
        """Put everything that is queued, and count all reservations of threads in the producer's buffer."""
        if not self._is_scheduled:
            return
        with self._lock:
            queue, self._queue = self._queue, []
            self._producer.buffer_limit.release(records=-self._records, size_bytes=-self._bytes)
            self._records = self._bytes = 0
            self._is_scheduled = False
        for stream, record, size, delivery, context in queue:
            try:
                if context is None:
                    made = self.put_reserved(stream, record, size)
                else:
                    made = context.run(self.put_reserved, stream, record, size)
            except Exception as error:  # noqa: BLE001 - the other records of the queue must be put
                made = self._failed(stream, record, str(error))
            delivery.outcome.move(0, made.outcome, made.index)
            delivery.outcome.wake()

    def _failed(self, stream: str, record: UserRecord, message: str) -> Delivery:
        """Count a record as accepted and failed, such as one above a record limit that is lower since its put."""
        life = self._life
        pipeline, now = life.pipeline(stream), life.clock()
        detached = pipeline.stages.accept_detached(record, now)
        life.buffer_limit.overdraw(size_bytes=detached.size_bytes)
        pipeline.ledger.fail_waiting(detached, Attempt(False, INTERNAL, message, now, now))  # noqa: FBT003
        life.own_streams().wake(stream)
        return Delivery(detached.outcome, 0)

    async def put_within(self, stream: str, record: UserRecord, timeout: float | None) -> Delivery:
        """Put within `timeout` seconds, which bound the wait for room. The wait for the spool's disk comes after it.

        Raises:
            BufferFull: there was no room in that time. Else as `Producer.put`.
        """
        delivery = None
        with anyio.move_on_after(timeout):
            delivery = await self._producer.put_unacknowledged(stream, record)
        if delivery is None:
            raise self._producer.buffer_limit.full()
        await self._producer.acknowledged([delivery])
        return delivery

    def put_reserved(self, stream: str, record: UserRecord, size_bytes: int) -> Delivery:
        """Put a user record in exchange for room that was reserved for it; else as `put_record_nowait`."""
        limit = self._producer.buffer_limit
        limit.release(records=1, size_bytes=size_bytes)
        # Critical records may have filled their reserve since, and normal ones the part that bulk may not use.
        free_records, free_bytes = limit.free_for(record.tier)
        short_records, short_bytes = max(0, 1 - free_records), max(0, size_bytes - free_bytes)
        limit.release(records=short_records, size_bytes=short_bytes)
        try:
            return self._producer.put_record_nowait(stream, record)
        finally:
            limit.release(records=-short_records, size_bytes=-short_bytes)

    def close(self) -> None:
        """Put what is queued, and accept no more."""
        with self._lock:
            self._loop = None
        self.drain()
