"""What becomes of a producer in a thread of its own when its process forks or ends.

A child has the parent's producers without their threads: they are closed there. A process that ends without having
closed one would take what waits down with it: first everything put so far is delivered, while the process still can
open connections; then, when all other threads have ended, the producer is closed.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its own end first, so that ours comes before it
import contextlib
import logging
import os
import threading
import weakref
from time import monotonic
from typing import Final, Protocol

from kpl_core.errors import KplError
from kpl_core.producer.report import ProducerReport

__all__ = ["take_part"]

_logger: Final = logging.getLogger("kpl_core")
# Of both steps together: a process that is told to end has 10 seconds or more, from most who tell it.
_EXIT_SECONDS: Final = 5.0
_CLOSE_SHARE: Final = 0.3


class Threaded(Protocol):
    """A producer with a thread."""

    @property
    def is_open(self) -> bool:
        """Say whether it takes records."""

    def begin_child(self) -> None:
        """Be closed, in a child."""

    def flush(self, timeout: float) -> ProducerReport:
        """Deliver what was put."""

    def close(self, timeout: float) -> ProducerReport:
        """Deliver what was put, and end."""


_entered: Final["weakref.WeakSet[Threaded]"] = weakref.WeakSet()


def take_part(producer: Threaded) -> None:
    """Look after a producer that was entered; whoever is still in use is kept alive by its thread."""
    _entered.add(producer)


def _unclosed() -> list[tuple[Threaded, float]]:
    """Return those nobody closed, each with its share of the time that is left, also if one hangs."""
    producers = [each for each in list(_entered) if each.is_open]
    return [(each, 1 / (len(producers) - position)) for position, each in enumerate(producers)]


def _flush_unclosed() -> None:
    deadline = monotonic() + _EXIT_SECONDS * (1 - _CLOSE_SHARE)
    for producer, share in _unclosed():
        with contextlib.suppress(KplError):
            producer.flush(max(0.0, deadline - monotonic()) * share)


def _close_unclosed() -> None:
    deadline = monotonic() + _EXIT_SECONDS * _CLOSE_SHARE
    for producer, share in _unclosed():
        with contextlib.suppress(KplError):
            report = producer.close(max(0.0, deadline - monotonic()) * share)
            if not report.complete or report.failed_total:
                _logger.warning("the process ended before a BlockingProducer was closed: %s", report)


def _begin_children() -> None:
    for producer in list(_entered):
        producer.begin_child()


# Not public, but what concurrent.futures itself uses; without it, all is left to `atexit`.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_flush_unclosed)
atexit.register(_close_unclosed)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_children)
