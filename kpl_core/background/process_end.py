"""The end of the process and its forks: when background senders deliver what was not closed.

Python gives no single hook for the end of a process. These are used, in the order in which they come:

    uvicorn's shutdown      uvicorn ends its process by re-raising the signal that it caught: no later hook runs
    SIGTERM                 with `flush_on_sigterm`, under `opentelemetry-instrument`, in children of multiprocessing
    threading's exit        the main thread has ended; other threads may still run, and connections can be opened
    atexit                  the last non-daemon thread has ended; never reached in a child of multiprocessing

`KinesisLifespan` calls `begin_last_flushes` as well. A killed process (SIGKILL) and `os._exit` reach none of them.

A fork waits until every sender stands still between two steps of its loop. In the child every listener starts
empty: the parent sends what was accepted before the fork.
"""

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - registers its own exit first, so that ours runs before it
import contextlib
import inspect
import logging
import os
import signal
import sys
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final, Generic, Protocol, TypeVar

from kpl_core.options.config import Config
from kpl_core.transport.default_transport import import_transport
from kpl_core.version import producer_version

T = TypeVar("T")
Wait = Callable[[], object]

_logger: Final = logging.getLogger("kpl_core")
# CPython 3.12 starts no thread once the main thread has ended. Other versions do until the interpreter finalizes.
NEEDS_SPARE_THREADS: Final = sys.version_info[:2] == (3, 12)
# The share of a listener's exit time that the flush at threading's exit may use. The rest is for the close.
FLUSH_SHARE: Final = 0.7
# A sender stands still within milliseconds, except in the step that makes its client: tenths of a second of CPU,
# which are seconds on a busy machine. A child that is forked in that step cannot make a client.
_PAUSE_SECONDS: Final = 30.0


class SteppingSender(Protocol):
    """A loop in a thread of its own."""

    def run_soon(self, callback: Callable[[], object]) -> bool:
        """Let the loop call this at its next step; return False if there is no loop."""


class ProcessListener:
    """Something that sends in the background. The base class does nothing at any event."""

    # False if it has opted out of the flush at SIGTERM in children of multiprocessing.
    flushes_at_sigterm = True
    # What a signal that ends the process stops; None if nothing puts.
    intake: "Intake | None" = None

    def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Wait | None:  # noqa: ARG002
        """Start to deliver what is queued, within `seconds`, or `share` of this listener's time for the process' end.

        Return a function that waits for the end of the flush, in bounded time; None if there is nothing to wait for.
        """
        return None

    def undelivered(self) -> tuple[int, str]:
        """Return how many accepted records have no result, and what they are, in the plural."""
        return 0, ""

    @property
    def sender(self) -> "SteppingSender | None":
        """The loop that delivers this listener's records, which a put may have to wait for; None if there is none."""
        return None

    def end_by_signal(self) -> None:
        """Report what is not delivered, by a log line or on stderr: a signal ends the process now, without a close."""

    def begin_exit(self, spent: float) -> Wait | None:  # noqa: ARG002
        """Start to close, because the interpreter exits; the exit has taken `spent` seconds so far. Return as above."""
        return None

    def close_in_child(self) -> None:
        """Close, in a child of multiprocessing, which never runs `atexit`; called after `begin_exit`."""

    def pause_for_fork(self, timeout: float) -> Callable[[], object]:  # noqa: ARG002
        """Stop the sender's thread while the process forks; return a function that lets it go on."""
        return lambda: None

    def begin_child(self) -> None:
        """Start empty in a forked child, without the parent's threads and with locks of its own."""


# The threads that deliver: a put never waits in them for the end of the process.
working_threads: Final[set[int]] = set()


class OnePerProcess(Generic[T]):
    """One object for each process, which any thread may ask for: a forked child makes its own."""

    def __init__(self) -> None:
        self._made: dict[int, T] = {}
        # A thread of the parent may hold its lock during a fork. Reentrant, because a signal handler may ask too.
        self._locks: dict[int, threading.RLock] = {}

    def get(self, is_usable: Callable[[T], bool], make: Callable[[], T]) -> T:
        """Return this process's object; make it first if there is none that is usable."""
        process = os.getpid()
        with self._locks.setdefault(process, threading.RLock()):
            made = self._made.get(process)
            if made is None or not is_usable(made):
                # After a fork, the parent's is not ours.
                self._made.clear()
                made = self._made[process] = make()
            return made


def begin_working(work: Callable[[], object]) -> threading.Event:
    """Let a thread do `work`, whose own puts and log calls never wait; return what is set when it has ended.

    It takes no lock of `threading`, which code that a signal has interrupted may hold. If the interpreter finalizes and
    starts no threads, the work is done here.
    """
    ended = threading.Event()

    def run() -> None:
        is_new = threading.get_ident() not in working_threads
        working_threads.add(threading.get_ident())
        try:
            work()
        finally:
            if is_new:
                working_threads.discard(threading.get_ident())
            ended.set()

    try:
        start_new_thread(run, ())
    except RuntimeError:
        run()
    return ended


