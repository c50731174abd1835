"""The producer for threads: a `Producer` in a loop and a thread of its own.

A put appends to the inbox of that producer (`ThreadPuts`). A `put_many`, and a put that depends on more than room (a
spool, dead letters, fair shares of flows, a line), is made in the loop and its thread waits for it.
"""

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from kpl_core.background.blocking_delivery import BlockingDeliveries, BlockingDelivery
from kpl_core.background.process_end import (
    NOT_ADMITTED,
    Intake,
    OnePerProcess,
    ProcessListener,
    import_early,
    keep_for_parent,
    listen,
)
from kpl_core.background.sender import BackgroundSender, SenderEnded, SenderStuck
from kpl_core.background.sigterm import FlushOnSigterm, flush_on_sigterm as flush_at_sigterm
from kpl_core.errors import BufferFull, ConfigError, KplError, ProducerClosed, WrongEventLoop
from kpl_core.hooks import Hook, require_hooks
from kpl_core.options.config import Config, config_or_default
from kpl_core.pipeline.open_record import put_method
from kpl_core.producer.checked_records import Puttable, as_user_record, checked_records, puttable
from kpl_core.producer.delivery import Deliveries, Delivery
from kpl_core.producer.lifecycle import DEFAULT_CLOSE_SECONDS, require_timeout
from kpl_core.producer.producer import Producer
from kpl_core.producer.report import ProducerReport
from kpl_core.producer.thread_puts import ThreadPuts
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.user_record import BytesLike, Tier, UserRecord
from kpl_core.transport.transport import KinesisTransport

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

    from kpl_core.durability.dead_letters import DeadLetterSink

_logger: Final = logging.getLogger("kpl_core")
# How long past its timeout `close` waits for the end of the thread.
_JOIN_GRACE_SECONDS: Final = 0.4
# How long past its timeout a flush or close waits for an answer; a loop on a busy machine answers in this time.
_STUCK_SECONDS: Final = 5.0
# The bound of the last flush and of the close at the end of the process together. Most supervisors wait 10 seconds
# or more before they kill.
_EXIT_SECONDS: Final = 5.0

T = TypeVar("T")
W = TypeVar("W")

# The producers of `BlockingProducer.shared`.
_shared: "OnePerProcess[BlockingProducer]" = OnePerProcess()


