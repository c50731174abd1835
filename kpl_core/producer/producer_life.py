"""The life of a producer: entered, open, closing, closed. What is put meanwhile is `Producer`'s."""

import asyncio
import logging
import math
import random
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskStatus

from kpl_core.errors import ConfigError, ProducerClosed, WrongEventLoop
from kpl_core.event_loop import running_clock, running_loop
from kpl_core.hooks import Fact, Hook, require_hooks
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.producer_view import ProducerView
from kpl_core.producer.put_turns import PutTurns
from kpl_core.producer.report import ProducerReport
from kpl_core.producer.room import RoomLines
from kpl_core.producer.stream_set import StreamSet
from kpl_core.producer.timeout import require_timeout
from kpl_core.records.user_record import require_stream
from kpl_core.transport.transport import KinesisTransport

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

    from kpl_core.coordination.store import CoordinationStore
    from kpl_core.durability.dead_letters import DeadLetterSink
    from kpl_core.producer.coordinating import Coordinating
    from kpl_core.producer.durable_store import DurableStore

__all__ = ["DEFAULT_CLOSE_SECONDS", "ProducerLife"]

_logger = logging.getLogger("kpl_core")

DEFAULT_CLOSE_SECONDS: Final = 30.0
# The share of close's time after which what waits for tokens is sent without them.
FORCE_SHARE: Final = 0.8


