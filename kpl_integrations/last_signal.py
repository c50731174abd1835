"""The last flush of a program that knows nothing of it: when SIGTERM is about to end its process.

    opentelemetry-instrument uvicorn app:app

`opentelemetry-instrument` calls `flush_before_sigterm` when it has configured all, by an entry point; so this file
imports nothing that might not be installed.
"""

import contextlib
import signal
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from types import FrameType
from typing import Final

from kpl_integrations.last_flush import begin_last_flushes, has_parts

__all__ = ["flush_before_sigterm"]

# Those who are flushed have bounds of their own, 5 seconds by default. This is for one that waits for a lock which
# the interrupted thread holds: less than Kubernetes' 30.
_SECONDS: Final = 25.0


def flush_before_sigterm() -> None:
    """Flush when SIGTERM is about to end the process, as far as nobody else handles it; then let it end.

    A server that handles the signal gives it back when it has shut down, and raises it again.
    """
    if has_parts() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGTERM, _flush_and_end)


def _flush_and_end(number: int, _frame: FrameType | None) -> None:
    # The second time it ends at once.
    signal.signal(number, signal.SIG_DFL)
    done = allocate_lock()
    done.acquire()
    # This thread may hold any lock there is, even the one that threads are started under: it only waits, and not long.
    try:
        start_new_thread(_flush_all, (done.release,))
        done.acquire(timeout=_SECONDS)
    finally:
        signal.raise_signal(number)


def _flush_all(finished: Callable[[], object]) -> None:
    try:
        for wait in begin_last_flushes():
            wait()
    finally:
        finished()