class BlockingProducer(ProcessListener):
    """A producer for any number of threads; a context manager. A forked child makes its own.

    It works until the last non-daemon thread has ended. If it is not closed, it delivers what was put within 5 seconds
    when the interpreter exits and when an ASGI server shuts down (docs/howto/process-end.md). With `flush_on_sigterm`
    it also does so before SIGTERM ends the process: True within 3 seconds, a number within so many. By default only
    children of multiprocessing do.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        session: "AioSession | None" = None,
        transport: KinesisTransport | None = None,
        hooks: Sequence[Hook] = (),
        dead_letter_sink: "DeadLetterSink | None" = None,
        flush_on_sigterm: FlushOnSigterm = None,
    ) -> None:
        self._config = config_or_default(config)
        hooks = require_hooks(hooks)
        self._changed = threading.Condition(lock := threading.RLock())
        self.intake: Intake = Intake(self._changed)
        self._threads: ThreadPuts[BlockingDelivery]

        def make() -> Producer:
            producer = Producer(
                self._config, session=session, transport=transport, hooks=hooks, dead_letter_sink=dead_letter_sink
            )
            self._threads = producer.internal.threads.serve(BlockingDelivery, self.intake, self._admit)
            return producer

        self._is_networked = transport is None
        needs = self._config.spool, self._config.dead_letters, self._config.fairness
        self._is_made_in_the_loop = needs != (None, None, None)
        self._is_open = False
        # What the put method in C needs to know while it is open.
        self._own_streams: tuple[Any, ...] | None = None
        self._sender = BackgroundSender(make, self, name="kpl-producer", lock=lock)
        self._was_entered = False
        self._flush_on_sigterm = flush_on_sigterm
        self.flushes_at_sigterm = flush_on_sigterm is not False
        self._is_closing = False
        # The task of the first close, in the loop.
        self._close_task: asyncio.Task[Any] | None = None
        self._report: ProducerReport | None = None

    @classmethod
    def shared(cls, config: Config | None = None) -> "BlockingProducer":
        """Return the open producer of this process; the first call opens it, and a forked child opens its own.

        It is for web workers and task queues, where no block surrounds the requests. It delivers at the end of the
        process, and after a `close` the next call opens another.

        Raises:
            ConfigError: it was opened with another config.
        """
        config = config_or_default(config)
        producer = _shared.get(lambda each: each.is_open, lambda: cls(config).__enter__())
        if producer._config != config:  # noqa: SLF001 - our own
            message = "the shared producer is open with another config; give the same one to every call"
            raise ConfigError(message)
        return producer

    def __enter__(self) -> Self:
        """Start the thread, and wait until the producer takes user records."""
        if self._was_entered:
            message = "this producer was entered before; make a new one"
            raise ProducerClosed(message)
        flush_at_sigterm(self._flush_on_sigterm)
        if self._is_networked:
            import_early(self._config)
        self._was_entered = True
        self._process = os.getpid()
        listen(self)
        self._sender.start()
        self._sender.wait_until_open()
        with self._changed:
            assert self._sender.producer is not None  # noqa: S101 - open
            self._producer = self._sender.producer
            self._is_open = self._sender.is_open
            self._own_streams = self._threads.for_kernel()
        return self

    def __exit__(self, *_: object) -> None:
        """Close with the default timeout."""
        self.close()

    @put_method
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
        """Accept a user record now, or not at all; raises like `Producer.put_nowait`. While SIGTERM ends it, wait."""
        return self._put(stream, puttable(partition_key, data, explicit_hash_key, flow, tier, metadata))

    @put_method
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
        """Accept a user record, waiting up to `timeout` seconds (None: forever) for room.

        With a write-ahead spool it also waits until the spool has it, as `Producer.put` does.

        Raises:
            BufferFull: there was no room in that time. Else as `Producer.put`.
            ValueError: the timeout is negative or NaN.
        """
        if timeout is not None:
            require_timeout(timeout)
        record = puttable(partition_key, data, explicit_hash_key, flow, tier, metadata)
        if not self._is_open:
            raise self._closed()
        threads = self._threads
        # A put must not overtake those that wait in the loop, such as a `put_many`.
        if not (self._is_made_in_the_loop or (threads.lines and threads.has_line(record))):
            # No `suppress`, which takes half as long as the put.
            try:
                return threads.put(stream, record)
            except BufferFull:
                pass
        if self._sender.is_current:
            # In the loop's own thread a wait would keep room from coming.
            return self._put(stream, record)
        wait_until = math.inf if timeout is None else monotonic() + timeout

        async def put() -> Delivery:
            await threads.drained()
            return await threads.put_within(stream, record, max(0.0, wait_until - monotonic()))

        return _blocking(self._wait_for(self._sender.begin, put))

    def put_many(self, stream: str, records: Iterable[tuple[str, BytesLike] | UserRecord]) -> BlockingDeliveries:
        """Accept many user records in their order, waiting for room; all are checked before any is put.

        The loop puts them, so the thread waits for it once: give it hundreds of records at a time.

        Raises:
            BufferFull: a callback in the producer's own thread called it, and there is no room.
        """
        if not self._is_open:
            raise self._closed()
        checked, _ = checked_records(records, max_record_bytes=self._producer.internal.max_record_bytes(stream))
        internal = self._producer.internal
        if self._sender.is_current and not self._is_made_in_the_loop:
            self._threads.drain()
            made = [internal.put_record_nowait(stream, as_user_record(each)) for each in checked]
            return BlockingDeliveries(Deliveries.of(made))

        async def put() -> Deliveries:
            # What a thread put before comes before what it puts in the loop.
            await self._threads.drained()
            return await self._producer.put_many(stream, checked)

        return BlockingDeliveries(self._wait_for(self._sender.begin, put))

    def _put(self, stream: str, record: Puttable) -> BlockingDelivery:
        """Put now. A put that the loop makes may go to the spool, and is bound by the share of its flow."""
        if not self._is_open:
            raise self._closed()
        if self._is_made_in_the_loop:
            put = partial(self._producer.internal.put_record_nowait, stream, as_user_record(record))
            return _blocking(put() if self._sender.is_current else self._wait_for(self._sender.begin_call, put))
        return self._threads.put(stream, record)

    def _admit(self) -> None:
        """Wait while a signal ends the process; raise if this put must not be accepted."""
        with self._changed:
            self._require_admission()

    @property
    def is_open(self) -> bool:
        """Return True while it takes user records."""
        return self._is_open

    @property
    def _is_delivering(self) -> bool:
        """Return True until the close is over: one that Ctrl-C has interrupted, say, goes on."""
        return (self._is_open or self._is_closing) and self._report is None

    @property
    def sender(self) -> BackgroundSender:
        """Return what delivers, for an adapter that adds a record source of its own."""
        return self._sender

    def _closed(self) -> ProducerClosed:
        failure = self._sender.failure
        if self._was_entered and self._process != os.getpid():
            message = f"this producer is that of process {self._process}; make one in each process, after the fork"
        elif failure is not None:
            message = f"this producer's thread has ended with {failure!r}; make a new producer"
        else:
            message = "this producer takes no user records; put inside `with BlockingProducer(...)`"
        closed = ProducerClosed(message)
        closed.__cause__ = failure
        return closed

    def _require_admission(self) -> None:
        if not self.intake.admits():
            report = self._producer.report()
            raise BufferFull(NOT_ADMITTED, outstanding_records=report.buffered, outstanding_bytes=report.buffered_bytes)

    # A record source, in the sender's thread

    def drain(self, producer: Producer) -> None:
        """Do nothing: the producer empties its inbox itself."""

    def watch_drained(self) -> Callable[[], bool]:
        """Return a function that returns True once the producer has everything that is in the inbox now."""
        return self._threads.watch_drained()

    def sender_ended(self) -> None:
        """Take no more user records; called last, however the loop ended."""
        with self._changed:
            was_open, self._is_open = self._is_open, False
            self._own_streams = None
        if was_open and self._sender.failure is not None:
            _logger.error("the producer's thread has ended", exc_info=self._sender.failure)

    # The end of the process, and forks

    def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object] | None:
        """Start a flush of at most `seconds`, or 5 seconds times `share`."""
        return self._begin_ending(self._sender.begin_flush, _EXIT_SECONDS * share if seconds is None else seconds)

    def undelivered(self) -> tuple[int, str]:
        """Return how many user records wait in the inbox and in the producer."""
        if not self._is_delivering:
            return 0, ""
        with self._changed:
            return len(self._threads) + self._producer.report().buffered, "user records of a BlockingProducer"

    def end_by_signal(self) -> None:
        """Log where the user records are, unless all are delivered. With a file for what is left, close first."""
        if not self._is_delivering:
            return
        with self._changed:
            queued, report = len(self._threads), self._producer.report()
        has_file = self._config.spool is not None or self._config.dead_letters is not None
        if has_file and (queued or report.buffered):
            # Only a close moves what is in memory to the file. It logs the report.
            wait = self._begin_ending(self._begin_close, 0.0)
            if wait is not None:
                wait()
        elif queued or not report.all_delivered:
            accepted, buffered = report.accepted + queued, report.buffered + queued
            report = msgspec.structs.replace(report, accepted=accepted, buffered=buffered)
            _logger.warning("the Kinesis producer is not closed at the end of the process: %s", report)

    def begin_exit(self, spent: float) -> Callable[[], object] | None:
        """Start to close, in 5 seconds less those that were spent since the exit began."""
        return self._begin_ending(self._begin_close, max(0.0, _EXIT_SECONDS - spent))

    def _begin_ending(
        self, begin: Callable[[float], Callable[[float], ProducerReport]], timeout: float
    ) -> Callable[[], object] | None:
        if not self._is_delivering or self._sender.is_current:
            return None
        try:
            wait_for_report = begin(timeout)
        except SenderEnded:
            return None

        def wait() -> None:
            # The producer logs what it could not deliver when it closes.
            with contextlib.suppress(KplError, SenderEnded):
                try:
                    wait_for_report(timeout + _JOIN_GRACE_SECONDS)
                except SenderStuck:
                    self._log_stuck()

        return wait

    def pause_for_fork(self, timeout: float) -> Callable[[], object]:
        """Stop the sender's thread while the process forks."""
        return self._sender.pause(timeout)

    def begin_child(self) -> None:
        """Mark it closed in a forked child, which does not have its thread."""
        self._changed = threading.Condition(lock := threading.RLock())
        self.intake = Intake(self._changed)
        self._sender.begin_child(lock)
        keep_for_parent(self._sender)
        self._is_open, self._own_streams = False, None
        self._report = ProducerReport(accepted=0, delivered=0, failed={}, buffered=0, buffered_bytes=0, complete=True)

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
        return self._report_of(lambda: self._sender.begin_flush(timeout), timeout)

    def close(self, timeout: float | None = DEFAULT_CLOSE_SECONDS) -> ProducerReport:
        """Deliver what is there, for `timeout` seconds at most (None: forever), stop the thread, and report.

        Raises:
            ProducerClosed: the producer was never entered.
            ValueError: the timeout is negative or NaN; nothing was closed.
            WrongEventLoop: it was called in the producer's own thread, by a hook.
        """
        require_timeout(timeout)
        if not self._was_entered:
            message = "this producer was never entered; there is nothing to close"
            raise ProducerClosed(message)
        if self._sender.is_current:
            message = "the producer's own thread cannot close it, because it would wait for itself; close it elsewhere"
            raise WrongEventLoop(message)
        deadline = math.inf if timeout is None else monotonic() + timeout
        report = self._report
        if report is None:
            report = self._report_of(lambda: self._begin_close(timeout, is_last=False), timeout)
        self._sender.join(max(0.0, deadline - monotonic()) + _JOIN_GRACE_SECONDS)
        return self._report or report

    def _begin_close(self, timeout: float | None, *, is_last: bool = True) -> Callable[[float], ProducerReport]:
        with self._changed:
            self._is_open, self._is_closing = False, self._is_open or self._is_closing
            self._own_streams = None
        return self._sender.begin(lambda: self._close_in_loop(timeout, is_last=is_last))

    async def _close_in_loop(self, timeout: float | None, *, is_last: bool) -> ProducerReport:
        if self._close_task is not None:
            # Of another thread, or of code that a signal has interrupted: it has a time of its own.
            report = await self._producer.flush(timeout)
            if self._report is not None or not is_last:
                return self._report or report
            _ = self._close_task.cancel()
            _ = await asyncio.wait([self._close_task])
            timeout = 0.0
        self._close_task = asyncio.current_task()
        deadline = math.inf if timeout is None else monotonic() + timeout
        await self._sender.put_queued(timeout)
        self._report = await self._producer.close(None if timeout is None else max(0.0, deadline - monotonic()))
        self._sender.stop()
        return self._report

    def _report_of(self, begin: Callable[[], Callable[[float], ProducerReport]], wait: float | None) -> ProducerReport:
        """Start work in the loop and return its report; if the loop ends meanwhile, return its last report."""
        try:
            return begin()(math.inf if wait is None else wait + _STUCK_SECONDS)
        except SenderStuck:
            return msgspec.structs.replace(self._log_stuck(), complete=False)
        except SenderEnded as ended:
            if self._report is not None:
                return self._report
            raise self._closed() from ended

    def _log_stuck(self) -> ProducerReport:
        report = self._producer.report()
        text = "the producer's thread is held up, by a hook or a callback that does not return: %s"
        _logger.warning(text, report)
        return report

    def _wait_for(self, begin: Callable[[W], Callable[..., T]], work: W) -> T:
        """Put in the loop, and wait for what that returns; a flush that begins later waits for it too."""
        try:
            with self._changed:
                if self.intake.is_stopped:
                    self._require_admission()
                wait = begin(work)
            return wait(math.inf)
        except SenderEnded as ended:
            raise self._closed() from ended


def _blocking(handle: ResultHandle) -> BlockingDelivery:
    return BlockingDelivery(handle.outcome, handle.index)
