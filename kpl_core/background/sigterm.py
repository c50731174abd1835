"""SIGTERM: background senders deliver first, then the signal does what was set for it before.

A Python signal handler runs in the main thread, in the middle of any call. The interrupted code may hold any lock: a
sender's, that of `logging`, or the one under which threads start. So the handler takes no lock, waits for nothing and
starts no thread. Each signal calls it twice:

    first call     wakes a thread that exists already, by `SimpleQueue.put`, which is reentrant; the application goes on
    that thread    flushes within the bound, says on stderr what is left, and raises the signal again
    second call    ends the process, calls the application's handler, or ignores the signal, as was set before

A second signal during the flush is a second call too, so it ends the process at once. An application whose main thread
ends during the flush waits in threading's exit, so that the second call comes in any case.

If the signal ends the process, listeners accept nothing during the flush: a put waits until the end, or is refused once
a sender is held up, because the thread that waits may hold a lock that the delivery needs. OpenTelemetry's exporters
have no put that could wait. Where the application has a handler, puts go on, and that handler decides.

A forked child has no such thread and starts one. A child of multiprocessing without a handler of its own gets this one,
because SIGTERM is how a `Pool` ends its children.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import monotonic, process_time, sleep
from types import FrameType
from typing import Any, Final

from kpl_core.background.process_end import (
    NOT_ADMITTED,
    Intake,
    all_listeners,
    begin_last_flushes,
    begin_working,
    logged,
    working_threads,
)
from kpl_core.errors import ConfigError

# True: flush within `DEFAULT_SECONDS`; a number: within so many seconds; False: not at all; None: only in children of
# multiprocessing that have no handler of their own.
FlushOnSigterm = bool | float | None

DEFAULT_SECONDS: Final = 3.0
# How long the report on stderr may take: the pipe may be full.
_REPORT_SECONDS: Final = 0.5
# For how long puts wait although a sender is held up, and the share of a core that a process uses if it is not.
_STANDSTILL_SECONDS: Final = 0.5
_WORKING_SHARE: Final = 0.04
# How long before the bound they are refused in any case, if nothing moves.
_REFUSED_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.01
# How often the signal is raised until the main thread handles it.
_AGAIN_SECONDS: Final = 0.05
# How often the main thread is interrupted until it runs our handler, and how often for a handler of the application.
_INTERRUPTS: Final = 100
_INTERRUPTS_OF_OTHERS: Final = 10
# How often it is interrupted, at least, while the wakeup file descriptor is that of `trio.run`, say.
_LOOK_SECONDS: Final = 1.0


class _Flush:
    """The flush of one signal; `deadline` is an instant on the monotonic clock."""

    def __init__(self, number: int, *, ends_process: bool) -> None:
        self.number = number
        self.ends_process = ends_process
        self.handler = signal.getsignal(number)
        self.began_at = monotonic()
        self.deadline = self.began_at + _bound_seconds

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - monotonic())


# The longest bound that any sender asked for.
_bound_seconds = 0.0
# Between the first call of the handler and the second, the flush.
_current: _Flush | None = None
# While the handler that was set before runs.
_is_passed_on = False


class _FlushThread:
    """The thread that a signal handler wakes."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._flushes: SimpleQueue[_Flush] = SimpleQueue()
        threading.Thread(target=self._run, name="kpl-sigterm", daemon=True).start()

    def begin(self, flush: _Flush) -> None:
        """Start a flush; a signal handler may call this anywhere."""
        self._flushes.put(flush)

    def _run(self) -> None:
        working_threads.add(threading.get_ident())
        while True:
            _flush_and_raise_again(self._flushes.get())


_thread: _FlushThread | None = None