NOT_ADMITTED: Final = (
    "SIGTERM ends this process, and the delivery was held up while puts waited for the end; "
    "let no callback need a lock under which you put"
)


class Intake:
    """Whether a listener accepts records; stopped while a signal ends the process.

    A put waits then. A thread that waits may hold a lock that the delivery needs: so puts are refused instead once
    the delivery is held up. `condition` is that of the listener's lock, which the waits release. With `raises` the
    caller of such a put hears of it.
    """

    def __init__(self, condition: threading.Condition, *, raises: bool = True) -> None:
        self._condition = condition
        self._raises = raises
        self.is_stopped = False
        self._refuses = False
        # How many puts were refused without a word to their callers.
        self.refused_unheard = 0

    def stop(self) -> None:
        """Let puts wait from now on."""
        with self._condition:
            self.is_stopped = True

    def refuse(self) -> None:
        """Refuse the puts that wait, and all others from now on."""
        with self._condition:
            self._refuses = True
            self._condition.notify_all()

    def go_on(self) -> None:
        """Let the puts that wait go on, and all others."""
        with self._condition:
            self.is_stopped = self._refuses = False
            self._condition.notify_all()

    def admits(self) -> bool:
        """With the lock held: wait while it is stopped. Return False if the put must be refused.

        In a thread that delivers return True at once.
        """
        if threading.get_ident() in working_threads:
            return True
        self._condition.wait_for(lambda: not self.is_stopped or self._refuses)
        self.refused_unheard += self.is_stopped and not self._raises
        return not self.is_stopped


class WeakList(Generic[T]):
    """Objects, for as long as they are referenced. Threads may add one while others read: a WeakSet would raise then.

    No reference has a callback that removes it. Before CPython 3.12 the garbage collector may run while a list is
    copied, and what is removed from the list then is freed twice.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, item: T) -> None:
        """Add an object, and forget those that are gone."""
        for gone in [each for each in tuple(self._references) if each() is None]:
            with contextlib.suppress(ValueError):  # another thread has
                self._references.remove(gone)
        self._references.append(weakref.ref(item))

    def referenced(self) -> list[T]:
        """Return the objects that are still referenced, in the order in which they were added."""
        return [each for reference in tuple(self._references) if (each := reference()) is not None]


_listeners: Final = WeakList[ProcessListener]()
# Senders of the parent: a child must not close their sockets and selectors, so they are never collected.
_of_the_parent: Final[list[object]] = []
_paused: Final[list[Callable[[], object]]] = []
# True from threading's exit on, and how long flushes and closes have held up the end since.
_is_exiting = False
_spent_seconds = 0.0


def listen(listener: ProcessListener) -> None:
    """Tell `listener` of the end of the process and of forks, for as long as it is referenced."""
    if listener not in all_listeners():
        _listeners.add(listener)
    watch_uvicorn()


def keep_for_parent(sender: object) -> None:
    """Never collect a sender that this process inherited by a fork."""
    _of_the_parent.append(sender)


def all_listeners() -> list[ProcessListener]:
    """Return the listeners that are still referenced."""
    return _listeners.referenced()


def begin_last_flushes(share: float = 1.0, seconds: float | None = None) -> list[Wait]:
    """Start the last flush of every listener; return a function for each that waits for it, in a thread that may."""
    waits = [logged(partial(each.begin_last_flush, share, seconds))() for each in all_listeners()]
    return [logged(wait) for wait in waits if wait is not None]


def logged(step: Callable[[], T]) -> Callable[[], T | None]:
    """Return `step` with its exception logged: one listener that fails must not stop the flush of the others."""

    def run() -> T | None:
        try:
            return step()
        except Exception:
            _logger.exception("a sender could not be flushed at the end of the process")
            return None

    return run


def _flush_all(share: float = 1.0) -> None:
    for wait in begin_last_flushes(share):
        wait()


class SpareThread:
    """A daemon thread that waits for its work, because it may be too late to start a thread when the work comes."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.thread = threading.Thread(target=self._wait_and_run, name=name, daemon=True)
        self.thread.start()

    def run(self, work: Callable[[], object]) -> None:
        """Let the thread do this, and end. A second work is not done."""
        self._work.put(work)

    def end(self) -> None:
        """End the thread, unless it has work."""
        self.run(lambda: None)

    def _wait_and_run(self) -> None:
        self._work.get()()


def spare_thread(name: str, owner: object) -> SpareThread | None:
    """Return a spare thread where a version of Python needs one; None also if no thread can be started now.

    It ends when its owner is collected, unless it has work.
    """
    if not NEEDS_SPARE_THREADS:
        return None
    with contextlib.suppress(RuntimeError):
        spare = SpareThread(name)
        weakref.finalize(owner, spare.end).atexit = False
        return spare
    return None


