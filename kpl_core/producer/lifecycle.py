"""The life of a producer: opened, flushed, closed. It owns what a producer needs while it is open.

`Producer` has the public interface, and one `Lifecycle`.
"""

import asyncio
import logging
import math
import os
import random
import sys
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskStatus

from kpl_core.errors import ConfigError, ProducerClosed, WrongEventLoop
from kpl_core.event_loop import running_clock, running_loop
from kpl_core.hooks import Hook, require_hooks
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.open_record import COMPILED, PutBatch
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.capacity_waiters import WaitersByFlow
from kpl_core.producer.report import ProducerReport, counted
from kpl_core.producer.stream_set import StreamSet
from kpl_core.producer.yield_budget import YieldBudget
from kpl_core.records.outcome import Outcome
from kpl_core.records.user_record import require_stream
from kpl_core.transport.default_transport import default_transport
from kpl_core.transport.transport import KinesisTransport, require_packages

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

    from kpl_core.coordination.store import CoordinationStore
    from kpl_core.durability.dead_letters import DeadLetterSink
    from kpl_core.producer.coordination_driver import CoordinationDriver
    from kpl_core.producer.durable_store import DurableStore

_logger = logging.getLogger("kpl_core")

DEFAULT_CLOSE_SECONDS: Final = 30.0
# The share of close's time after which records that wait for tokens are sent without them.
FORCE_SHARE: Final = 0.8
# A slower close is logged: a server may kill the process before the close ends (gunicorn does so, and prints nothing).
SLOW_CLOSE_SECONDS: Final = 3.0
_UNCLOSED: Final = (
    "the event loop ended before its producer was closed, with %d records outstanding; "
    "use `async with Producer(...)`, or await close()%s"
)


class ThreadQueue(Protocol):
    """The puts of threads that the loop has not made yet."""

    def open(self, life: "Lifecycle", hooks: Iterable[Hook]) -> None:
        """Accept puts for the running loop."""

    async def drained(self) -> None:
        """Put everything that is in the inbox, in steps."""

    def close(self) -> None:
        """Put what is in the inbox, and accept no more."""


class OpenGroup(Protocol):
    """A group of records that has room and is not put completely."""

    def finish(self) -> None:
        """Put all that are left."""


