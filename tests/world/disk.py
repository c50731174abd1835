"""The disk of a world: the spool's real SQLite file, whose writer runs at virtual instants instead of in a thread.

Faults enter where the store commits: slow, full, read-only. A power cut is a copy of the file as it is
between two commits, because a commit is on the disk when its future completes.
"""

import asyncio
import math
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import group_commit, spool
from kpl_core.durability.spool.group_commit import CommitRequest, SpoolWriter
from kpl_core.durability.spool.spool_error import SpoolClosed
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from tests.world.network import World
from tests.world.world_loop import use_wall_clock

Answer = TypeVar("Answer")

# What a commit raises, by the name of the fault.
DISK_FAULTS: dict[str, int] = {"full disk": sqlite3.SQLITE_FULL, "read-only disk": sqlite3.SQLITE_READONLY}
SLOW_DISK = "slow disk"
# Files in memory, where there are such: a power cut of the world is a copy, and syncing took 40 % of a spool's story.
_IN_MEMORY = "/dev/shm"  # noqa: S108 - each run has a folder of its own in it


class Disk:
    """What is wrong with the disk now."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.seconds = 0.001

    async def trouble(self, names: Sequence[str], world: World, until: float) -> None:
        """Let these faults come and go until then."""
        chance = world.chance
        while names and world.now() < until:
            await asyncio.sleep(chance.expovariate(0.2))
            name = chance.choice(names)
            if name == SLOW_DISK:
                self.seconds = chance.choice([0.05, 1.0])
            else:
                self.fault = name
            await asyncio.sleep(min(chance.expovariate(0.3), max(0.0, until - world.now())))
            self.fault, self.seconds = None, 0.001

    def check(self) -> None:
        """Raise as SQLite does if a commit fails now."""
        code = None if self.fault is None else DISK_FAULTS.get(self.fault)
        if code is not None:
            error = sqlite3.OperationalError(f"the world has a {self.fault}")
            error.sqlite_errorcode = code
            raise error


class WorldWriter(SpoolWriter):
    """The writer of a spool. Each of its steps is a timer of the world's loop."""

    disk: Disk

    def start(self) -> None:
        self._planned_at = math.inf

    def submit(self, work: CommitRequest) -> None:
        super().submit(work)
        self._plan()

    def ask(self, question: Callable[[SpoolStore], Answer]) -> "Future[Answer]":
        answer = super().ask(question)
        self._plan()
        return answer

    def close(self, timeout: float | None) -> bool:
        del timeout
        self._closing = True
        if self._refusal is None:
            self._refusal = SpoolClosed("the world's spool is closed")
        self._run()
        return True

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() if self._questions else max(self._group.due_at(), loop.time())
        at = due + self.disk.seconds
        if at < self._planned_at and due < math.inf:
            self._planned_at = at
            loop.call_at(at, self._turn, at)

    def _turn(self, planned_at: float) -> None:
        if planned_at != self._planned_at or self._closing:
            return
        self._planned_at = math.inf
        if self._questions or self._group.due_at() <= asyncio.get_running_loop().time():
            _ = self._step()
        self._plan()


@contextmanager
def world_disk() -> Iterator[tuple[Disk, Path]]:
    """Let the spools that are opened in this block use a disk of the world. Yield it, and a folder for them."""
    disk = Disk()
    commit: Callable[[SpoolStore, Changes], Removed] = SpoolStore.commit
    probe: Callable[[SpoolStore], None] = SpoolStore.probe

    def checked_commit(self: SpoolStore, changes: Changes) -> Removed:
        disk.check()
        return commit(self, changes)

    def checked_probe(self: SpoolStore) -> None:
        disk.check()
        probe(self)

    async def run_at_an_instant(function: Callable[[], Any], *arguments: Any, **_: Any) -> Any:
        await asyncio.sleep(disk.seconds)
        return function(*arguments)

    is_writable = os.access(_IN_MEMORY, os.W_OK)
    folder = tempfile.TemporaryDirectory(dir=_IN_MEMORY if is_writable else None)
    with folder as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "SpoolWriter", type("Writer", (WorldWriter,), {"disk": disk}))
        patch.setattr(group_commit, "monotonic", lambda: asyncio.get_running_loop().time())
        patch.setattr(SpoolStore, "commit", checked_commit)
        patch.setattr(SpoolStore, "probe", checked_probe)
        patch.setattr(anyio.to_thread, "run_sync", run_at_an_instant)
        use_wall_clock(patch, DeadLetterQueue.__init__)
        yield disk, Path(path)


def copy_of(path: Path, to: Path) -> Path:
    """Copy a spool as a power cut leaves it, and return the path of the copy."""
    for suffix in ("", "-wal"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            shutil.copyfile(part, to.with_name(to.name + suffix))
    return to