class ProducerLife(ProducerView):
    """Opens and closes what a producer needs, and says when something changed."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        session: "AioSession | None" = None,
        transport: KinesisTransport | None = None,
        hooks: Sequence[Hook] = (),
        dead_letter_sink: "DeadLetterSink | None" = None,
        coordination_store: "CoordinationStore | None" = None,
    ) -> None:
        self.config = Config() if config is None else config
        self._session = session
        self._transport = transport
        self._hooks = require_hooks(hooks)
        self._chance: Callable[[], float] = random.random
        self._buffer_limit = BufferLimit(
            max_records=self.config.max_outstanding_records,
            max_bytes=self.config.max_outstanding_bytes,
            tiers=self.config.tiers,
        )
        self._sink = dead_letter_sink
        self._keeping: DurableStore | None = None
        self._coordination_store = coordination_store
        self._coordinating: Coordinating | None = None
        # `put` waits for room although `put_nowait` would not; and for the disk.
        self._overflows = self.config.spool is not None or self.config.dead_letters is not None
        self._writes_ahead = self.config.spool is not None and self.config.spool.mode == "write_ahead"
        self._lines = RoomLines(
            self._buffer_limit,
            by_tier=self.config.tiers is not None,
            by_flow=self.config.fairness is not None,
        )
        self._streams: StreamSet | None = None
        # The pipelines by stream, emptied by close, so that a put needs no other check.
        self._open: dict[str, StreamPipeline] = {}
        self._state = "not entered"
        # None on trio, whose loops are told apart by `_require_own_loop` only, at a higher price.
        self._asyncio_loop: asyncio.AbstractEventLoop | None = None
        self._turns = PutTurns()
        self._progress_waiters: list[anyio.Event] = []
        self._listeners: list[Callable[[], None]] = []
        self._complete = True
        self._closed = anyio.Event()

    async def __aenter__(self) -> Self:
        """Open the transport and start to take user records."""
        if self._state != "not entered":
            message = f"this producer is {self._state}; a producer is entered once, so make a new one"
            raise ProducerClosed(message)
        self._loop = running_loop()
        self._asyncio_loop = _get_running_loop()
        self._clock = running_clock()
        self._turns = PutTurns(self._asyncio_loop)
        self._closed = anyio.Event()
        transport = self._transport
        if transport is None:
            transport = self._transport = self._default_transport()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(transport.open())
            keeping = await self._open_files(stack)
            coordinating = await self._open_coordination(stack)
            host = await stack.enter_async_context(anyio.create_task_group())
            self._streams = StreamSet(
                self.config,
                transport,
                self._buffer_limit,
                clock=self._clock,
                chance=self._chance,
                hooks=self._hooks,
                progress=self._progressed,
            )
            await host.start(self._run_streams)
            if keeping is not None:
                for task in keeping.start(
                    progressed=self._streams.take_progressed,
                    pipeline=self._pipeline,
                    wake=self._streams.wake,
                    clock=self._clock,
                    progress=self._progressed,
                ):
                    self._streams.spawn(task)
            if coordinating is not None:
                self._streams.spawn(coordinating.start(self._streams, clock=self._clock, chance=self._chance))
            self._exits = stack.pop_all()
        self._state = "open"
        return self

    async def __aexit__(
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
            # The block's own exception stays as it is: a task group that sees it wraps it.
            seen = (kind, error, traceback) if cancelled else (None, None, None)
            suppressed = await self._exits.__aexit__(*seen)
        return suppressed

    def _default_transport(self) -> KinesisTransport:
        from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport  # noqa: PLC0415 - 0.3 s, asyncio only

        return AiobotocoreTransport(self.config, session=self._session)

    async def _open_files(self, stack: AsyncExitStack) -> "DurableStore | None":
        if not self._overflows:
            if self._sink is not None:
                message = "a dead_letter_sink is given, but no Config.dead_letters; set it to DeadLetterOptions()"
                raise ConfigError(message)
            return None
        from kpl_core.producer.durable_store import DurableStore  # noqa: PLC0415 - the spool needs SQLite and file locks

        self._keeping = DurableStore(self.config, sink=self._sink, chance=self._chance, tell=self._tell)
        return await stack.enter_async_context(self._keeping)

    async def _open_coordination(self, stack: AsyncExitStack) -> "Coordinating | None":
        if self.config.coordination is None:
            if self._coordination_store is not None:
                message = (
                    "a coordination_store is given, but no Config.coordination; set it to CoordinationOptions(...)"
                )
                raise ConfigError(message)
            return None
        from kpl_core.producer.coordinating import Coordinating  # noqa: PLC0415 - needed by few

        self._coordinating = Coordinating(self.config, store=self._coordination_store, session=self._session)
        return await stack.enter_async_context(self._coordinating)

    async def _run_streams(self, *, task_status: TaskStatus[None]) -> None:
        has_ended = False
        try:
            await self._own_streams().run(task_status=task_status)
            has_ended = True
        finally:
            if self._state == "open" and not has_ended and (left := self._buffer_limit.outstanding_records):
                # Its loop ends while nobody closes it: these have no result, and nobody is left to give them one.
                _logger.warning(
                    "the event loop ended before its producer was closed, with %d records outstanding; "
                    "use `async with Producer(...)`, or await close(): %s",
                    left,
                    self.report(),
                )
        if self._state in {"open", "closing"}:
            # Nothing would be sent any more, and whoever waits would wait for ever.
            message = (
                "somebody cancelled a task of this producer, which ended it; cancel the tasks that are your own, "
                "not all of asyncio.all_tasks()"
            )
            raise ProducerClosed(message)

    def _tell(self, fact: Fact) -> None:
        self._own_streams().tell(fact)

    def _pipeline(self, stream: str) -> StreamPipeline:
        """Return the pipeline of a stream, made when first asked for."""
        pipeline = self._open.get(stream)
        if pipeline is not None:
            return pipeline
        if self._state != "open":
            message = f"this producer is {self._state} and takes no user records; put inside `async with Producer(...)`"
            raise ProducerClosed(message)
        require_stream(stream)
        self._require_own_loop()
        pipeline = self._open[stream] = self._own_streams().start(stream)
        return pipeline

    def _require_own_loop(self) -> None:
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

    # Waiting

    async def flush(self, timeout: float | None = None) -> ProducerReport:
        """Wait until everything put before has its final result, for `timeout` seconds at most.

        Open aggregated records close at once; the shards' limits still hold.

        Raises:
            ValueError: the timeout is negative or NaN.
        """
        require_timeout(timeout)
        if self._state != "open":
            return self.report()
        self._require_own_loop()
        complete = await self._flushed(math.inf if timeout is None else self._clock() + timeout)
        return msgspec.structs.replace(self.report(), complete=complete)

    async def _flushed(self, deadline: float) -> bool:
        is_flushed = self._own_streams().flush(self._clock())
        while not is_flushed():
            progress = anyio.Event()
            self._progress_waiters.append(progress)
            with anyio.move_on_after(deadline - self._clock()) as scope:
                await progress.wait()
            if scope.cancelled_caught:
                return False
        return True

    async def close(self, timeout: float | None = DEFAULT_CLOSE_SECONDS) -> ProducerReport:
        """Take no more user records, deliver what is there, and report; at most `timeout` seconds.

        None takes as long as it takes: until the last user record is delivered, failed or expired.

        When most of the time is gone, what waits for tokens is sent without them. What is left
        then has failed with reason `Shutdown`, what was sent and not answered with `Unknown`.
        Closing twice waits for the first close. A close that is cancelled gives up at once.

        Raises:
            ValueError: the timeout is negative or NaN; nothing was closed.
        """
        require_timeout(timeout)
        if self._state == "closing":
            await self._closed.wait()
        if self._state != "open":
            return self.report()
        self._require_own_loop()
        budget = math.inf if timeout is None else timeout
        now = self._clock()
        deadline, force_at = now + budget, now + FORCE_SHARE * budget
        self._state = "closing"
        self._open = {}
        self._lines.wake_all()
        if self._keeping is not None:
            self._keeping.stop_giving_back()
        try:
            if not await self._flushed(force_at):
                self._own_streams().drain_force(self._clock())
                await self._flushed(deadline)
        finally:
            await self._give_up()
        return self.report()

    async def _give_up(self) -> None:
        """Give every user record that is left its result, and stop all tasks; once."""
        if self._state == "closed":
            return
        left = self.report().buffered
        self._state = "closed"
        self._open = {}
        self._own_streams().abandon(self._clock())
        try:
            if self._keeping is not None:
                await self._keeping.finish()
            if self._coordinating is not None:
                await self._coordinating.finish()
        finally:
            self._own_streams().stop()
            self._lines.wake_all()
            self._progressed()
            self._closed.set()
            self._complete = left == 0
        if left:
            _logger.warning("the producer closed before everything was delivered: %s", self.report())

    def _progressed(self) -> None:
        """Hand on what must be kept, tell hooks the facts, and wake those who wait for room or for results."""
        if self._keeping is not None:
            self._keeping.collect()
        if self._hooks:
            self._own_streams().tell_hooks()
        if self._state == "open":
            self._lines.wake_first()
        else:
            self._lines.wake_all()
        for listener in self._listeners:
            try:
                listener()
            except (Exception, asyncio.CancelledError):
                # Somebody else's code, called in the middle of ours. It may be right again the next time.
                _logger.exception("a listener to the producer's progress failed: %r", listener)
        if self._progress_waiters:
            waiters, self._progress_waiters = self._progress_waiters, []
            for waiter in waiters:
                waiter.set()

    def _own_streams(self) -> StreamSet:
        assert self._streams is not None  # noqa: S101 - made on entering, and asked for only then
        return self._streams