class Lifecycle:
    """Opens and closes what a producer needs, and wakes the tasks that wait for progress."""

    def __init__(
        self,
        config: Config,
        *,
        session: "AioSession | None",
        transport: KinesisTransport | None,
        hooks: Sequence[Hook],
        dead_letter_sink: "DeadLetterSink | None",
        coordination_store: "CoordinationStore | None",
    ) -> None:
        self.config = config
        self.threads: ThreadQueue
        self._session = session
        if transport is None:
            require_packages(config)
        self._transport = transport
        self._hooks = require_hooks(hooks)
        self._chance: Callable[[], float] = random.random
        self.buffer_limit = BufferLimit(
            max_records=config.max_outstanding_records,
            max_bytes=config.max_outstanding_bytes,
            tiers=config.tiers,
        )
        self._sink = dead_letter_sink
        self.store: DurableStore | None = None
        self._coordination_store = coordination_store
        self.coordination: CoordinationDriver | None = None
        self.waiters = WaitersByFlow(
            self.buffer_limit, by_tier=config.tiers is not None, by_flow=config.fairness is not None
        )
        self.streams: StreamSet | None = None
        # The outcomes of user records that a put waits for, because the spool does not have them yet.
        self.waits_for_spool: set[Outcome] = set()
        # The pipelines by stream, emptied when a close begins, so that a put needs no other check.
        self.pipelines: dict[str, StreamPipeline] = {}
        # Their batches, for the put method in C.
        self.batches: dict[str, PutBatch] = {}
        # Groups that have room, and records that are not put yet.
        self.open_groups: set[OpenGroup] = set()
        self.state = "not entered"
        # What ended the driver, if it ended before a close; `state` is then "failed".
        self.failure: BaseException | None = None
        # None on trio. `require_own_loop` compares trio's loops too, at a higher cost.
        self.asyncio_loop: asyncio.AbstractEventLoop | None = None
        self.yield_budget = YieldBudget()
        self._progress_waiters: list[anyio.Event] = []
        self.listeners: list[Callable[[], None]] = []
        self._complete = True
        # False for an adapter that reports losses in units of its own.
        self.logs_loss = True
        self._closed = anyio.Event()

    async def open(self) -> None:
        """Open the transport, the files and the coordination store, and start the tasks."""
        if self.state != "not entered":
            message = f"this producer is {self.state}; a producer is entered once, so make a new one"
            raise ProducerClosed(message)
        self._loop = running_loop()
        self.asyncio_loop = _get_running_loop()
        self._finalizer = weakref.finalize(self, _log_unclosed, os.getpid(), weakref.ref(self._loop), self.buffer_limit)
        self.clock = running_clock()
        self.yield_budget = YieldBudget(self.asyncio_loop)
        self._closed = anyio.Event()
        transport = self._transport
        if transport is None:
            transport = self._transport = await default_transport(self.config, self._session)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(transport.open())
            store = await self._open_files(stack)
            coordination = await self._open_coordination(stack)
            host = await stack.enter_async_context(anyio.create_task_group())
            self.streams = streams = StreamSet(
                self.config,
                transport,
                self.buffer_limit,
                clock=self.clock,
                chance=self._chance,
                hooks=self._hooks,
                progress=self._progressed,
                spool_state=None if store is None else store.state,
            )
            await host.start(self._run_streams)
            if store is not None:
                for task in store.start(streams, pipeline=self.pipeline, progress=self._progressed):
                    streams.spawn(task)
            if coordination is not None:
                streams.spawn(coordination.start(streams, chance=self._chance))
            self._exits = stack.pop_all()
        self.state = "open"
        _logger.debug("producer opened: kernels=%s", "c" if COMPILED else "python")
        self.threads.open(self, self._hooks)

    async def exit(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Close; promptly if the block was cancelled, else with the default timeout."""
        cancelled = kind is not None and issubclass(kind, anyio.get_cancelled_exc_class())
        try:
            if cancelled:
                await self._give_up()
            else:
                await self.close(timeout=DEFAULT_CLOSE_SECONDS)
        finally:
            await self._give_up()
            # A task group that sees the block's exception wraps it, so it sees a cancellation only.
            seen = (kind, error, traceback) if cancelled else (None, None, None)
            suppressed = await self._exits.__aexit__(*seen)
        return suppressed

    async def _open_files(self, stack: AsyncExitStack) -> "DurableStore | None":
        if self.config.spool is None and self.config.dead_letters is None:
            if self._sink is not None:
                message = "a dead_letter_sink is given, but no Config.dead_letters; set it to DeadLetterOptions()"
                raise ConfigError(message)
            return None
        try:
            from kpl_core.producer.durable_store import DurableStore  # noqa: PLC0415 - needs SQLite and file locks
        except ModuleNotFoundError as error:
            message = (
                f"spool and dead_letters need Python's module {error.name}, which this Python on {sys.platform} does "
                "not have; set both to None, or run on Linux"
            )
            raise ConfigError(message) from error
        self.store = DurableStore(self.config, sink=self._sink, chance=self._chance)
        self.waits_for_spool = self.store.state.waiting
        return await stack.enter_async_context(self.store)

    async def _open_coordination(self, stack: AsyncExitStack) -> "CoordinationDriver | None":
        if self.config.coordination is None:
            if self._coordination_store is not None:
                message = (
                    "a coordination_store is given, but no Config.coordination; set it to CoordinationOptions(...)"
                )
                raise ConfigError(message)
            return None
        from kpl_core.producer.coordination_driver import CoordinationDriver  # noqa: PLC0415 - needed by few

        self.coordination = CoordinationDriver(self.config, store=self._coordination_store, session=self._session)
        return await stack.enter_async_context(self.coordination)

    async def _run_streams(self, *, task_status: TaskStatus[None]) -> None:
        try:
            await self.own_streams().run(task_status=task_status)
        except anyio.get_cancelled_exc_class():
            if self.state == "open" and (left := self.buffer_limit.outstanding_records):
                # The loop ends without a close. These records have no result, and no task is left to give them one.
                _logger.warning(_UNCLOSED, left, f": {self.report()}")
                self._finalizer.detach()
            raise
        except BaseException as error:
            self._fail(error)
            raise
        if self.state in {"open", "closing"}:
            message = (
                "another task cancelled a task of this producer, which ended the producer; cancel your own tasks, "
                "not all of asyncio.all_tasks()"
            )
            self._fail(ended := ProducerClosed(message))
            raise ended

    def _fail(self, error: BaseException) -> None:
        """Refuse puts from now on, and give every user record its result: no task is left that would send it."""
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if self.state not in {"open", "closing"}:
            return
        self.failure = error
        _logger.error("the producer has failed and takes no more user records: %s", self.report(), exc_info=error)
        try:
            self._abandon("failed")
        except Exception:
            # What ended the driver may have ended it in the middle of a change.
            _logger.exception("user records of a failed producer have no result")
        self.waiters.wake_all()
        self._progressed()

    def own_streams(self) -> StreamSet:
        """Return the streams of an entered producer."""
        assert self.streams is not None  # noqa: S101 - made on entering, and asked for only then
        return self.streams

    def pipeline(self, stream: str) -> StreamPipeline:
        """Return the pipeline of a stream, made when first needed.

        Raises:
            ProducerClosed: the producer is not open.
            TypeError, InvalidUserRecord: no stream has such a name.
            WrongEventLoop: the running event loop is another one, or there is none.
        """
        pipeline = self.pipelines.get(stream)
        if pipeline is not None:
            return pipeline
        if self.failure is not None:
            message = f"this producer has failed with {self.failure!r} and takes no user records; make a new producer"
            raise ProducerClosed(message) from self.failure
        if self.state != "open":
            message = f"this producer is {self.state} and takes no user records; put inside `async with Producer(...)`"
            raise ProducerClosed(message)
        require_stream(stream)
        self.require_own_loop()
        pipeline = self.pipelines[stream] = self.own_streams().start(stream)
        if pipeline.entrance is not None:
            self.batches[stream] = pipeline.entrance
        return pipeline

    def require_own_loop(self) -> None:
        """Check that the running event loop is the one that entered the producer."""
        try:
            is_own = running_loop() is self._loop
        except (RuntimeError, ImportError):
            is_own = False
        if not is_own:
            message = (
                "this producer belongs to the event loop that entered it; make one producer for each loop, "
                "or use BlockingProducer from threads"
            )
            raise WrongEventLoop(message)

    # Flush and close

    async def flush(self, timeout: float | None) -> ProducerReport:
        """Wait until everything put before has its final result; see `Producer.flush`."""
        require_timeout(timeout)
        if self.state not in {"open", "closing"}:
            return self.report()
        self.require_own_loop()
        if self.state == "closing":
            with anyio.move_on_after(timeout) as scope:
                await self._closed.wait()
            return msgspec.structs.replace(self.report(), complete=self._complete and not scope.cancelled_caught)
        await self.threads.drained()
        complete = await self._flushed(math.inf if timeout is None else self.clock() + timeout)
        return msgspec.structs.replace(self.report(), complete=complete)

    async def _flushed(self, deadline: float) -> bool:
        is_flushed = self.own_streams().flush(self.clock())
        while not is_flushed():
            progress = anyio.Event()
            self._progress_waiters.append(progress)
            with anyio.move_on_after(deadline - self.clock()) as scope:
                await progress.wait()
            if scope.cancelled_caught:
                return False
        return True

    async def close(self, timeout: float | None) -> ProducerReport:
        """Accept no more user records, deliver those that are there, and report; see `Producer.close`."""
        require_timeout(timeout)
        if self.state == "closing":
            await self._closed.wait()
        if self.state != "open":
            return self.report()
        self.require_own_loop()
        budget = math.inf if timeout is None else timeout
        now = self.clock()
        deadline, force_at = now + budget, now + FORCE_SHARE * budget
        self._finish_puts()
        self.state = "closing"
        self._finalizer.detach()
        self.pipelines.clear()
        self.batches.clear()
        self.waiters.wake_all()
        if self.store is not None:
            self.store.stop_replays()
        try:
            if not await self._flushed(min(force_at, now + SLOW_CLOSE_SECONDS)):
                self._log_slow_close(deadline)
                if not await self._flushed(force_at):
                    self.own_streams().drain_force(self.clock())
                    await self._flushed(deadline)
        finally:
            await self._give_up()
        return self.report()

    def _log_slow_close(self, deadline: float) -> None:
        left = deadline - self.clock()
        if self.logs_loss and left >= 1.0:
            bound = "" if left == math.inf else f", for up to {left:.0f} s"
            _logger.warning("the Kinesis producer is closing and still sends%s: %s", bound, self.report())

    def _finish_puts(self) -> None:
        """Put everything that was accepted and is not put yet: the queue of the threads, and the open groups."""
        self.threads.close()
        while self.open_groups:
            self.open_groups.pop().finish()

    async def _give_up(self) -> None:
        """Give every user record that is left its result, and stop all tasks; once."""
        if self.state == "closed":
            return
        if self.state == "failed":
            self.state = "closed"
        else:
            self._abandon("closed")
        try:
            if self.store is not None:
                await self.store.finish()
            if self.coordination is not None:
                await self.coordination.finish()
        finally:
            self.own_streams().stop()
            self.waiters.wake_all()
            self._progressed()
            self._closed.set()
            # The one closing line of a loss, of adapters and servers too: it is on stderr where no logging is set up.
            if self.logs_loss and not (report := self.report()).all_delivered:
                _logger.warning("the Kinesis producer is closed: %s", report)

    def _abandon(self, state: str) -> None:
        """Enter a state that takes no puts, and give every user record that is left its result."""
        left = 0
        try:
            self._finish_puts()
            left = self.report().buffered
        finally:
            self.state = state
            self._finalizer.detach()
            self.pipelines.clear()
            self.batches.clear()
            self._complete = left == 0
            self.own_streams().abandon(self.clock())

    # Progress and counts

    def _progressed(self) -> None:
        """Serve the disk, give facts to the hooks, and wake the tasks that wait for room or for results."""
        if self.store is not None:
            self.store.collect()
        if self._hooks:
            self.own_streams().tell_hooks()
        if self.waiters.lines:
            if self.state != "open":
                self.waiters.wake_all()
            elif not self.waiters.wake_first():
                self.make_room()
        for listener in self.listeners:
            try:
                listener()
            except (Exception, asyncio.CancelledError):
                # The caller's code, called in the middle of ours. It may succeed the next time.
                _logger.exception("a listener to the producer's progress failed: %r", listener)
        if self._progress_waiters:
            waiters, self._progress_waiters = self._progress_waiters, []
            for waiter in waiters:
                waiter.set()

    def make_room(self) -> None:
        """Send batches that are not full now if all outstanding records are in them; see `StreamSet.make_room`."""
        if self.state == "open":
            self.own_streams().make_room()

    def report(self) -> ProducerReport:
        """Return where every accepted user record is now."""
        streams = self.streams
        if streams is None:
            return ProducerReport(accepted=0, delivered=0, failed={}, buffered=0, buffered_bytes=0, complete=True)
        report = counted(lambda: streams.report(complete=self._complete))
        store = self.store
        if store is None:
            return report
        return msgspec.structs.replace(
            report,
            accepted=report.accepted + store.found_records + store.found_letters,
            found=store.found_records + store.found_letters,
            spooled=report.spooled + store.found_records - store.moved,
            dead_lettered=report.dead_lettered + store.found_letters + store.moved,
        )


def require_timeout(timeout: float | None) -> None:
    """Check a timeout in seconds; None stands for no limit.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative, or not a number (NaN).
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        message = f"timeout is of type {type(timeout).__name__}; it must be a number of seconds, or None for no end"
        raise TypeError(message)
    if math.isnan(timeout) or timeout < 0:
        message = f"timeout is {timeout!r} s; it must be 0 or more, or None to wait without a limit"
        raise ValueError(message)


def _log_unclosed(pid: int, loop: "weakref.ref[object]", limit: BufferLimit) -> None:
    """Log what is left of a producer that nothing refers to any more, or that is open when the process ends.

    While its loop runs, as in the thread of a `BlockingProducer`, it is still going to be closed.
    """
    running = loop()
    is_running = isinstance(running, asyncio.AbstractEventLoop) and running.is_running()
    if os.getpid() == pid and limit.outstanding_records and not is_running:
        _logger.warning(_UNCLOSED, limit.outstanding_records, "")
