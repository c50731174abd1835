"""Puts from threads into the producer of an asyncio event loop: those of a sync route, or of a `BlockingProducer`.

A thread checks its user record, takes room in the buffer, and appends it to an inbox. The first put of a burst wakes
the loop, which takes the inbox in steps, and the pairs of one stream in a step together. Until then the delivery waits
on an outcome that the records of the inbox share; then it gets that of its Kinesis record. Where a put depends on more
than the buffer (a spool, dead letters, fair shares of flows), the loop makes it and the thread waits.

There is no lock. Threads that wait for one in turn cost five times what the put does, and a signal handler may
interrupt a put anywhere, and put, flush or close. So a put appends, in one step, wakes the loop, and then looks once
more whether it may put. If not, it takes its record back, unless the loop was faster: then the record is accepted.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextvars import Context, copy_context
from itertools import count, groupby
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar, cast

import anyio
import anyio.lowlevel

from kpl_core.errors import BufferFull, KplError, ProducerClosed, WrongEventLoop
from kpl_core.hooks import Hook, OpeningHook
from kpl_core.options.config import Config
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.open_record import BATCH, COMPILED, PutBatch, fork_count
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.checked_records import Puttable, as_user_record, checked_size
from kpl_core.producer.delivery import Delivery
from kpl_core.producer.inbox import (
    BURST,
    MOST_BATCHED_BYTES,
    MOST_BATCHES,
    STEP_RECORDS,
    BatchEntrance,
    Inbox,
    Queued,
    QueuedBatch,
    QueuedPair,
    QueuedPut,
    QueuedRecord,
)
from kpl_core.producer.lifecycle import Lifecycle, require_timeout
from kpl_core.records.outcome import UNPUT, Outcome, ResultHandle, ResultHandles
from kpl_core.records.record_result import INTERNAL, Attempt
from kpl_core.records.user_record import Tier, UserRecord

T = TypeVar("T")
Handle = TypeVar("Handle", bound=ResultHandle)
OwnersHandle = TypeVar("OwnersHandle", bound=ResultHandle)

# The number of this process, which the system takes long to tell.
_process = os.getpid()


def _forked() -> None:
    global _process  # noqa: PLW0603 - of the process, as its number is
    _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


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


class _Admission(Protocol):
    """Whether the puts of an owner are accepted."""

    @property
    def is_stopped(self) -> bool:
        """Return True while a signal ends the process."""


class _Open:
    """The admission of puts that no signal stops."""

    def __init__(self) -> None:
        self.is_stopped = False


class ThreadPuts(Generic[Handle]):
    """The inbox between the threads and the loop, whose room is the buffer's. A put returns a handle of its result."""

    def __init__(self, producer: RecordPuts, handle: type[Handle]) -> None:
        config = producer.config
        self._producer = producer
        self._limit = producer.buffer_limit
        self._is_made_in_the_loop = (
            config.spool is not None or config.dead_letters is not None or config.fairness is not None
        )
        self._asks_for_context = False
        # False if the loop puts each record alone.
        self._takes_pairs = False
        self._handle = handle
        self._admission: _Admission = _Open()
        self._admit: Callable[[], None]
        # The pipelines of an open producer.
        self._pipelines: dict[str, StreamPipeline] = {}
        # Empty unless puts wait for room in the loop: a put that `has_line` must not overtake them.
        self.lines: Mapping[Any, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None
        self._process = 0
        self._inbox = Inbox(self._limit)
        # The outcome on which the deliveries of some records in a row wait while they are in the inbox.
        self._shared = Outcome()
        # The wake-ups of the loop have numbers: the last one that is made for sure, and the last one that the loop has
        # answered. A signal handler may interrupt the making, and put and wait for the result, or raise: so a wake-up
        # counts as made only behind it.
        self._wake_ups = count(1)
        self._woken = self._answered = 0

    def serve(
        self, handle: type[OwnersHandle], admission: _Admission, admit: Callable[[], None]
    ) -> "ThreadPuts[OwnersHandle]":
        """Give an owner's handles; return this inbox. While the admission is stopped, `admit` waits or raises."""
        self._handle, self._admission, self._admit = cast("type[Handle]", handle), admission, admit
        return cast("ThreadPuts[OwnersHandle]", self)

    def open(self, life: Lifecycle, hooks: Iterable[Hook]) -> None:
        """Accept puts for the running loop of an open producer; on trio, accept none."""
        self._life, self._pipelines, self.lines = life, life.pipelines, life.waiters.lines
        self._loop, self._loop_thread, self._process = life.asyncio_loop, threading.get_ident(), os.getpid()
        self._asks_for_context = any(isinstance(hook, OpeningHook) for hook in hooks)
        self._takes_pairs = not (self._is_made_in_the_loop or self._asks_for_context)

    def for_kernel(self) -> tuple[Any, ...]:
        """Return what the put method in C needs to know to put into this inbox."""
        return vars(self._admission), self.lines, None, self._inbox.batches, fork_count(), None

    # In a thread

    def __len__(self) -> int:
        return self._inbox.records

    def put(self, stream: str, record: Puttable) -> Handle:
        """Accept a user record or a pair now, or not at all; raises as `Producer.put_nowait`.

        What most puts need is here in one piece, because each function called is a tenth of the cost of a put.
        """
        if not (self._takes_pairs and isinstance(record, tuple)):
            return self._put_record(stream, record)
        try:
            most = self._pipelines[stream].stages.max_record_bytes
        except KeyError:
            most = self._producer.max_record_bytes(stream)
        key, data = record
        is_plain = type(key) is str and key.isascii() and 0 < len(key) <= PARTITION_KEY_CHARACTERS
        if not is_plain or (size := len(key) + len(data)) > most:
            size = checked_size(record, most)
        if self._admission.is_stopped:
            self._admit()
        inbox, limit = self._inbox, self._limit
        taken, queued_before = inbox.room, len(inbox.queue)
        if (
            self._loop is None
            or self._process != _process
            or limit.free_records + taken.free_records <= 0
            or limit.free_bytes + taken.free_bytes < size
        ):
            self._require_room(size, "normal")
        if not queued_before % STEP_RECORDS:
            self._shared = Outcome()
        handle = self._handle(self._shared, 0)
        # As `Inbox.append`.
        inbox.queue.append(queued := QueuedPair(handle, size, stream, key, data))
        taken.free_records -= 1
        taken.free_bytes -= size
        if inbox.batches:
            _ = inbox.batches.pop(stream, None)
        if self._woken <= self._answered or self._loop is None or self._admission.is_stopped:
            self._look_again(queued)
        if COMPILED and queued_before >= BURST and is_plain and size <= MOST_BATCHED_BYTES:
            self._open_batch(stream)
        return handle

    def _open_batch(self, stream: str) -> None:
        """Open a batch for the next puts to a stream, unless that puts each record alone, or is new."""
        pipeline = self._pipelines.get(stream)
        if pipeline is None or pipeline.entrance is None or len(self._inbox.batches) >= MOST_BATCHES:
            return
        batch = self._inbox.append_batch(pipeline, self._handle)
        with contextlib.suppress(KplError):
            if self._woken <= self._answered:
                self._wake(self._own_loop().call_soon_threadsafe)
            # If it is None, a close has emptied the inbox, perhaps before this batch was there.
            if self._loop is not None:
                batch.limit = BATCH

    def _put_record(self, stream: str, record: Puttable) -> Handle:
        """Accept what the loop has to put alone."""
        record = as_user_record(record)
        if self._is_made_in_the_loop:

            async def put() -> Delivery:
                return self._producer.put_record_nowait(stream, record)

            return self._handle_of(self.call(put))
        size = checked_size(record, self._producer.max_record_bytes(stream))
        if self._admission.is_stopped:
            self._admit()
        self._require_room(size, record.tier)
        if not len(self._inbox.queue) % STEP_RECORDS:
            self._shared = Outcome()
        handle = self._handle(self._shared, 0)
        self._append(QueuedRecord(handle, size, stream, record, copy_context() if self._asks_for_context else None))
        return handle

    def _append(self, queued: QueuedRecord) -> None:
        self._inbox.append(queued)
        self._look_again(queued)

    def _look_again(self, queued: QueuedPut) -> None:
        """Wake the loop for what was appended, and check once more whether it may be put.

        Raises:
            KplError: the producer has closed meanwhile, or must not accept it any more. It is no longer in the inbox.
        """
        try:
            if self._woken <= self._answered:
                self._wake(self._own_loop().call_soon_threadsafe)
            if self._loop is None:
                raise self._closed()
            if self._admission.is_stopped:
                self._admit()
        except KplError:
            if self._inbox.take_back(queued):
                raise

    def _wake(self, call_soon: Callable[[Callable[[int], None], int], object]) -> None:
        number = next(self._wake_ups)
        try:
            call_soon(self._step, number)
        except RuntimeError as error:
            # asyncio's loop is closed.
            raise self._closed() from error
        self._woken = number

    def put_blocking(self, stream: str, record: Puttable, timeout: float | None) -> Handle:
        """Accept a user record or a pair, waiting for room; see `Producer.put_blocking`."""
        require_timeout(timeout)
        self._own_loop()
        # A put must not overtake those that wait in the loop.
        if not self.has_line(record) and not self._is_made_in_the_loop and _get_running_loop() is None:
            with contextlib.suppress(BufferFull):
                return self.put(stream, record)

        async def put() -> Delivery:
            # What this thread put before comes first.
            await self.drained()
            return await self.put_within(stream, record, timeout)

        return self._handle_of(self.call(put))

    def _handle_of(self, delivery: Delivery) -> Handle:
        return self._handle(delivery.outcome, delivery.index)

    def has_line(self, record: Puttable) -> bool:
        """Return True if puts wait for room in the loop before which this one must not come."""
        tier, flow = ("normal", None) if isinstance(record, tuple) else (record.tier, record.flow)
        return self._life.waiters.has_line(tier, flow)

    def reserve(self, *, size_bytes: int, tier: Tier) -> None:
        """Take room for one user record; raises `BufferFull` and `ProducerClosed`."""
        self._require_room(size_bytes, tier)
        self._append(QueuedRecord(self._handle(self._shared, 0), size_bytes))

    def _require_room(self, size_bytes: int, tier: Tier) -> None:
        if self._loop is None or self._process != _process:
            self._own_loop()
        limit, records, queued_bytes = self._limit, self._inbox.records, self._inbox.size_bytes
        if not limit.has_room(size_bytes=queued_bytes + size_bytes, records=records + 1, tier=tier):
            raise limit.full(more_records=records, more_bytes=queued_bytes)

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
        # Read once: it may be closed meanwhile.
        loop = self._loop
        if loop is None:
            raise self._closed()
        if self._process != _process:
            message = f"this is the producer of process {self._process}, which forked this one; make one after the fork"
            raise WrongEventLoop(message)
        return loop

    @staticmethod
    def _closed() -> ProducerClosed:
        return ProducerClosed(
            "this producer is closed, its event loop has ended, or it runs on trio, where threads cannot put; "
            "put while the application runs"
        )

    # In the loop

    def _step(self, number: int) -> None:
        # First, so that what is appended from now on wakes the loop again. Threads may wake it in another order.
        self._answered = max(self._answered, number)
        part = self._inbox.take()
        loop = self._loop
        if self._inbox.queue and loop is not None:
            self._wake(loop.call_soon)
        self._put_all(part)

    def drain(self) -> None:
        """Put everything that is in the inbox, and count all reservations of threads in the producer's buffer."""
        while self._inbox.queue:
            self._put_all(self._inbox.take())

    async def drained(self) -> None:
        """Put everything that is in the inbox now, in steps between which other tasks run."""
        is_drained = self.watch_drained()
        while not is_drained():
            self._put_all(self._inbox.take())
            await anyio.lowlevel.checkpoint()

    def watch_drained(self) -> Callable[[], bool]:
        """Return a function that returns True once everything that is in the inbox now has been put."""
        inbox = self._inbox
        last = inbox.taken + inbox.records
        # A put may have taken its record back.
        return lambda: inbox.taken >= last or not inbox.queue

    def _put_all(self, part: list[Queued]) -> None:
        waited_on = {queued.handle.outcome for queued in part if not isinstance(queued, QueuedBatch)}
        for kind, run in groupby(part, type):
            if kind is QueuedPair:
                for stream, pairs in groupby(cast("Iterator[QueuedPair]", run), attrgetter("stream")):
                    self._put_pairs(stream, list(pairs))
            elif kind is QueuedBatch:
                for each in cast("Iterator[QueuedBatch]", run):
                    self._put_batch(each.entrance, each.batch)
            else:
                for queued in cast("Iterator[QueuedRecord]", run):
                    if queued.record is not None:
                        self._put_one(queued, queued.record, queued.context)
        for outcome in waited_on:
            outcome.wake()

    def _put_batch(self, entrance: BatchEntrance, batch: PutBatch) -> None:
        # A record that cannot be put has failed.
        with contextlib.suppress(Exception):
            entrance.put(batch, self._life.clock())
        if entrance.pipeline.attention:
            self._life.own_streams().wake(entrance.pipeline.stream)

    def _put_pairs(self, stream: str, puts: list[QueuedPair]) -> None:
        """Put pairs together, up to one that has to be put alone; then that and all others alone."""
        pipeline = self._pipelines.get(stream)
        sizes = [queued.size_bytes for queued in puts]
        reached = 0
        if pipeline is not None and max(sizes) <= pipeline.max_record_bytes:
            handles = ResultHandles(len(puts))
            pairs = [(queued.partition_key, queued.data) for queued in puts]
            with contextlib.suppress(Exception), self._room(len(puts), sum(sizes), "normal"):
                # Those without an outcome are put alone, which raises the exception again.
                pipeline.put_pairs(pairs, (0, len(puts)), self._life.clock(), handles)
            if pipeline.attention:
                self._life.own_streams().wake(stream)
            for queued, number, index in zip(puts, handles.places[::2], handles.places[1::2], strict=True):
                if number == UNPUT:
                    break
                handle = queued.handle
                # A thread that looks meanwhile must not find the outcome with the index of another record.
                handle.index = index
                handle.outcome = handles.outcomes[number]
                reached += 1
            # The others still have the room that was reserved for them.
            self._limit.release(records=reached - len(puts), size_bytes=-sum(sizes[reached:]))
        for queued in puts[reached:]:
            self._put_one(queued, UserRecord(queued.partition_key, queued.data), None)

    def _put_one(self, queued: QueuedPut, record: UserRecord, context: Context | None) -> None:
        stream, size = queued.stream, queued.size_bytes
        try:
            if context is None:
                made: ResultHandle = self.put_reserved(stream, record, size)
            else:
                made = context.run(self.put_reserved, stream, record, size)
        except Exception as error:  # noqa: BLE001 - the other records of the inbox must be put
            made = self._failed(stream, record, str(error))
        queued.handle.index = made.index
        queued.handle.outcome = made.outcome

    def _failed(self, stream: str, record: UserRecord, message: str) -> ResultHandle:
        """Count a record as accepted and failed, such as one above a record limit that is lower since its put."""
        life, now = self._life, self._life.clock()
        attempt = Attempt(False, INTERNAL, message, now, now)  # noqa: FBT003
        try:
            pipeline = life.pipeline(stream)
        except KplError:
            # The producer has failed before it knew the stream, and so it has no books in which this could be counted.
            outcome = Outcome()
            outcome.attempted(attempt)
            outcome.settle()
            return Delivery(outcome, 0)
        detached = pipeline.stages.accept_detached(record, now)
        life.buffer_limit.overdraw(size_bytes=detached.size_bytes)
        pipeline.ledger.fail_waiting(detached, attempt)
        life.own_streams().wake(stream)
        return Delivery(detached.outcome, 0)

    async def put_within(self, stream: str, record: Puttable, timeout: float | None) -> Delivery:
        """Put within `timeout` seconds, which bound the wait for room. The wait for the spool's disk comes after it.

        Raises:
            BufferFull: there was no room in that time. Else as `Producer.put`.
        """
        delivery = None
        with anyio.move_on_after(timeout):
            delivery = await self._producer.put_unacknowledged(stream, as_user_record(record))
        if delivery is None:
            raise self._limit.full()
        await self._producer.acknowledged([delivery])
        return delivery

    def put_reserved(self, stream: str, record: UserRecord, size_bytes: int) -> Delivery:
        """Put a user record in exchange for room that was reserved for it; else as `put_record_nowait`."""
        with self._room(1, size_bytes, record.tier):
            return self._producer.put_record_nowait(stream, record)

    @contextlib.contextmanager
    def _room(self, records: int, size_bytes: int, tier: Tier) -> Iterator[None]:
        """Exchange room that was reserved for that of what is put in the block."""
        limit = self._limit
        limit.release(records=records, size_bytes=size_bytes)
        # Critical records may have filled their reserve since, and normal ones the part that bulk may not use.
        free_records, free_bytes = limit.free_for(tier)
        short_records, short_bytes = max(0, records - free_records), max(0, size_bytes - free_bytes)
        limit.release(records=short_records, size_bytes=short_bytes)
        try:
            yield
        finally:
            limit.release(records=-short_records, size_bytes=-short_bytes)

    def close(self) -> None:
        """Put what is in the inbox, and accept no more."""
        self._loop = None
        self.drain()
