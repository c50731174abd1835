"""A producer in a thread of its own: the thread, its event loop, and calls into it from other threads.

The log handler and the OpenTelemetry exporters each have a queue (`RecordSource`). The sender drains it into a
`Producer` whenever it is woken, or when the producer has made progress. A `BlockingProducer` puts into its producer's
own inbox.

The thread is a daemon, so it works until the interpreter finalizes: after the main thread and after the last
non-daemon thread have ended. Executors refuse work by then, and from Python 3.12 on no thread starts while the
interpreter finalizes. So the loop (`ExitSafeLoop`) needs neither to open a connection.

Signal handlers may call the sender even if they interrupt a thread in the middle of a call: the lock is reentrant,
and a waiting thread releases it.
"""

import asyncio
import contextlib
import logging
import math
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple, Unpack

import msgspec

from kpl_core.background.process_end import SpareThread, watch_uvicorn, working_threads
from kpl_core.background.sigterm import flush_in_child_of_multiprocessing
from kpl_core.errors import WrongEventLoop
from kpl_core.producer.producer import Producer
from kpl_core.producer.report import ProducerReport

# A flush that waits for its source to be drained looks again at least this often, in seconds.
LOOK_SECONDS: Final = 0.02

_logger = logging.getLogger("kpl_core")

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Addresses = list[Any]
Work = Callable[[], Coroutine[Any, Any, T]]


def never() -> float:
    """Return the instant of a wait that is not extended."""
    return -math.inf


class SenderEnded(Exception):  # noqa: N818 - reads as a sentence where it is caught
    """The sender's loop ended before it answered."""


class SenderStuck(Exception):  # noqa: N818 - as above
    """The sender's loop did not answer in time, because code that it called does not return."""


class RecordSource(Protocol):
    """The queue that a sender empties. The sender calls every method in its own thread.

    While the producer is full, each of n sources is the first to be drained in every n-th drain that finds room, and
    gets what room has become free.
    """

    def drain(self, producer: Producer) -> object:
        """Put what is queued, as far as the producer has room. The sender calls it again after progress."""

    def watch_drained(self) -> Callable[[], bool]:
        """Return a function that returns True once everything that is queued now has been put."""

    def sender_ended(self) -> None:
        """Give every record that is still queued a result. The sender calls it last, however it ended."""


