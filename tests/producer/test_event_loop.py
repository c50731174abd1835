import asyncio
import time
from typing import Any

import anyio
import anyio.to_thread
import pytest

from kpl_core import Config, Producer, WrongEventLoop
from kpl_core.event_loop import running_clock, running_loop
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport


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


def test_the_clock_of_one_loop_may_be_replaced():
    async def clock() -> bool:
        loop: Any = asyncio.get_running_loop()
        loop.time = lambda: 5.0
        replaced = running_clock()
        del loop.time
        return replaced() == 5.0

    assert asyncio.run(clock())


def test_a_put_sees_each_step_of_a_clock_that_replaces_the_systems(monkeypatch):
    """With the kernels a put reads the system's own clock less often than once a record."""
    ahead = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead)

    async def put() -> bool:
        nonlocal ahead
        config = Config(record_ttl_ms=5_000.0)
        transport = FakeTransport(FakeKinesis({"orders": 1}, enforce_limits=False))
        async with Producer(config, transport=transport) as producer:
            assert (await producer.put_nowait("orders", partition_key="k", data=b"x")).successful
            _ = producer.put_nowait("orders", partition_key="k", data=b"x")
            await anyio.sleep(0.01)
            # Waits for others, with the kernels.
            _ = producer.put_nowait("orders", partition_key="k", data=b"x")
            ahead += 60.0
            return (await producer.put_nowait("orders", partition_key="k", data=b"x")).successful

    assert asyncio.run(put())


def test_a_sleeping_producer_does_not_run_in_a_busy_loop_on_uvloop():
    uvloop = pytest.importorskip("uvloop")

    class CountingLoop(uvloop.Loop):  # type: ignore[misc, name-defined] # an optional package
        timers = 0

        def call_later(self, *arguments: Any, **keywords: Any) -> Any:  # by uvloop's call_at, too
            self.timers += 1
            return super().call_later(*arguments, **keywords)

    async def put() -> int:
        loop: Any = asyncio.get_running_loop()
        config = Config(record_max_buffered_time_ms=33.3)
        async with Producer(config, transport=FakeTransport(FakeKinesis({"orders": 1}))) as producer:
            await producer.put_nowait("orders", partition_key="k", data=b"x")
            loop.timers = 0
            for _ in range(10):
                assert (await producer.put_nowait("orders", partition_key="k", data=b"x")).successful
            return int(loop.timers)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        # About five timers for each record. On uvloop a sleep of anyio sets its timer again and again.
        assert runner.run(put()) < 100


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_on_trio_a_thread_cannot_put():
    async with Producer(transport=FakeTransport(FakeKinesis({"orders": 1}))) as orders:
        _ = orders.put_nowait("orders", partition_key="1", data=b"x")
        with pytest.raises(WrongEventLoop, match="use BlockingProducer from threads"):
            _ = await anyio.to_thread.run_sync(lambda: orders.put_nowait("orders", partition_key="2", data=b"x"))
        assert (await orders.flush()).accepted == 1
