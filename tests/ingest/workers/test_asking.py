"""Workers that ask each other what they count: whoever is there tells, and nobody waits for the dead."""

import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kpl_integrations.ingest.workers.asking import Asking

pytestmark = pytest.mark.anyio
_SECONDS = 30


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="kpl-") as path:
        yield Path(path)


class Worker:
    def __init__(self, folder: Path, name: str) -> None:
        self.asking = Asking(folder, name)
        self.told = 0

    async def tell(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.told += 1


@asynccontextmanager
async def answering(folder: Path, *names: str) -> AsyncIterator[list[Worker]]:
    workers = [Worker(folder, name) for name in names]
    async with anyio.create_task_group() as tasks:
        for worker in workers:
            await worker.asking.__aenter__()
            tasks.start_soon(worker.asking.run, worker.tell)
        yield workers
        tasks.cancel_scope.cancel()
    for worker in workers:
        await worker.asking.__aexit__(None, None, None)


async def test_all_who_are_asked_have_told_when_the_question_is_over(folder):
    async with answering(folder, "a", "b", "c") as (asker, *others):
        with anyio.fail_after(_SECONDS):
            for number in range(1, 21):
                while any(each.told < number for each in others):
                    await asker.asking.ask(["b", "c"])
        assert asker.told == 0


async def test_workers_that_ask_each_other_at_once_all_get_their_answers(folder):
    async with answering(folder, "a", "b", "c") as workers:
        with anyio.fail_after(_SECONDS):
            async with anyio.create_task_group() as tasks:
                for worker in workers:
                    for _ in range(10):
                        tasks.start_soon(worker.asking.ask, ["a", "b", "c"])
        assert all(worker.told for worker in workers)


async def test_nobody_waits_for_one_that_died_or_never_was(folder):
    async with answering(folder, "a", "b") as (asker, other):
        # What kill -9 leaves: a socket's file, and nobody behind it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
            dead.bind(str(folder / "dead.asked"))
        with anyio.fail_after(_SECONDS):
            while not other.told:
                await asker.asking.ask(["dead", "nobody", "b"])


async def test_one_that_does_not_answer_is_waited_for_a_moment_only_however_often_it_is_asked(folder):
    async with answering(folder, "a", "b") as (asker, other):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stopped:
            stopped.bind(str(folder / "stopped.asked"))
            with anyio.fail_after(_SECONDS):
                # More than its line holds.
                for _ in range(20):
                    await asker.asking.ask(["stopped", "b"])
        assert other.told


async def test_one_who_asked_and_died_hurts_nobody(folder):
    async with answering(folder, "a", "b") as (asker, other):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
            gone.bind(str(folder / "gone.asks"))
            gone.sendto(b"1", str(folder / "b.asked"))
        with anyio.fail_after(_SECONDS):
            while other.told < 2:
                await asker.asking.ask(["b"])


async def test_where_there_can_be_no_socket_nobody_is_asked_and_a_warning_says_so(folder, caplog):
    far = folder / ("deep" * 30)
    async with Asking(far, "a") as asking:
        await asking.run(anyio.lowlevel.checkpoint)
        await asking.ask(["b"])
    assert "cannot ask each other" in caplog.text