def _flush_and_raise_again(flush: _Flush) -> None:
    global _current  # noqa: PLW0603 - one signal
    stopped: list[Intake] = []
    begin_working(partial(_deliver, flush, stopped)).wait(flush.seconds_left)
    begin_working(partial(_report, flush)).wait(_REPORT_SECONDS)
    # Again and again: a signal that comes just before the main thread enters a system call does not interrupt it.
    while _current is flush:
        _raise_in_main_thread(flush.number)
        sleep(_AGAIN_SECONDS)
        if signal.getsignal(flush.number) is not flush.handler:
            # The application has replaced the handler meanwhile, and its own has got the signal.
            _current = None
    for intake in stopped:
        intake.go_on()


def _wait_for_second_call() -> None:
    """Let a signal that has begun a flush end the process, rather than the end of its main thread."""
    flush = _current
    while flush is not None and _current is flush:
        sleep(_AGAIN_SECONDS)
        if monotonic() >= flush.deadline + 2 * _REPORT_SECONDS:
            # CPython 3.12 starts no thread any more, so that nothing bounds the report to a stderr that is full.
            signal.raise_signal(flush.number)


def _raise_in_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, number)
    else:
        signal.raise_signal(number)


def _deliver(flush: _Flush, intakes: list[Intake]) -> None:
    """Flush. If the signal ends the process, stop the intakes for it, which are added to `intakes`."""
    if not flush.ends_process:
        _begin_flush(flush).wait(flush.seconds_left)
        return
    for intake in [each.intake for each in all_listeners() if each.intake is not None]:
        intakes.append(intake)
        intake.stop()
        if _current is not flush:
            # The bound was over, and the application goes on.
            intake.go_on()
    # After the stop, so that it has everything that was accepted: what is on its way from a queue to a producer is in
    # no count for a moment.
    ended = _begin_flush(flush)
    if not _has_delivered(flush, ended, _STANDSTILL_SECONDS):
        for intake in intakes:
            intake.refuse()
        _ = _has_delivered(flush, ended, math.inf)


def _has_delivered(flush: _Flush, ended: threading.Event, patience: float) -> bool:
    """Wait until nothing is left. Return False at the deadline, or once a sender is held up for `patience` seconds.

    It is held up if it makes no step, nothing is delivered, and the process uses no CPU time. One that waits for an
    answer makes steps, and one in a long step uses CPU time, on a busy machine too.
    """
    least, steps = math.inf, _begin_steps()
    moved_at, used_at = monotonic(), process_time()
    while (left := _count_undelivered()) or not ended.is_set():
        now = monotonic()
        # With nothing left a sender's steps say nothing: the flush itself may wait, for a thread whose put waits.
        if left < least or (left and all(step.is_set() for step in steps)):
            least, steps = min(least, left), _begin_steps()
            moved_at, used_at = now, process_time()
        stood = now - moved_at
        # In the end threads of the application may use the CPU time.
        is_working = process_time() - used_at >= _WORKING_SHARE * stood and now < flush.deadline - _REFUSED_SECONDS
        if (stood >= patience and not is_working) or now >= flush.deadline:
            return False
        if ended.is_set():
            # A put that had waited in a sender's loop was accepted after the flush began.
            ended = _begin_flush(flush)
        _ = ended.wait(_POLL_SECONDS)
    return True


def _begin_steps() -> list[threading.Event]:
    """Return an event for each sender, which its next step sets."""
    begun: list[threading.Event] = []
    for each in all_listeners():
        step, sender = threading.Event(), each.sender
        if sender is not None and sender.run_soon(step.set):
            begun.append(step)
    return begun


def _begin_flush(flush: _Flush) -> threading.Event:
    def run() -> None:
        for wait in begin_last_flushes(seconds=flush.seconds_left):
            wait()

    return begin_working(run)


def _undelivered() -> list[tuple[int, str]]:
    """Return how many records each listener still has, and what they are."""
    found = [logged(each.undelivered)() for each in all_listeners()]
    return [each for each in found if each is not None and each[0]]


def _count_undelivered() -> int:
    return sum(count for count, _ in _undelivered())


