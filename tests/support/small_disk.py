"""A file system of its own, which a test makes full and roomy again: a real full disk."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1024 * 1024
_TRIES = 100


@contextmanager
def mounted_disk(folder: Path, *, size_bytes: int = 2 * MIB) -> Iterator[Path]:
    """Mount a tmpfs at `folder / "disk"`; skips the test if this user may not mount."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount a file system; the page limit's test covers it")
    try:
        yield disk
    finally:
        # Lazy, so that a test that fails with the files open leaves no mount behind.
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill_disk(disk: Path) -> None:
    """Leave no room: the file system becomes as small as its files."""
    for _ in range(_TRIES):
        status = os.statvfs(disk)
        # Refused if a file grew meanwhile.
        if _resize(disk, (status.f_blocks - status.f_bfree) * status.f_frsize):
            return
    message = f"{disk} grew {_TRIES} times while it was measured"
    raise AssertionError(message)


def free_disk(disk: Path, *, size_bytes: int) -> None:
    """Make room again."""
    assert _resize(disk, size_bytes)


def _resize(disk: Path, size_bytes: int) -> bool:
    command = ["mount", "-o", f"remount,size={size_bytes}", str(disk)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
