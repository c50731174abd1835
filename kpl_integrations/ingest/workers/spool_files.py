"""Which spool and dead-letter files belong to which worker, and which are orphaned.

    --spool spool.db --workers 2      spool-0.db, spool-1.db

A spool belongs to one process. A run with fewer workers than the last, or the first run with several, leaves files
that no worker opens. `orphaned_spools` lists them, and a process of its own drains each one.
"""

import asyncio
import logging
import os
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.options.reliability import marked_path
from kpl_integrations.ingest.settings import IngestSettings

# The worker number that stands for a gateway of one process, whose file has no number in its name.
SINGLE: Final = -1

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")


def settings_of_worker(settings: IngestSettings, worker: int) -> IngestSettings:
    """Return the settings with the paths of this worker's own files."""
    if worker == SINGLE:
        return settings
    producer = settings.producer
    groups = {"spool": producer.spool, "dead_letters": producer.dead_letters}
    own: dict[str, Any] = {}
    for name, group in groups.items():
        if group is not None and group.path is not None:
            own[name] = msgspec.structs.replace(group, path=marked_path(group.path, worker))
    return settings.with_producer(**own)


def durable_path(settings: IngestSettings) -> Path | None:
    """Return the file that outlives a run: the spool, which also holds the dead letters, else that of dead letters."""
    return settings.spool or settings.dead_letters


def file_of_worker(settings: IngestSettings, worker: int) -> str:
    """Return the worker's durable file as logs show it, "" without one."""
    path = durable_path(settings_of_worker(settings, worker))
    # A path need not be UTF-8, and messages between processes are.
    return "" if path is None else os.fsencode(path).decode(errors="backslashreplace")


def numbered_files(path: Path) -> list[int]:
    """Return the worker numbers of the files beside `path`."""
    name = re.compile(re.escape(path.stem) + r"-(\d{1,4})" + re.escape(path.suffix))
    try:
        found = [name.fullmatch(each.name) for each in path.parent.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match is not None)


def orphaned_spools(settings: IngestSettings, count: int) -> list[int]:
    """Return the numbers of existing files that belong to none of `count` workers."""
    path = durable_path(settings)
    if path is None:
        return []
    single = [SINGLE] if path.exists() else []
    return single + [number for number in numbered_files(path) if number >= count]


async def has_more(letters: DeadLetterQueue) -> bool:
    """Return whether an orphaned spool still has records, or dead letters due for redrive; warn of other dead letters.

    The process that drains the spool exits when it has no more.

    Raises:
        SpoolError: the file is closed or broken.
    """
    if letters.spool.statistics().records:
        return True
    due = await asyncio.wrap_future(letters.due_nowait(1))
    if due.letters or due.next_due_in is not None:
        return True
    if letters.depth:
        _logger.warning("%d dead letters are not redriven automatically; see `kpl dlq list`", letters.depth)
    return False
