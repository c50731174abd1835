"""A disk that is full and has room again, many times, under a live producer: nothing is stuck, nothing is lost."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kpl_core import NotSpooled, Producer
from kpl_core.durability.spool import store
from kpl_core.options.reliability import SpoolMode, SpoolOptions
from kpl_core.testing import ErrorAnswer, When
from tests.support.durability_scene import STREAM, assert_invariant, consumed, producer, service
from tests.support.small_disk import MIB, fill_disk, free_disk, mounted_disk
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.long,
    pytest.mark.timeout(400),
]
TIMES = 20
DISK_BYTES = 512 * MIB


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # A small log, so that it must grow soon after the disk is full.
    monkeypatch.setattr(store, "_CHECKPOINT_PAGES", 50)
    with mounted_disk(tmp_path, size_bytes=DISK_BYTES) as disk:
        yield disk


class Load:
    """Tasks that put records until they are stopped.

    The large ones come 60 together. Such a commit exceeds SQLite's page cache, and if it then fails, the connection's
    own `data_version` changes.
    """

    def __init__(self, each: Producer, mode: SpoolMode) -> None:
        self.producer = each
        self.mode = mode
        self.kept: set[bytes] = set()
        # The records that were not kept because the disk was full.
        self.refused = 0
        self.number = 0
        self.ended = False

    async def small(self) -> None:
        while not self.ended:
            await self._put(1_000)

    async def large(self) -> None:
        while not self.ended:
            async with anyio.create_task_group() as tasks:
                for _ in range(60):
                    tasks.start_soon(self._put, 50_000)
            await anyio.sleep(0.1)

    async def _put(self, size: int) -> None:
        self.number += 1
        data = b"%d " % self.number + bytes(size)
        try:
            delivery = await self.producer.put(STREAM, partition_key=f"k{self.number % 500}", data=data)
        except NotSpooled as error:
            assert "the disk that holds it is full" in str(error), error  # noqa: PT017 - every other cause is a failure
            self.refused += 1
            await anyio.sleep(0.001)
            return
        if self.mode == "overflow":
            result = await delivery
            if not (result.successful or result.kept):
                self.refused += 1
                return
        self.kept.add(data)

    async def puts(self, count: int) -> None:
        """Wait until so many further records were kept."""
        before = len(self.kept)
        await until(lambda: len(self.kept) >= before + count)

    async def refusals(self, count: int) -> None:
        """Wait until so many further records were refused."""
        before = self.refused
        await until(lambda: self.refused >= before + count)


@pytest.mark.parametrize("mode", ["write_ahead", "overflow"])
async def test_a_disk_that_is_full_and_free_again_twenty_times_loses_nothing(
    disk: Path, mode: SpoolMode, caplog: pytest.LogCaptureFixture
) -> None:
    transport = service(64, latency_seconds=0.0)
    options = SpoolOptions(
        path=disk / "spool.db",
        mode=mode,
        commit_interval_ms=1.0,
        replay_records_per_second=1e6,
        replay_bytes_per_second=1e9,
        # No more than a busy machine delivers within the time to live: else all expire and return, again and again.
        replay_in_flight_records=500,
        replay_in_flight_bytes=64 * MIB,
        replay_in_flight_per_key=1_000,
    )
    async with producer(transport, spool=options, record_ttl_ms=100, max_outstanding_records=2_000) as each:
        load = Load(each, mode)
        async with anyio.create_task_group() as tasks:
            for task in [load.small] * 20 + [load.large]:
                tasks.start_soon(task)
            for _ in range(TIMES):
                outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
                fill_disk(disk)
                await load.refusals(80)
                free_disk(disk, size_bytes=DISK_BYTES)
                await load.puts(100)
                transport.kinesis.faults.remove(outage)
                await load.puts(100)
                assert_invariant(each.report())
            load.ended = True
        await until(lambda: each.report().buffered == each.report().spooled == 0)
    assert not load.kept - consumed(transport).keys()
    assert "another process" not in caplog.text
