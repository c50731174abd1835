"""A store in a folder, for the workers of one machine.

Objects are files, replaced by an atomic rename. The condition is checked and the rename done under an advisory lock on
one file of the folder, which the kernel releases when its holder dies. The version is the file's modification time in
nanoseconds. The lock file contains the latest version, so that no two writes have the same one: inodes are reused, and
the kernel's own timestamps have a resolution of milliseconds.

Other users of the machine may write to folders such as /dev/shm. So the files are in a subfolder that this user owns
and other users may not enter. The folder is opened once per call, and every file relative to it, without following
symbolic links. `shared=True` keeps the files in the folder itself, for processes of several users in one group.
A cancelled call returns when its thread has ended, so that no write follows. Only if the disk hangs does it return
after half a second, and leave its thread behind.

Use a local disk or a memory file system (/dev/shm, /run); network file systems keep none of these guarantees. A disk
that hangs blocks at most eight threads, and none of the application's shared worker threads.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar
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
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CANCEL_SECONDS: Final = 0.5
_Answer = TypeVar("_Answer")


async def open_store(address: StoreAddress) -> "FileStore":
    """Open `file:///path/of/a/folder`, with `?shared=true` for processes of several users in one group."""
    host, path = address.parts.netloc, unquote(address.parts.path)
    if host or len(path) <= 1:
        message = f"store is 'file://{host}{path}'; give the full path of a folder, as in file:///run/kpl/orders"
        raise ConfigError(message)
    shared = address.query.get("shared", "false")
    if address.query.keys() - {"shared"} or shared not in {"true", "false"}:
        message = f"store is the folder {path} with an unknown parameter; it may have ?shared=true"
        raise ConfigError(message)
    return FileStore(Path(path), shared=shared == "true")


class FileStore:
    """Objects in a subfolder of `folder` that only this user may read. Both are created if missing.

    `shared`: the objects are in `folder` itself, and the group of the folder may read and write them. If this store
    creates the folder, its mode is 2770 and its group is that of this process.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self._parent = folder
        self._own = None if shared else f"kpl-{os.geteuid()}"
        self._folder = folder if self._own is None else folder / self._own
        self._mode = 0o660 if shared else 0o600
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
        await self._in_thread(lambda: self._delete(name))

    async def aclose(self) -> None:
        """Do nothing: no call keeps a file open."""

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
        _require_name(name)
        with contextlib.suppress(FileNotFoundError), self._opened() as folder, _reading(name, folder) as file:
            return Reading(file.read(), _version(os.fstat(file.fileno())), time.time())
        return Reading(None, ABSENT, time.time())

    def _delete(self, name: str) -> None:
        _require_name(name)
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)

    def _write(self, name: str, body: bytes, expected: str | None) -> Written:
        _require_name(name)
        with self._opened(create=True) as folder:
            temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
                    os.fchmod(descriptor, self._mode)
                    file.write(body)
                with self._locked(folder) as lock:
                    if expected is not None and expected != _current(name, folder):
                        os.unlink(temporary, dir_fd=folder)
                        return Written(None, time.time())
                    changed_at = max(time.time_ns(), _latest(os.pread(lock, 32, 0)) + 1)
                    os.pwrite(lock, b"%020d" % changed_at, 0)
                    os.utime(temporary, ns=(changed_at, changed_at), dir_fd=folder)
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                    return Written(_current(name, folder), time.time())
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def _read_all(self, prefix: str) -> Listing:
        bodies: dict[str, bytes] = {}
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            for name in os.listdir(folder):  # noqa: PTH208 - a descriptor
                if name.startswith(prefix):
                    # The file was deleted meanwhile.
                    with contextlib.suppress(FileNotFoundError), _reading(name, folder) as file:
                        bodies[name] = file.read()
        return Listing(bodies, time.time())

    @contextlib.contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder with the objects, after checking its owner and its mode."""
        if create:
            self._create()
        parent = os.open(self._parent, _FOLDER)
        try:
            mode = os.fstat(parent).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise self._unsafe(self._parent, f"mode {stat.S_IMODE(mode):04o} lets every user replace its files")
            if self._own is None:
                yield parent
                return
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._own, 0o700, dir_fd=parent)
            own = self._opened_own(self._own, parent)
            try:
                yield own
            finally:
                os.close(own)
        finally:
            os.close(parent)

    def _create(self) -> None:
        try:
            self._parent.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            return
        if self._own is None:
            # mkdir applies the umask, chmod does not. New files get the group of a folder with the set-group-id bit.
            self._parent.chmod(0o2770)

    def _opened_own(self, name: str, parent: int) -> int:
        try:
            own = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise self._unsafe(self._folder, "it is not a folder, but a link or a file") from error
            raise
        status = os.fstat(own)
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return own
        os.close(own)
        mode = stat.S_IMODE(status.st_mode)
        raise self._unsafe(self._folder, f"it belongs to user id {status.st_uid} with mode {mode:04o}, not 0700")

    @staticmethod
    def _unsafe(folder: Path, why: str) -> StoreFailed:
        message = f"folder {folder} is not safe: {why}; remove it, or use a folder that only this user may write"
        return StoreFailed(message, reason="denied")

    @contextlib.contextmanager
    def _locked(self, folder: int) -> Iterator[int]:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _FILE, self._mode, dir_fd=folder)
            try:
                if self._own is None and os.fstat(descriptor).st_uid == os.geteuid():
                    # For the group: the umask of this process may have removed its permissions.
                    os.fchmod(descriptor, self._mode)
                if self._is_locked(descriptor, folder):
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

    @staticmethod
    def _is_locked(descriptor: int, folder: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A clean-up job may have deleted the file that was opened; then another file is the lock now.
            return os.path.samestat(os.fstat(descriptor), os.stat(_LOCK, dir_fd=folder, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            return False


def _require_name(name: str) -> None:
    # Names that begin with a dot are the lock, temporary files and "..".
    if not name or name[0] == "." or "/" in name or "\0" in name:
        message = f"object name {name!r} is not a file name; use letters, digits, hyphens and dots, not a dot first"
        raise StoreFailed(message, reason="garbage")


def _reading(name: str, folder: int) -> BinaryIO:
    return open(os.open(name, os.O_RDONLY | _FILE, dir_fd=folder), "rb")  # noqa: PTH123 - a descriptor


def _current(name: str, folder: int) -> str:
    try:
        return _version(os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return ABSENT


def _latest(written: bytes) -> int:
    """Return the version in the lock file; 0 if the file is new or has other contents."""
    return int(written) if written.isdigit() else 0


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"
