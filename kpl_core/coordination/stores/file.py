"""A store in a folder, for the workers of one machine.

Objects are files, replaced by an atomic rename. The condition is checked and the rename done under an advisory lock on
one file of the folder, which the kernel releases when its holder dies. The version is the file's modification time in
nanoseconds. The lock file contains the latest version, so that no two writes have the same one: inodes are reused, and
the kernel's own timestamps have a resolution of milliseconds.

A cancelled call returns when its thread has ended, so that no write follows. Only if the disk hangs does it return
after half a second, and leave its thread behind.

Use a local disk or a memory file system (/dev/shm, /run); network file systems keep none of these guarantees. A disk
that hangs blocks at most eight threads, and none of the application's shared worker threads.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote

import anyio
import anyio.from_thread
import anyio.to_thread

from kpl_core.coordination.store import ABSENT, Listing, Reading, StoreAddress, StoreFailed, Written
from kpl_core.errors import ConfigError

_LOCK: Final = ".lock"
_TEMPORARY: Final = ".writing-"
# The lock is held for one rename of a small file. A longer wait means that the holder is stopped or its disk hangs.
_LOCK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.002
# At most four calls run at a time, and at most four more are left behind.
_MOST_THREADS: Final = 4
_CANCEL_SECONDS: Final = 0.5
_Answer = TypeVar("_Answer")


async def open_store(address: StoreAddress) -> "FileStore":
    """Open `file:///path/of/a/folder`."""
    host, path = address.parts.netloc, unquote(address.parts.path)
    if host or len(path) <= 1:
        message = f"store is 'file://{host}{path}'; give the full path of a folder, as in file:///run/kpl/orders"
        raise ConfigError(message)
    return FileStore(Path(path))


class FileStore:
    """Objects in `folder`, which is created if missing, with permissions for this user only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = anyio.CapacityLimiter(_MOST_THREADS)
        # Calls whose threads have not ended. Those that were cancelled and hang have given back their tokens.
        self._running: set[object] = set()

    async def read(self, name: str) -> Reading:
        """Return one object."""
        return await self._in_thread(lambda: self._read(name))

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version."""
        return await self._in_thread(lambda: self._write(name, body, expected))

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`."""
        return await self._in_thread(lambda: self._read_all(prefix))

    async def delete(self, name: str) -> None:
        """Remove an object."""
        await self._in_thread(lambda: (self._folder / name).unlink(missing_ok=True))

    async def aclose(self) -> None:
        """Do nothing: no call leaves anything behind."""

    async def _in_thread(self, work: Callable[[], _Answer]) -> _Answer:
        if len(self._running) - self._threads.borrowed_tokens >= _MOST_THREADS:
            message = f"folder {self._folder}: {_MOST_THREADS} earlier calls have not returned; check its disk"
            raise StoreFailed(message, reason="down")
        call = object()

        def run() -> _Answer:
            self._running.add(call)
            try:
                anyio.from_thread.check_cancelled()
                return work()
            finally:
                self._running.discard(call)

        try:
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._threads)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_CANCEL_SECONDS, shield=True):
                while call in self._running:  # noqa: ASYNC110 - a thread that hangs sets no event
                    await anyio.sleep(_POLL_SECONDS)
            raise
        except PermissionError as error:
            message = f"folder {self._folder}: {error.strerror}; make it readable and writable for this process"
            raise StoreFailed(message, reason="denied") from error
        except OSError as error:
            message = f"folder {self._folder}: {error.strerror}; check its disk"
            raise StoreFailed(message, reason="down") from error

    def _read(self, name: str) -> Reading:
        try:
            with (self._folder / name).open("rb") as file:
                return Reading(file.read(), _version(os.fstat(file.fileno())), time.time())
        except FileNotFoundError:
            return Reading(None, ABSENT, time.time())

    def _write(self, name: str, body: bytes, expected: str | None) -> Written:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / name
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
            with self._locked() as lock:
                if expected is not None and expected != self._current(path):
                    Path(temporary).unlink()
                    return Written(None, time.time())
                changed_at = max(time.time_ns(), _latest(os.pread(lock, 32, 0)) + 1)
                os.pwrite(lock, b"%020d" % changed_at, 0)
                os.utime(temporary, ns=(changed_at, changed_at))
                Path(temporary).replace(path)
                return Written(_version(path.stat()), time.time())
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink(missing_ok=True)
            raise

    @staticmethod
    def _current(path: Path) -> str:
        try:
            return _version(path.stat())
        except FileNotFoundError:
            return ABSENT

    def _read_all(self, prefix: str) -> Listing:
        bodies: dict[str, bytes] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(prefix):
                    # The file was deleted meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        bodies[entry.name] = Path(entry.path).read_bytes()
        return Listing(bodies, time.time())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if self._is_locked(descriptor):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
            if time.monotonic() > deadline:
                message = (
                    f"folder {self._folder}: another process holds its lock; check whether that process is stopped"
                )
                raise StoreFailed(message, reason="slow")
            # Not a blocking flock, because a thread inside it would not notice that its call is cancelled.
            anyio.from_thread.check_cancelled()
            time.sleep(_POLL_SECONDS)

    def _is_locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A clean-up job may have deleted the file that was opened; then another file is the lock now.
            return os.path.samestat(os.fstat(descriptor), (self._folder / _LOCK).stat())
        except (BlockingIOError, FileNotFoundError):
            return False


def _latest(written: bytes) -> int:
    """Return the version in the lock file; 0 if the file is new or has other contents."""
    return int(written) if written.isdigit() else 0


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"
