import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest

from kpl_core import decode
from kpl_core.producer import producer as producer_module
from kpl_core.producer.yield_budget import PUTS_IN_A_ROW, PUTS_IN_A_TURN, YieldBudget
from tests.support.producer_scene import STREAM, producer, unmetered

Put = Callable[[], Awaitable[object]]


async def puts_by_turn(task_count: int, puts_each: int, put: Put) -> list[int]:
    """How many puts each turn of the loop saw, from the first to the last."""
    loop = asyncio.get_running_loop()
    made = 0
    by_turn: list[int] = []

    async def put_all() -> None:
        nonlocal made
        for _ in range(puts_each):
            await put()
            made += 1

    def watch() -> None:
        by_turn.append(made - sum(by_turn))
        if made < task_count * puts_each:
            loop.call_soon(watch)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(task_count):
            tasks.create_task(put_all())
        loop.call_soon(watch)
    return by_turn


def putting(turns: YieldBudget) -> Put:
    """What `Producer.put` does with its turns."""

    async def put() -> None:
        turns.left -= 1
        if turns.left <= 0:
            await turns.let_others_run()

    return put


async def counted(task_count: int, puts_each: int) -> list[int]:
    return await puts_by_turn(task_count, puts_each, putting(YieldBudget(asyncio.get_running_loop())))


def test_a_task_alone_puts_a_hundred_in_a_row():
    by_turn = asyncio.run(counted(1, 1_000))
    assert max(by_turn) == PUTS_IN_A_ROW
    assert sum(by_turn) == 1_000


@pytest.mark.parametrize("task_count", [60, 100, 1_000, 3_000])
def test_many_tasks_share_a_turn_of_the_loop(task_count):
    puts_each = 6 * PUTS_IN_A_TURN // task_count
    by_turn = asyncio.run(counted(task_count, puts_each))
    assert sum(by_turn) == task_count * puts_each
    # In the first turn their number is unknown; they are counted as they come.
    assert by_turn[0] <= 5 * PUTS_IN_A_TURN
    assert max(by_turn[1:]) <= PUTS_IN_A_TURN + PUTS_IN_A_ROW


def test_more_tasks_than_puts_in_a_turn_put_one_each():
    task_count = PUTS_IN_A_TURN + 1_000
    by_turn = asyncio.run(counted(task_count, 4))
    assert sum(by_turn) == task_count * 4
    assert max(by_turn[2:]) <= task_count


def test_a_task_that_is_alone_again_puts_a_hundred_in_a_row():
    async def scenario() -> list[int]:
        turns = YieldBudget(asyncio.get_running_loop())
        await puts_by_turn(1_000, 10, putting(turns))
        return await puts_by_turn(1, 1_000, putting(turns))

    assert max(asyncio.run(scenario())) == PUTS_IN_A_ROW


def test_a_thousand_tasks_of_a_producer_share_a_turn_of_the_loop():
    """Each put a hundred in a row, and filled the buffer before a single request could leave."""

    async def scenario() -> list[int]:
        async with producer(unmetered(4, latency_seconds=0.0)) as shop:

            async def put() -> object:
                return await shop.put(STREAM, partition_key="42", data=b"x")

            by_turn = await puts_by_turn(1_000, 30, put)
            report = await shop.flush()
        assert report.complete
        assert report.delivered == 30_000
        return by_turn

    by_turn = asyncio.run(scenario())
    assert max(by_turn[1:]) <= PUTS_IN_A_TURN + PUTS_IN_A_ROW


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.anyio
async def test_other_loops_get_their_turn_every_hundred_puts():
    put = putting(YieldBudget())
    made_when_asked: list[int] = []
    made = 0

    async def ask() -> None:
        while made < 1_000:
            made_when_asked.append(made)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        for _ in range(1_000):
            await put()
            made += 1
    # Which of the two is first in a turn is trio's choice, by chance.
    assert all(later - earlier <= 2 * PUTS_IN_A_ROW for earlier, later in pairwise(made_when_asked))


@pytest.mark.parametrize(
    ("is_compiled", "size", "checkpoints"), [(True, 100, 3), (True, 1_025, 10), (False, 100, 10)], ids=str
)
def test_put_many_lets_others_run_after_so_many_records(monkeypatch, is_compiled, size, checkpoints):
    async def scenario() -> int:
        made = 0
        checkpoint = anyio.lowlevel.checkpoint

        async def counted() -> None:
            nonlocal made
            made += 1
            await checkpoint()

        async with producer(unmetered(4, latency_seconds=0.0)) as shop:
            # The shards are known.
            assert (await (await shop.put(STREAM, partition_key="k", data=b"first"))).successful
            monkeypatch.setattr(producer_module, "COMPILED", is_compiled)
            monkeypatch.setattr(anyio.lowlevel, "checkpoint", counted)
            await shop.put_many(STREAM, [("k", bytes(size))] * 2_500)
            monkeypatch.undo()
        return made

    assert asyncio.run(scenario()) == checkpoints


def test_the_first_put_many_of_a_producer_learns_the_shards_before_its_second_part(monkeypatch):
    """Until then each record travels alone."""

    async def scenario() -> None:
        async with producer(transport) as shop:
            await shop.put_many(STREAM, [(f"key {number % 1_000}", b"%d" % number) for number in range(10_000)])

    transport = unmetered(4, latency_seconds=0.0)
    monkeypatch.setattr(producer_module, "COMPILED", True)
    asyncio.run(scenario())
    # In more than one record of each shard on a machine that is busy for longer than records wait.
    assert {len(decode(record.data) or ()) > 1 for record in transport.kinesis.records(STREAM)} == {True}