def _report(flush: _Flush) -> None:
    seconds = monotonic() - flush.began_at
    listed = ", ".join(f"{count:,} {noun}" for count, noun in _undelivered())
    refused = sum(each.intake.refused_unheard for each in all_listeners() if each.intake is not None)
    sentences = []
    if listed:
        sentences.append(f"not delivered {seconds:.1f} s after SIGTERM: {listed}; lost if the process ends now")
    if refused:
        sentences.append(f"log records refused: {refused:,}; {NOT_ADMITTED}")
    with contextlib.suppress(Exception):  # stderr is closed, missing, or the application's own
        sys.stderr.write("".join(f"kpl_core: {sentence}\n" for sentence in sentences))
        sys.stderr.flush()


# The handler


def flush_on_sigterm(within: FlushOnSigterm) -> None:
    """Flush at SIGTERM, then do what was set before: call its handler, end the process, or ignore the signal.

    Raises:
        ConfigError: the bound is not a number of seconds above 0; this is not the main thread; or a handler is set that
            Python cannot call.
    """
    global _bound_seconds  # noqa: PLW0603 - one signal, one bound
    if within is None:
        flush_in_child_of_multiprocessing()
    if within is None or within is False:
        return
    # A configuration file may give anything.
    seconds: Any = DEFAULT_SECONDS if within is True else within
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        message = f"flush_on_sigterm is {within!r}; it must be True, False, None or a number of seconds above 0"
        raise ConfigError(message)
    previous = signal.getsignal(signal.SIGTERM)
    if not _is_ours(previous):
        if threading.current_thread() is not threading.main_thread():
            message = "flush_on_sigterm is set in a thread; Python sets signal handlers in the main thread only"
            raise ConfigError(message)
        if previous is None:
            message = "flush_on_sigterm is set, but SIGTERM has a handler that was not set from Python; leave it out"
            raise ConfigError(message)
        _install(previous)
    _bound_seconds = max(_bound_seconds, seconds)


def flush_before_sigterm() -> None:
    """Flush at SIGTERM if it would end the process, that is, unless the application handles it.

    `opentelemetry-instrument` calls this through an entry point once it has configured everything. A server that
    handles the signal restores this handler when it has shut down, and raises the signal again.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and all_listeners() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        flush_on_sigterm(DEFAULT_SECONDS)


def flush_in_child_of_multiprocessing() -> None:
    """Flush at SIGTERM in a child of multiprocessing, unless it has a handler, or every sender has opted out."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return
    if any(each.flushes_at_sigterm for each in all_listeners()):
        flush_before_sigterm()
        is_main_thread = threading.current_thread() is threading.main_thread()
        # A forked child may have inherited the handler.
        if is_main_thread and _is_installed() and _interrupter is None:
            _interrupt_main_thread_at_sigterm()


def _interrupt_main_thread_at_sigterm() -> None:
    global _interrupter  # noqa: PLW0603 - one for each process
    main = threading.main_thread().ident
    if main is None or not hasattr(signal, "SIGURG"):
        return
    if signal.getsignal(signal.SIGURG) not in {signal.SIG_DFL, _interrupted}:
        return
    # `trio.run` sets its own descriptor, under which it hears the signal, and sets ours again at its end.
    warnings.filterwarnings("ignore", "It looks like Trio's signal handling code might have collided", RuntimeWarning)
    signal.signal(signal.SIGURG, _interrupted)
    _interrupter = _Interrupter(main)


