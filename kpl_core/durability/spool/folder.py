"""A file's name on the disk: `fsync` of a file keeps its bytes, only `fsync` of its folder keeps its name.

(POSIX, `fsync`; Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.)
"""

import os
from pathlib import Path

__all__ = ["sync_folder"]


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` would survive a power cut.

    Raises:
        OSError: the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
