"""One process owns a spool: an advisory lock on a file beside it.

`flock` rather than `lockf`, so that opening a spool twice in one process is refused as well.
The kernel drops the lock when its owner dies, however it dies; the file itself stays. A
child of `fork` inherits the descriptor and with it the lock, so the child closes it at once:
else a restarted service would find its spool owned by a forgotten child.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path
from typing import Self

from kpl_core.durability.spool.spool_error import SpoolLocked, SpoolUnavailable

__all__ = ["ProcessLock"]

_held: "weakref.WeakSet[ProcessLock]" = weakref.WeakSet()


class ProcessLock:
    """Holds the lock of `path` from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock, without waiting.

        Raises:
            SpoolLocked: another process holds it; the message says which.
            SpoolUnavailable: the lock file cannot be created.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = (
                f"spool lock {self._path}: {error.strerror}; create its folder and make it writable for this process"
            )
            raise SpoolUnavailable(message) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            message = (
                f"spool lock {self._path}: process {owner} owns this spool; "
                f"stop it, or give each process a spool of its own"
            )
            raise SpoolLocked(message) from error
        # Only for the sentence above, so a full disk is no reason to fail.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        self._descriptor = descriptor
        _held.add(self)
        return self

    def release(self) -> None:
        """Give the lock back; again and again if you like."""
        if self._descriptor is not None:
            # Closing alone would not do while a child that was forked just now still has the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the descriptor; the lock stays with whoever else has it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)
