"""The threads that send, whose own log records no handler of ours takes: they would never come to an end."""

import logging
import os
import threading
from typing import Final

__all__ = ["OWN_THREADS", "enter_own_thread", "is_of_this_process", "leave_own_thread"]

# By identity as in `LogRecord.thread`.
OWN_THREADS: Final[set[int]] = set()


def enter_own_thread() -> None:
    """Make the current thread one of ours."""
    OWN_THREADS.add(threading.get_ident())


def leave_own_thread() -> None:
    """Make it anybody's again: the identity of an ended thread is given to another."""
    OWN_THREADS.discard(threading.get_ident())


def is_of_this_process(record: logging.LogRecord) -> bool:
    """Say whether a record was made here: one that came through a queue may be of a thread of the same identity.

    A forked child gives its first threads the very identities that the parent's have.
    """
    return record.process is None or record.process == os.getpid()


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.thread not in OWN_THREADS


# What the producer logs about its close, the handler says itself, with the count of log records.
logging.getLogger("kpl_core").addFilter(_is_not_ours)