# Threading's exit and atexit


def seconds_to_close(bound: float, closers: int) -> float:
    """Return how long the first of `closers`, which close one after the other, may take; `bound` unless Python exits.

    At the exit, `bound` is one deadline for the process: what earlier flushes and closes took counts. All `closers`
    together get 70 % of the rest, because other listeners close after them.
    """
    return max(0.0, bound - _spent_seconds) * FLUSH_SHARE / closers if _is_exiting else bound


@contextlib.contextmanager
def counted_at_exit() -> Iterator[None]:
    """Count the time of this block, if the process exits, for those that close after it."""
    global _spent_seconds  # noqa: PLW0603 - the process exits once
    began = monotonic()
    try:
        yield
    finally:
        if _is_exiting:
            _spent_seconds += monotonic() - began


def _main_thread_ended() -> None:
    global _is_exiting  # noqa: PLW0603 - as above
    _is_exiting = True
    with counted_at_exit():
        _flush_all(FLUSH_SHARE)
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # The interpreter joins this thread too, because it is not a daemon.
        closer = threading.Thread(target=_close_after_other_threads, name="kpl-closer", daemon=False)
        try:
            closer.start()
        except RuntimeError:
            _close_all()


def _close_after_other_threads() -> None:
    """Close in a child of multiprocessing, which has no `atexit`, once its other non-daemon threads have ended."""
    while others := [each for each in threading.enumerate() if _is_awaited(each)]:
        others[0].join()
    _flush_all()
    _close_all()


def _is_awaited(thread: threading.Thread) -> bool:
    return not thread.daemon and thread not in {threading.current_thread(), threading.main_thread()}


def _close_all() -> None:
    listeners = all_listeners()
    _begin_exits()
    for each in listeners:
        each.close_in_child()


def _begin_exits() -> None:
    for wait in [wait for each in all_listeners() if (wait := each.begin_exit(_spent_seconds)) is not None]:
        wait()


# Forks


def _pause_all() -> None:
    _paused.extend([each.pause_for_fork(_PAUSE_SECONDS) for each in all_listeners()])


def _go_on() -> None:
    while _paused:
        _paused.pop()()


def _begin_children() -> None:
    _paused.clear()
    working_threads.clear()
    for each in all_listeners():
        each.begin_child()


def import_early(config: Config) -> None:
    """Import what a producer of `config` imports when it opens, on asyncio and over the network.

    A fork inside an import would leave the child half a module, so it waits; on a busy machine that is many seconds.
    """
    import_transport(config)
    if config.spool is not None or config.dead_letters is not None:
        # The producer says what is missing when it opens.
        with contextlib.suppress(ModuleNotFoundError):
            import_module("kpl_core.producer.durable_store")
    if config.coordination is not None:
        import_module("kpl_core.producer.coordination_driver")
    import_module("anyio._backends._asyncio")  # anyio and name resolution import these at their first use
    import_module("encodings.idna")
    _ = producer_version()  # importlib.metadata imports more at its first use, from Python 3.12 on


# uvicorn


def watch_uvicorn() -> None:
    """Flush at the end of `uvicorn.Server.shutdown`, if uvicorn is imported; once.

    uvicorn restores the signal handlers that it found and raises the signal again, which ends the process without
    threading's exit and without atexit. `shutdown` is the last public method that it calls before. After SIGTERM no
    listener closes, so each reports what it has not delivered.
    """
    server: Any = getattr(sys.modules.get("uvicorn.server"), "Server", None)
    if server is None or getattr(server, "kpl_flushes", False):
        return
    server.kpl_flushes = True
    shutdown = getattr(server, "shutdown", None)
    if not inspect.iscoroutinefunction(shutdown):
        _logger.warning("uvicorn.Server has no coroutine `shutdown`: SIGTERM may lose records; use KinesisLifespan")
        return

    @wraps(shutdown)
    async def shutdown_and_flush(stopped: Any, *args: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's own
        try:
            await shutdown(stopped, *args, **options)
        finally:
            for wait in begin_last_flushes():
                await asyncio.to_thread(wait)
            # Not public. After SIGINT, or stopped by its program, the process goes on and closes its senders.
            if signal.SIGTERM in getattr(stopped, "_captured_signals", (signal.SIGTERM,)):
                for each in all_listeners():
                    await asyncio.to_thread(logged(each.end_by_signal))

    server.shutdown = shutdown_and_flush


# Not public, but what concurrent.futures itself uses. Without it, everything is left to atexit.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_main_thread_ended)
atexit.register(_begin_exits)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_all, after_in_parent=_go_on, after_in_child=_begin_children)
