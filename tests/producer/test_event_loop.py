import asyncio
import time

import anyio
import pytest

from kpl_core.event_loop import running_clock, running_loop


@pytest.mark.anyio
async def test_a_loop_is_itself_and_its_clock_is_the_loops():
    assert running_loop() is running_loop()
    before = running_clock()()
    await anyio.sleep(1_000.0)
    assert running_clock()() == before + 1_000.0 == anyio.current_time()


def test_two_loops_are_two():
    async def mine() -> object:
        return running_loop()

    with asyncio.Runner() as one, asyncio.Runner() as other:
        assert one.run(mine()) is not other.run(mine())


def test_outside_of_any_loop_there_is_none():
    with pytest.raises(RuntimeError):
        running_loop()
    with pytest.raises(RuntimeError):
        running_clock()


def test_asyncios_own_clock_is_read_without_its_wrapper():
    async def clock() -> bool:
        return running_clock() is time.monotonic

    assert asyncio.run(clock())