class _Interrupter:
    """Interrupts the main thread's system call at SIGTERM until the handler has run; in a thread.

    A signal that comes just before the call does not interrupt it, and Python runs no handler meanwhile. A pool sends
    SIGTERM at such moments: its workers wait for a semaphore that its parent has taken. The thread learns of the signal
    from the C handler, through the wakeup file descriptor, and interrupts by SIGURG, which is ignored by default. Where
    another has the descriptor, it interrupts all the same now and then, and takes it once it is free.
    """

    def __init__(self, main: int) -> None:
        self._main = main
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self.has_wakeup_fd = False
        self.take_wakeup_fd()
        threading.Thread(target=self._run, name="kpl-sigterm-interrupt", daemon=True).start()

    def take_wakeup_fd(self) -> None:
        """Let the C handler write to this thread, unless it writes to another; in the main thread."""
        before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self.has_wakeup_fd = before in {-1, self._writing}
        if not self.has_wakeup_fd:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)

    def _run(self) -> None:
        pause = _AGAIN_SECONDS
        while not self.has_wakeup_fd:
            sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
            signal.pthread_kill(self._main, signal.SIGURG)
        while numbers := os.read(self._reading, 64):
            tries = _INTERRUPTS if _is_installed() else _INTERRUPTS_OF_OTHERS
            while tries and _current is None and signal.SIGTERM in numbers:
                tries -= 1
                sleep(_AGAIN_SECONDS)
                signal.pthread_kill(self._main, signal.SIGURG)


_interrupter: _Interrupter | None = None


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    """Python runs the handlers of other signals first."""
    if _interrupter is not None and not _interrupter.has_wakeup_fd:
        _interrupter.take_wakeup_fd()


def _is_ours(handler: object) -> bool:
    return getattr(handler, "flushes_senders", False)


def _is_installed() -> bool:
    return _is_ours(signal.getsignal(signal.SIGTERM))


def _install(previous: Any) -> None:  # noqa: ANN401 - as getsignal returns it
    global _thread  # noqa: PLW0603 - one for each process
    if _thread is None:
        _thread = _FlushThread()
    signal.signal(signal.SIGTERM, _flush_before(previous))


def _flush_before(previous: Any) -> Callable[[int, FrameType | None], None]:  # noqa: ANN401 - as above
    """Return a handler that lets the thread flush at its first call, and does what was set before at its second.

    Each has its own `previous`: the application may set a handler in between that calls the one before it.
    """

    def flush_and_go_on(number: int, frame: FrameType | None) -> None:
        global _current  # noqa: PLW0603 - one signal
        thread = _thread
        if _current is None and not _is_passed_on and thread is not None and thread.process == os.getpid():
            _current = flush = _Flush(number, ends_process=previous is signal.SIG_DFL)
            thread.begin(flush)
        else:
            _current = None
            _pass_on(previous, number, frame)

    flush_and_go_on.flushes_senders = True  # type: ignore[attr-defined]
    return flush_and_go_on


def _pass_on(previous: Any, number: int, frame: FrameType | None) -> None:  # noqa: ANN401 - as above
    global _is_passed_on  # noqa: PLW0603 - one signal
    if previous is signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    elif callable(previous):
        _is_passed_on = True
        try:
            previous(number, frame)
        finally:
            _is_passed_on = False


# Forks


_is_watching_multiprocessing = False


def _watch_multiprocessing() -> None:
    """Let each child of multiprocessing look whether it flushes at SIGTERM; once multiprocessing is imported."""
    global _is_watching_multiprocessing  # noqa: PLW0603 - once
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _is_watching_multiprocessing:
        _is_watching_multiprocessing = True
        util.register_after_fork(flush_in_child_of_multiprocessing, lambda look: look())


def _begin_child() -> None:
    global _current, _interrupter, _is_passed_on, _thread  # noqa: PLW0603 - one for each process
    had_thread, _thread = _thread is not None, None
    _current, _is_passed_on = None, False
    if _interrupter is not None and _interrupter.has_wakeup_fd:
        # The parent's: its thread would take the child's signals for its own.
        signal.set_wakeup_fd(-1)
    _interrupter = None
    if had_thread:
        with contextlib.suppress(RuntimeError):  # without a thread the handler does what was set before
            _thread = _FlushThread()


_watch_multiprocessing()
# Not public, as in `process_end`, whose exit was registered first and so runs after this one.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_wait_for_second_call)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_watch_multiprocessing, after_in_child=_begin_child)
