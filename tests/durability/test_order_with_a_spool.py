"""The order of a key where a spool is configured. In real time, because the spool has a thread.

The rows of the table in docs/guarantees-order.md without a spool are in tests/producer/test_order_rows.py.
"""

from pathlib import Path
from typing import Any

import pytest

from kpl_core import SpoolOptions
from tests.support.key_order import PER_KEY, Unreliable, scene, seen
from tests.support.producer_scene import STREAM, producer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

COUNT = 40


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_write_ahead_keeps_the_order_of_acceptance_while_nothing_stays_in_the_spool(tmp_path: Path):
    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0)
    transport = Unreliable(1)
    async with producer(transport, **scene(spool=spool, **PER_KEY)) as orders:
        for number in range(0, COUNT, 5):
            await orders.put_many(STREAM, [("k", b"%d" % each) for each in range(number, number + 5)])
        await until(lambda: orders.report().delivered == COUNT)
    assert seen(transport) == {"k": list(range(COUNT))}


@pytest.mark.parametrize("mode", ["overflow", "write_ahead"])
async def test_the_backlog_of_a_key_keeps_its_order_and_new_records_do_not_wait_for_it(tmp_path: Path, mode: Any):
    spool = SpoolOptions(path=tmp_path / "spool.db", mode=mode, commit_interval_ms=1.0)
    transport = Unreliable(1, shards=1, is_down=True)
    async with producer(transport, **scene(spool=spool, record_ttl_ms=300, **PER_KEY)) as orders:
        for number in range(20):
            _ = await orders.put(STREAM, partition_key="k", data=b"%d" % number)
        await until(lambda: orders.report().spooled == 20 and not orders.report().buffered)
        transport.is_down = False
        for number in range(20, 25):
            _ = await orders.put(STREAM, partition_key="k", data=b"%d" % number)
        await until(lambda: orders.report().delivered == 25)
    (numbers,) = seen(transport).values()
    assert [number for number in numbers if number < 20] == list(range(20))
    assert sorted(numbers) == list(range(25))


async def test_a_put_that_finds_no_room_goes_to_the_overflow_spool_and_arrives_late(tmp_path: Path):
    spool = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0)
    transport = Unreliable(1, shards=1, is_down=True)
    options = scene(spool=spool, max_outstanding_records=5, **PER_KEY)
    async with producer(transport, **options) as orders:
        for number in range(10):
            _ = orders.put_nowait(STREAM, partition_key="k", data=b"%d" % number)
        await until(lambda: orders.report().spooled == 5)
        transport.is_down = False
        await until(lambda: orders.report().delivered == 10)
    (numbers,) = seen(transport).values()
    for part in (range(5), range(5, 10)):
        assert [number for number in numbers if number in part] == list(part)
