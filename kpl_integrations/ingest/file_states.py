"""Whether files have changed since they were read: the tenants file and its secrets, a certificate and its key."""

from collections.abc import Iterable
from pathlib import Path

FileStates = tuple[tuple[str, int, int, int], ...]
"""Path, modification time, size and inode of each file; zeros for a missing file."""


def file_states(paths: Iterable[Path]) -> FileStates:
    """Return what differs once one of these files has changed."""
    return tuple((str(path), *_state(path)) for path in paths)


def _state(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
