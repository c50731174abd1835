"""asyncio's own cancellations go through every shielded scope; what must come to its end comes to it all the same."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import anyio
import pytest

from kpl_core.durability.spool import AsyncSpool, Spool
from kpl_core.durability.spool.store import SpoolStore, SpoolTotals
from kpl_core.options.reliability import SpoolOptions
from kpl_core.testing import RecordError
from tests.durability.receiver import Gate
from tests.support.durability_scene import STREAM, assert_invariant, producer, service
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_a_close_that_is_cancelled_still_gives_every_record_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = service()
    transport.kinesis.faults.add(RecordError())
    spool = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0)
    with anyio.fail_after(60):
        async with producer(transport, spool=spool) as each:
            deliveries = [each.put_nowait(STREAM, partition_key="k", data=b"%d" % n) for n in range(20)]
            gate = Gate(monkeypatch)
            closing = asyncio.create_task(each.close(timeout=0.05))
            assert await asyncio.to_thread(gate.reached.wait, 30)
            _ = closing.cancel()
            await asyncio.sleep(0)
            gate.opened.set()
            with pytest.raises(asyncio.CancelledError):
                _ = await closing
            assert {delivery.result().kept for delivery in deliveries} == {"spooled"}
            assert_invariant(each.report())
    assert (each.report().spooled, each.report().buffered) == (20, 0)


async def test_a_file_that_was_being_opened_when_the_start_was_given_up_is_not_left_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SpoolOptions(path=tmp_path / "spool.db")
    reached, go_on = threading.Event(), threading.Event()
    opened = SpoolStore.open

    def slow(store: SpoolStore) -> SpoolTotals:
        reached.set()
        assert go_on.wait(30)
        return opened(store)

    monkeypatch.setattr(SpoolStore, "open", slow)
    starting = asyncio.create_task(AsyncSpool(Spool(options)).__aenter__())
    assert await asyncio.to_thread(reached.wait, 30)
    _ = starting.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        _ = await starting
    async with AsyncSpool(Spool(options)) as again:
        assert again.statistics().records == 0


async def test_what_the_disk_takes_while_the_producer_is_given_up_waits_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0, mode="write_ahead")
    with contextlib.suppress(asyncio.CancelledError):
        async with producer(service(), spool=spool) as each:
            gate = Gate(monkeypatch)
            delivery = each.put_nowait(STREAM, partition_key="k", data=b"x")
            assert await asyncio.to_thread(gate.reached.wait, 30)
            gate.opened.set()
            # The answer is in the loop's queue when the loop hears of the end: so the loop waits for both.
            file = each.spool
            assert file is not None
            wait_until(lambda: file.statistics().appended_records, "the record is on disk")
            time.sleep(0.02)  # noqa: ASYNC251
            raise asyncio.CancelledError
    assert delivery.result().kept == "spooled"
    assert (each.report().spooled, each.report().buffered) == (1, 0)
    assert each.buffer_limit.outstanding_records == 0
