"""The lock file beside a spool: one process owns the file."""

import contextlib
import fcntl
import logging
import os
import weakref
from pathlib import Path
from typing import Final, Self

from kpl_core.durability.spool.spool_error import SpoolLocked, SpoolUnavailable

_logger: Final = logging.getLogger(__name__)
_held_locks: "weakref.WeakSet[ProcessLock]" = weakref.WeakSet()


class ProcessLock:
    """An advisory lock on a file beside the spool: one process owns a spool.

    It uses `flock` rather than `lockf`, so that opening a spool twice in one process fails too. The kernel releases
    the lock when the owner dies; the lock file stays. A child of `fork` inherits the descriptor and with it the lock,
    so the child closes it at once. Otherwise a forgotten child would still own the spool of a restarted service.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock without waiting.

        Raises:
            SpoolLocked: another process holds it; the message names the process id.
            SpoolUnavailable: the lock file cannot be created.
        """
        try:
            # Not through a link: the process id would overwrite the file that another user's link points to.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
                f"spool lock {self._path}: process {owner} owns this spool; stop it, or give each process its own spool"
            )
            raise SpoolLocked(message) from error
        # The process id serves only the message above, so a full disk is no reason to fail.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        self._descriptor = descriptor
        _held_locks.add(self)
        return self

    def is_held(self) -> bool:
        """Return True if no other process can have the lock.

        The name of the file must lead to what is locked. A file that was only removed, as by the `rm` of a start
        script, is made again.
        """
        if self._descriptor is None:
            return False
        mine = os.fstat(self._descriptor)
        try:
            named = self._path.lstat()
        except FileNotFoundError:
            return self._make_again()
        except OSError:  # the folder cannot be searched, or its file system fails
            return False
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    def _make_again(self) -> bool:
        removed, self._descriptor = self._descriptor, None
        try:
            # `acquire` would also take a file that another process has made, used and left.
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self.acquire()
        except (OSError, SpoolLocked, SpoolUnavailable):
            self._descriptor = removed
            return False
        if removed is not None:
            os.close(removed)
        _logger.warning("spool lock %s: the file was removed while in use, and is made again", self._path)
        return True

    def release(self) -> None:
        """Release the lock. May be called more than once."""
        if self._descriptor is not None:
            # Closing alone is not enough while a child forked just now still has the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the descriptor without unlocking; another process with the descriptor keeps the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held_locks.discard(self)


def _forget_in_child() -> None:
    for lock in list(_held_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)
