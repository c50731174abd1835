"""With the kernels a put takes the way in C, however it is spelt, on asyncio and on uvloop."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kpl_core import COMPILED, Config, FairnessPolicy, Producer, UserRecord
from kpl_core.pipeline.pipeline import StreamPipeline
from tests.support.producer_scene import STREAM, unmetered

PUTS = 200
KEYS = [f"key {number}" for number in range(PUTS)]
SPELLINGS: dict[str, Callable[[Producer, str], object]] = {
    "as in the README": lambda it, key: it.put_nowait(STREAM, partition_key=key, data=b"x"),
    "data first": lambda it, key: it.put_nowait(STREAM, data=b"x", partition_key=key),
    "by name": lambda it, key: it.put_nowait(stream=STREAM, partition_key=key, data=b"x"),
    "its tier": lambda it, key: it.put_nowait(STREAM, partition_key=key, data=b"x", tier="normal"),
    "all defaults": lambda it, key: it.put_nowait(
        STREAM, partition_key=key, data=b"x", explicit_hash_key=None, flow=None, tier="normal", metadata=None
    ),
    "a bytearray": lambda it, key: it.put_nowait(STREAM, partition_key=key, data=bytearray(b"x")),
    "a memoryview": lambda it, key: it.put_nowait(STREAM, partition_key=key, data=memoryview(b"x")),
    "an explicit hash key": lambda it, key: it.put_nowait(
        STREAM, partition_key=key, data=b"x", explicit_hash_key=str(int(key.split()[1]) << 120)
    ),
    "a flow": lambda it, key: it.put_nowait(STREAM, partition_key=key, data=b"x", flow="f"),
    "a flow with a policy": lambda it, key: it.put_nowait(STREAM, partition_key=key, data=b"x", flow="f"),
    "a UserRecord": lambda it, key: it.internal.put_record_nowait(STREAM, UserRecord(key, b"x")),
}


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    if request.param == "asyncio":
        return asyncio.new_event_loop
    return pytest.importorskip("uvloop").new_event_loop  # type: ignore[no-any-return]


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the keys of the records that the pipeline in Python has put."""
    put, put_record, keys = StreamPipeline.put, StreamPipeline.put_record, list[str]()

    def noted(self: StreamPipeline, partition_key: str, *others: Any) -> Any:
        keys.append(partition_key)
        return put(self, partition_key, *others)

    def noted_record(self: StreamPipeline, record: UserRecord, *others: Any) -> Any:
        keys.append(record.partition_key)
        return put_record(self, record, *others)

    monkeypatch.setattr(StreamPipeline, "put", noted)
    monkeypatch.setattr(StreamPipeline, "put_record", noted_record)
    return keys  # type: ignore[return-value]


@pytest.mark.skipif(not COMPILED, reason="the kernels are not compiled, or off")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_known_key_is_put_in_c(spelling, new_loop, in_python):
    async def main() -> None:
        config = Config(fairness=FairnessPolicy()) if spelling == "a flow with a policy" else Config()
        async with Producer(config, transport=unmetered(2)) as producer:
            # The shards are known after the first round, and the keys after the second one.
            for _ in range(2):
                for key in KEYS:
                    _ = producer.put_nowait(STREAM, partition_key=key, data=b"x")
                await producer.flush()
            in_python.clear()
            for key in KEYS:
                SPELLINGS[spelling](producer, key)
            # One opens the aggregated record of each shard.
            assert len(in_python) <= 2
            report = await producer.flush()
            assert report.delivered == 3 * PUTS

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.mark.skipif(not COMPILED, reason="the kernels are not compiled, or off")
def test_keys_that_the_router_does_not_remember_are_put_in_c(new_loop, in_python):
    async def main() -> None:
        async with Producer(Config(), transport=unmetered(4)) as producer:
            for number in range(17_000):
                _ = producer.put_nowait(STREAM, partition_key=f"once {number}", data=b"x")
                if number % 8_500 == 0:
                    await producer.flush()
            await producer.flush()
            in_python.clear()
            for number in range(2_000):
                _ = producer.put_nowait(STREAM, partition_key=f"unique {number}", data=b"x")
            assert len(in_python) < 20
            await producer.flush()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("first", [UserRecord("first", b"x"), ("first", b"x")])
def test_user_records_of_key_and_data_are_put_together(first, new_loop, in_python):
    async def main() -> None:
        async with Producer(Config(), transport=unmetered(2)) as producer:
            deliveries = await producer.put_many(STREAM, [first, *(UserRecord(key, b"x") for key in KEYS)])
            assert not in_python
            await producer.flush()
            assert [delivery.result().successful for delivery in deliveries] == [True] * (PUTS + 1)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_a_put_while_the_loop_stands_still_waits_in_the_inbox(new_loop):
    """The method in C knows the thread of a loop, and must see that it does not run."""
    producer, opened, end = Producer(Config(), transport=unmetered(1)), asyncio.Event(), asyncio.Event()

    async def main() -> None:
        async with producer:
            opened.set()
            await end.wait()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        running = runner.get_loop().create_task(main())
        runner.run(opened.wait())
        deliveries = [producer.put_nowait(STREAM, partition_key="k", data=b"x") for _ in range(3)]
        assert producer.report().accepted == 0
        end.set()
        runner.get_loop().run_until_complete(running)
    assert [delivery.result().successful for delivery in deliveries] == [True] * 3
