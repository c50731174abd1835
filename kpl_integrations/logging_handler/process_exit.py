"""The end of the process, and its doubling.

At exit, the senders are flushed before concurrent.futures and asyncio lose their threads, while names can be
resolved and connections opened; the handlers stay open until logging itself shuts them down, at `atexit`.
After a fork, the child begins anew: what was accepted before is the parent's to send.
"""

import concurrent.futures.thread  # registers its own exit first, so that ours runs before it
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kpl_integrations.logging_handler.own_threads import OWN_THREADS

if TYPE_CHECKING:
    from kpl_integrations.logging_handler.handler import KinesisHandler

__all__ = ["watch"]

_handlers: "weakref.WeakSet[KinesisHandler]" = weakref.WeakSet()
# Closed, but not yet at their end: nobody else refers to them.
_closing: "set[KinesisHandler]" = set()
_inherited: Final[list[object]] = []
_parked: Final[list[Callable[[], None]]] = []
# A sender stands still within milliseconds, but for the one step that makes its client: tenths of a second of CPU,
# which on a busy machine is seconds. A child that was forked in that step could not make one.
_PARK_SECONDS: Final = 30.0


def watch(handler: "KinesisHandler") -> None:
    """Take part in the end of the process and in forks."""
    _handlers.add(handler)


def keep_until_closed(handler: "KinesisHandler") -> None:
    """Let a handler live, and the exit wait for it, until its sender has ended."""
    _closing.add(handler)


def let_go(handler: "KinesisHandler") -> None:
    """It has ended."""
    _closing.discard(handler)


def inherit(sender: object) -> None:
    """Keep a parent's sender for ever: its sockets and its selector are the parent's too, so nobody may close them."""
    _inherited.append(sender)


def _flush_early() -> None:
    handlers = list(_handlers)
    pending = [(handler, handler.begin_exit()) for handler in handlers]
    for handler, flushed in pending:
        if flushed is not None:
            with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                flushed.result(max(0.0, handler.exit_deadline - time.monotonic()))
    for handler in list(_closing):
        handler.finish_closing()
    # multiprocessing's children end without `atexit`, and so without logging's shutdown.
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        for handler in handlers:
            handler.close()


def _park() -> None:
    _parked.extend([handler.park(_PARK_SECONDS) for handler in list(_handlers)])


def _go_on() -> None:
    while _parked:
        _parked.pop()()


def _begin_anew() -> None:
    _parked.clear()
    _closing.clear()
    OWN_THREADS.clear()
    for handler in list(_handlers):
        handler.begin_anew()


# Not public, but what concurrent.futures itself uses; without it, the flush is left to logging's shutdown.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_flush_early)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_park, after_in_parent=_go_on, after_in_child=_begin_anew)
