"""Which files are whose: a spool belongs to one process, so each worker has its own beside the path that is named.

    --spool spool.db --workers 2      spool-0.db, spool-1.db

With fewer workers than the last time, or after a run without, files are left that nobody would open: `heirs` names
their numbers, and each gets a process that only empties it. Without a spool the same holds for dead letters.
"""

import re
from pathlib import Path
from typing import Final

from kpl_integrations.ingest.settings import IngestSettings

__all__ = ["ALONE", "heirs", "kept_in", "left_by_workers", "own_path", "own_settings"]

# The number of the file that a gateway of one process has: the path as it is named.
ALONE: Final = -1


def own_path(path: Path, worker: int) -> Path:
    """Return a worker's file for a path of the settings."""
    return path if worker == ALONE else path.with_name(f"{path.stem}-{worker}{path.suffix}")


def own_settings(settings: IngestSettings, worker: int) -> IngestSettings:
    """Return the settings with this worker's files."""
    paths = {"spool": settings.spool, "dead_letters": settings.dead_letters}
    own = {name: own_path(path, worker) for name, path in paths.items() if path is not None}
    return settings.model_copy(update=own)


def heirs(settings: IngestSettings, count: int) -> list[int]:
    """Return the numbers of files that exist, and belong to none of `count` workers."""
    path = kept_in(settings)
    if path is None:
        return []
    alone = [ALONE] if path.exists() else []
    return alone + [number for number in left_by_workers(path) if number >= count]


def kept_in(settings: IngestSettings) -> Path | None:
    """Return the file that outlives a run: with a spool it has the dead letters too."""
    return settings.spool or settings.dead_letters


def left_by_workers(path: Path) -> list[int]:
    """Return the numbers of workers whose files exist."""
    name = re.compile(re.escape(path.stem) + r"-(\d{1,4})" + re.escape(path.suffix))
    try:
        found = [name.fullmatch(each.name) for each in path.parent.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match is not None)
