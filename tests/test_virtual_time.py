"""The tests' own clock, tested: a wrong one would make every other test of time worthless."""

import asyncio
import socket
import threading
import time

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.virtual_time import Backend, BackendName, VirtualTimeLoop, run_in_virtual_time

pytestmark = pytest.mark.anyio
HOUR = 3600.0


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


async def test_an_hour_of_sleep_takes_no_real_time() -> None:
    started = time.monotonic()
    await anyio.sleep(HOUR)
    assert anyio.current_time() == HOUR
    assert time.monotonic() - started < 1.0


async def test_the_clock_starts_at_zero_with_each_test() -> None:
    assert anyio.current_time() == 0.0


async def test_the_clock_stands_still_while_a_task_can_run() -> None:
    for _ in range(1000):
        await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == 0.0


async def test_sleepers_wake_in_order_and_on_time() -> None:
    woken: list[tuple[float, float]] = []

    async def sleeper(delay: float) -> None:
        await anyio.sleep(delay)
        woken.append((delay, anyio.current_time()))

    async with anyio.create_task_group() as tasks:
        for delay in (3.0, 0.25, 2.0, 0.25, HOUR):
            tasks.start_soon(sleeper, delay)
    assert woken == [(delay, delay) for delay in (0.25, 0.25, 2.0, 3.0, HOUR)]


async def test_a_timeout_passes_virtually_and_a_wake_up_beats_it() -> None:
    event = anyio.Event()
    with anyio.move_on_after(60.0) as scope:
        await event.wait()
    assert scope.cancelled_caught
    assert anyio.current_time() == 60.0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(event.wait)
        event.set()
    assert anyio.current_time() == 60.0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=20)
@given(delays=st.lists(st.floats(0.0, 86_400.0 * 3), max_size=5))
def test_any_delays_add_up(backend: BackendName, delays: list[float]) -> None:
    async def sleep_all() -> float:
        for delay in delays:
            await anyio.sleep(delay)
        return anyio.current_time()

    assert run_in_virtual_time(sleep_all, backend=backend) == pytest.approx(sum(delays))


def test_bytes_that_are_there_are_read_before_the_clock_jumps() -> None:
    async def read_with_a_timeout() -> float:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.send(b"x")
            async with asyncio.timeout(5.0):
                await asyncio.get_running_loop().sock_recv(ours, 1)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(read_with_a_timeout()) == 0.0


def test_without_a_timer_the_loop_waits_for_a_thread() -> None:
    async def wait_for_a_thread() -> float:
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(answered.set,))
        thread.start()
        await answered.wait()
        thread.join()
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(wait_for_a_thread()) == 0.0
