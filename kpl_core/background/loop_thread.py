"""An event loop in a thread of its own, and calls into it from other threads that always come to an end.

A call whose loop ends before it is answered fails with `LoopEnded`; one from the loop's own thread, which
would wait for itself, is refused.

A signal's handler may call too, though it interrupts a thread in the middle of a call: the one lock is reentrant, and
whoever waits lets go of it, the interrupted call's hold included.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

from kpl_core.errors import WrongEventLoop

__all__ = ["LoopEnded", "LoopStuck", "LoopThread"]

T = TypeVar("T")


class LoopEnded(Exception):  # noqa: N818 - reads as a sentence where it is caught
    """The loop ended before it answered."""


class LoopStuck(Exception):  # noqa: N818 - as above
    """The loop did not answer in time: somebody's code in it does not return."""


class LoopThread:
    """Runs `main` with asyncio; used by any number of threads. `ended` is called last, in that thread.

    `lock` is that of those who call; who holds it may call.
    `failure` is what `main` raised: an exception has nobody else to go to at the end of a thread.
    """

    def __init__(
        self,
        main: Callable[[], Coroutine[Any, Any, None]],
        *,
        name: str,
        ended: Callable[[], None],
        lock: "threading.RLock",
    ) -> None:
        self._main = main
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Guards both: a call is either pending when the loop ends, and told so, or refused.
        self._lock = lock
        # With each, what its thread waits with.
        self._pending: dict[Future[Any], threading.Condition] = {}
        self.has_ended = False
        self._over = threading.Condition(lock)
        self._is_over = False
        self._is_ending = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, `timeout` seconds at most (None, or infinite: however long)."""
        timeout = min(threading.TIMEOUT_MAX, math.inf if timeout is None else timeout)
        deadline = monotonic() + timeout
        with self._over:
            # Not yet in `Thread.join`, which lets go of nothing.
            self._over.wait_for(lambda: self._is_over or not self._thread.is_alive(), timeout)
        self._thread.join(max(0.0, deadline - monotonic()))

    def begin_child(self, lock: "threading.RLock") -> None:
        """Be at the end, in a fork's child, which has no such thread; whoever held the lock may be the parent's."""
        self._lock, self._over = lock, threading.Condition(lock)
        self.has_ended = self._is_over = True

    @property
    def is_current(self) -> bool:
        """Say whether the caller runs in the loop's thread."""
        return threading.current_thread() is self._thread

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Let the loop call `callback`; nothing happens if the loop has ended, or ends before."""
        with self._lock:
            if not self.has_ended and self._loop is not None:
                # Closed, and about to say so.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(callback)

    def call(self, work: Callable[[], T]) -> T:
        """Call a function in the loop, and return what it returns or raise what it raises.

        Raises:
            LoopEnded: the loop ended before.
            WrongEventLoop: this is the loop's own thread.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
                self._settle(future, error)
            else:
                self._settle(future, None, result)

        return self._answer_of(future, run)

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float = math.inf) -> T:
        """Run a coroutine in the loop and return its result; raises as `call`.

        Raises:
            LoopStuck: there is no answer after `timeout` seconds.
        """
        future: Future[T] = Future()

        def begin() -> None:
            task = asyncio.ensure_future(work())
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            # If it was cancelled the loop ends, and `_run` answers.
            if not task.cancelled():
                error = task.exception()
                self._settle(future, error, None if error is not None else task.result())

        return self._answer_of(future, begin, timeout)

    def _answer_of(self, future: "Future[T]", begin: Callable[[], None], timeout: float = math.inf) -> T:
        if self.is_current:
            message = (
                "this call waits for the producer's thread and was made in it, by a hook or a callback; "
                "make it in another thread"
            )
            raise WrongEventLoop(message)

        def begin_unless_ending() -> None:
            # What the loop is asked for after `main` is never run: it only cleans up.
            if not self._is_ending:
                begin()

        with self._lock:
            if self.has_ended or self._loop is None:
                raise LoopEnded
            try:
                self._loop.call_soon_threadsafe(begin_unless_ending)
            except RuntimeError as error:
                # Closed, and about to say so.
                raise LoopEnded from error
            self._pending[future] = answered = threading.Condition(self._lock)
            if not answered.wait_for(future.done, min(timeout, threading.TIMEOUT_MAX)):
                del self._pending[future]
                raise LoopStuck
        return future.result()

    def _settle(self, future: "Future[Any]", error: BaseException | None, result: object = None) -> None:
        with self._lock:
            answered = self._pending.pop(future, None)
            if answered is None:
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
            answered.notify()

    def _run(self) -> None:
        try:
            asyncio.run(self._enter())
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise it to; see `failure`
            self.failure = error
        finally:
            with self._lock:
                self.has_ended = True
                pending, self._pending = self._pending, {}
            self._ended()
            with self._lock:
                for future, answered in pending.items():
                    future.set_exception(LoopEnded())
                    answered.notify()
                self._is_over = True
                self._over.notify_all()

    async def _enter(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._main()
        finally:
            self._is_ending = True