class ExitSafeLoop(asyncio.SelectorEventLoop):
    """A selector loop for one daemon thread: no executor, and `getaddrinfo` in a daemon thread of its own.

    What aiobotocore gives to an executor (a service model, a TLS context) takes milliseconds and runs in place.
    `own_threads` gets the identity of every thread that the loop starts, while it runs.
    """

    runs_in_place = True

    def __init__(self, own_threads: set[int]) -> None:
        super().__init__()
        self._own_threads = own_threads

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], T], *args: *Arguments
    ) -> "asyncio.Future[T]":
        """Run `func` now, unless an executor is named; `asyncio.to_thread` names none."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        answer: asyncio.Future[T] = self.create_future()
        try:
            answer.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            answer.set_exception(error)
        return answer

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - the socket module's word
        proto: int = 0,
        flags: int = 0,
    ) -> Addresses:
        """Resolve a name; raises OSError as `socket.getaddrinfo` does."""
        answer: asyncio.Future[Addresses] = self.create_future()

        def resolve() -> None:
            self._own_threads.add(threading.get_ident())
            try:
                found = socket.getaddrinfo(host, port, family, type, proto, flags)
                self._tell(lambda: None if answer.done() else answer.set_result(found))
            except (OSError, UnicodeError) as error:
                failure = error
                self._tell(lambda: None if answer.done() else answer.set_exception(failure))
            finally:
                self._own_threads.discard(threading.get_ident())

        try:
            threading.Thread(target=resolve, name="kpl-resolver", daemon=True).start()
        except RuntimeError:
            # The interpreter finalizes: nothing else waits for this loop any more.
            return socket.getaddrinfo(host, port, family, type, proto, flags)
        return await answer

    def _tell(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # raised by a closed loop, which nothing waits for
            self.call_soon_threadsafe(callback)


class BackgroundSender:
    """Runs one producer in a daemon thread and drains record sources into it; used from any thread.

    Args:
        open_producer: makes the producer, as an async context manager; called in the sender's thread.
        source: the first record source; `add_source` adds others.
        name: the thread's name.
        lock: the lock of the source. A thread that holds it may call the sender.
        prepare_thread: called first in the sender's thread.
        own_threads: gets the identities of the sender's threads, while they run.

    `failure` is the exception that ended the loop, None if there is none. A thread has no caller to raise it to.
    """

    def __init__(
        self,
        open_producer: Callable[[], AbstractAsyncContextManager[Producer]],
        source: RecordSource,
        *,
        name: str,
        lock: "threading.RLock",
        prepare_thread: Callable[[], object] = lambda: None,
        own_threads: set[int] | None = None,
    ) -> None:
        self._open_producer = open_producer
        self._sources = [source]
        # Guards every call: it is either pending when the loop ends and fails then, or is refused.
        self._lock = lock
        self._over = threading.Condition(lock)
        self._prepare_thread = prepare_thread
        self.own_threads: set[int] = set() if own_threads is None else own_threads
        self._loop: ExitSafeLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Each call that waits for the loop, with the condition that its thread waits on.
        self._pending: dict[Future[Any], threading.Condition] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opened, self._stopped = asyncio.Event(), asyncio.Event()
        self.is_drain_scheduled = False
        self._is_ending = self._is_over = False
        self.has_ended = False
        self.is_open = False
        self.producer: Producer | None = None
        self.failure: BaseException | None = None

    # From any thread

    def start(self, spare: SpareThread | None = None) -> None:
        """Start the thread, or use a spare one if none can be started; a spare one that is not used ends.

        Raises:
            RuntimeError: the interpreter is shutting down and starts no threads.
            OSError: the process has no file descriptor left for the loop's selector.
        """
        watch_uvicorn()  # it may have been imported since the owner was made
        flush_in_child_of_multiprocessing()
        loop = self._loop = ExitSafeLoop(self.own_threads)
        try:
            self._thread.start()
        except RuntimeError:
            if spare is None:
                loop.close()
                raise
            self._thread = spare.thread
            spare.run(self._run)
        if spare is not None:
            spare.end()

    def wait_until_open(self) -> None:
        """Wait until the producer takes records.

        Raises:
            BaseException: the error that opening the producer raised.
        """
        with self._over:
            self._over.wait_for(lambda: self.is_open or self._is_over)
        if self.failure is not None and not self.is_open:
            self._thread.join()
            raise self.failure

    @property
    def is_current(self) -> bool:
        """Return True in the sender's own thread."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """Drain the sources soon. Call it with the lock held."""
        if not self.is_drain_scheduled:
            self.is_drain_scheduled = True
            try:
                self.run_soon(self._drain)
            except BaseException:  # of a signal handler
                self.is_drain_scheduled = False
                raise

    def run_soon(self, callback: Callable[[], object]) -> bool:
        """Let the loop call `callback` at its next step, unless it ends before; return False if there is no loop.

        This takes no lock: a log handler calls it with a lock of its own, which the loop's thread may want.
        """
        if not self.has_ended and self._loop is not None:
            # The loop may be closed, and about to set `has_ended`.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback)
                return True
        return False

    def begin_call(self, work: Callable[[], T]) -> Callable[..., T]:
        """Start to call a function in the loop; return and raise as `begin`."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                self._settle(future, None, work())
            except Exception as error:  # noqa: BLE001 - raised again in the calling thread
                self._settle(future, error)

        return self._begin(future, run)

    def begin(self, work: Work[T], answered: threading.Condition | None = None) -> Callable[..., T]:
        """Start a coroutine in the loop. Return a function that waits for its result, up to a number of seconds.

        Its second argument may extend the wait (see `put_queued`). It raises what the coroutine raises, `SenderEnded`
        if the loop ends before, and `SenderStuck` if there is no result in time. It waits in `answered`, by default
        with the sender's lock, which it releases.

        Raises:
            SenderEnded: the loop has ended.
            WrongEventLoop: this is the sender's own thread.
        """
        future: Future[T] = Future()

        def run() -> None:
            task = asyncio.ensure_future(work())
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            # If it was cancelled the loop ends, and `_run` answers.
            if not task.cancelled():
                error = task.exception()
                self._settle(future, error, None if error is not None else task.result())

        return self._begin(future, run, answered)

    def begin_flush(self, timeout: float | None) -> Callable[[float], ProducerReport]:
        """Start a flush (see `flush_in_loop`); return and raise as `begin`."""
        return self.begin(lambda: self.flush_in_loop(timeout))

    def stop(self) -> None:
        """End the loop. The producer gives up what it still has, so close it first."""
        self.run_soon(self._stopped.set)

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None or infinite: forever) for the end of the thread; return True if it came.

        It returns at once in the sender's own thread.
        """
        timeout = min(threading.TIMEOUT_MAX, math.inf if timeout is None else timeout)
        deadline = monotonic() + timeout
        if not self.is_current:
            with self._over:
                # Not yet in `Thread.join`, which would keep the lock.
                self._over.wait_for(lambda: self._is_over or not self._thread.is_alive(), timeout)
            if self._thread.ident is not None:
                self._thread.join(max(0.0, deadline - monotonic()))
        return not self._thread.is_alive()

    def pause(self, timeout: float) -> Callable[[], object]:
        """Stop the thread between two steps of its loop, for a fork; return a function that lets it go on.

        A child that is forked while this thread is inside an import inherits a module that it can never import.
        """
        paused, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            paused.set()
            go_on.wait(timeout)

        if self._loop is not None and self._thread.is_alive() and not self.is_current and not self.has_ended:
            try:
                self._loop.call_soon_threadsafe(stand_still)
            except RuntimeError:
                return go_on.set
            paused.wait(timeout)
        return go_on.set

    def begin_child(self, lock: "threading.RLock") -> None:
        """Mark this sender ended in a forked child, where its thread does not exist.

        A thread of the parent may have held the lock, so `lock` replaces it.
        """
        self._lock, self._over = lock, threading.Condition(lock)
        self.has_ended = self._is_over = True
        self.is_open = False

    def _begin(
        self, future: "Future[T]", begin: Callable[[], None], answered: threading.Condition | None = None
    ) -> Callable[..., T]:
        if self.is_current:
            message = (
                "this call waits for the producer's thread and was made in it, by a hook or a callback; "
                "make it in another thread"
            )
            raise WrongEventLoop(message)

        def begin_unless_ending() -> None:
            # Once `_main` has returned, the loop only cleans up.
            if not self._is_ending:
                begin()

        with self._lock:
            if self.has_ended or self._loop is None:
                raise SenderEnded
            # First, because a signal handler may interrupt here and wait for the sender, which then answers this call.
            self._pending[future] = answered = answered or threading.Condition(self._lock)
            try:
                self._loop.call_soon_threadsafe(begin_unless_ending)
            except RuntimeError as error:
                # The loop is closed, and `has_ended` is about to be set.
                self._pending.pop(future, None)
                raise SenderEnded from error

        def wait(timeout: float, extended: Callable[[], float] = never) -> T:
            with answered:
                while not answered.wait_for(future.done, min(timeout, threading.TIMEOUT_MAX)):
                    timeout = extended() - monotonic()
                    if timeout <= 0:
                        self._pending.pop(future, None)
                        raise SenderStuck
            return future.result()

        return wait

    def _settle(self, future: "Future[Any]", error: BaseException | None, result: object = None) -> None:
        with self._lock:
            answered = self._pending.pop(future, None)
        if answered is not None:
            with answered:
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                answered.notify_all()

    # In the sender's thread

    def add_source(self, source: RecordSource) -> None:
        """Drain this source too, from now on; in the sender's thread."""
        self._sources.append(source)

    def remove_source(self, source: RecordSource) -> None:
        """Stop draining this source; in the sender's thread."""
        if source in self._sources:
            self._sources.remove(source)

    def has_source_of(self, kind: type) -> bool:
        """Return True if a source of this class is drained; in the sender's thread."""
        return any(isinstance(source, kind) for source in self._sources)

    async def opened(self) -> Producer:
        """Return the producer, once it is open."""
        await self._opened.wait()
        assert self.producer is not None  # noqa: S101 - open
        return self.producer

    async def put_queued(self, timeout: float | None, extended: Callable[[], float] = never) -> bool:
        """Put everything that is queued now; return False if `timeout` seconds were not enough.

        `extended` returns the instant on the monotonic clock until which it may go on even then.
        """
        deadline = math.inf if timeout is None else monotonic() + timeout
        producer = await self.opened()
        are_drained = [source.watch_drained() for source in self._sources]
        self._drain()
        while not all(is_drained() for is_drained in are_drained):
            left = max(deadline, extended()) - monotonic()
            if left <= 0:
                return False
            if not self.is_drain_scheduled:
                # There is no room. What the producer has batched leaves now, which makes some.
                await producer.flush(min(left, LOOK_SECONDS))
            await asyncio.sleep(0)
            self._drain_unless_scheduled()
        return True

    async def flush_in_loop(self, timeout: float | None, extended: Callable[[], float] = never) -> ProducerReport:
        """Wait up to `timeout` seconds (None: forever) until everything queued before has its result.

        `extended` may allow more time (see `put_queued`).
        """
        producer = await self.opened()
        deadline = math.inf if timeout is None else monotonic() + timeout
        is_put = await self.put_queued(timeout, extended)
        left = None if timeout is None else max(0.0, deadline - monotonic(), extended() - monotonic())
        report = await producer.flush(left)
        return msgspec.structs.replace(report, complete=report.complete and is_put)

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101 - made before the thread was started
        self._prepare_thread()
        self.own_threads.add(threading.get_ident())
        working_threads.add(threading.get_ident())
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - see `failure`
            self.failure = error
        finally:
            with self._lock:
                self.has_ended = True
                self.is_open = False
                pending, self._pending = self._pending, {}
            for source in list(self._sources):
                try:
                    source.sender_ended()
                except BaseException:
                    # The callers below wait for an answer all the same, also if a callback raised SystemExit.
                    _logger.exception("a record source failed when its sender ended")
            for future, answered in pending.items():
                with answered:
                    future.set_exception(SenderEnded())
                    answered.notify_all()
            with self._lock:
                self._is_over = True
                self._over.notify_all()
            self.own_threads.discard(threading.get_ident())
            working_threads.discard(threading.get_ident())

    async def _main(self) -> None:
        try:
            async with self._open_producer() as self.producer:
                self.producer.internal.on_progress(self._drain_unless_scheduled)
                with self._lock:
                    self.is_open = True
                    self._over.notify_all()
                self._opened.set()
                self._drain()
                await self._stopped.wait()
        finally:
            self._is_ending = True

    def _drain_unless_scheduled(self) -> None:
        # Each drain takes a step of a full queue and schedules the next one: there must be one at a time.
        if not self.is_drain_scheduled:
            self._drain()

    def _drain(self) -> None:
        self.is_drain_scheduled = False
        # Again, because the application may have imported uvicorn since this sender started.
        watch_uvicorn()
        if self.producer is not None:
            # The first source takes the room that was freed, and the next ones may find none: so it is the last one of
            # the next drain. A drain without room changes no order.
            limit, is_first = self.producer.buffer_limit, True
            for source in list(self._sources):
                records_before = limit.outstanding_records
                source.drain(self.producer)
                if is_first and limit.outstanding_records > records_before and source in self._sources:
                    is_first = False
                    self._sources.remove(source)
                    self._sources.append(source)
