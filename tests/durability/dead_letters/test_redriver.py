"""Redriving dead letters: automatically when due, on demand at once, critical first, safe to interrupt."""

import re
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue, RedriveProgress, Redriver
from kpl_core.durability.dead_letters.dead_letter_queue import DueLetters
from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.spool import AsyncSpool, LetterFilter, Spool, SpoolOptions
from kpl_core.errors import BufferFull, InvalidUserRecord, ProducerClosed
from kpl_core.options.reliability import DeadLetterOptions
from kpl_core.records.user_record import Tier
from tests.durability.receiver import Receiver
from tests.support.durability_scene import EXPIRED, failed, spooled
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def options(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0)


@pytest.fixture
async def spool(options: SpoolOptions) -> AsyncIterator[AsyncSpool]:
    async with AsyncSpool(Spool(options)) as each:
        yield each


def pace(*, in_flight_records: int = 1_000) -> DeliveryPace:
    return DeliveryPace(
        records_per_second=1e6,
        bytes_per_second=1e9,
        in_flight_records=in_flight_records,
        in_flight_bytes=1 << 30,
        chance=lambda: 0.0,
    )


async def add(spool: AsyncSpool, queue: DeadLetterQueue, numbers: range, tier: Tier = "normal") -> None:
    letters = [queue.letter(spooled(number, tier=tier), "throttled") for number in numbers]
    await spool.mailbox.wait_for(queue.add_nowait(letters))


async def test_due_letters_are_delivered_and_removed(spool: AsyncSpool) -> None:
    receiver = Receiver()
    queue = DeadLetterQueue(spool.spool, chance=lambda: 0.0)
    await add(spool, queue, range(5), "bulk")
    await add(spool, queue, range(5, 10), "critical")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Redriver(queue, receiver.put, pace()).run)
        await until(lambda: queue.depth == 0)
        await add(spool, queue, range(10, 12))
        await until(lambda: queue.depth == 0)
        tasks.cancel_scope.cancel()
    assert receiver.delivered == [b"%d" % number for number in (5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 10, 11)]


async def test_a_letter_that_fails_stays_and_is_redriven_when_due_again(spool: AsyncSpool) -> None:
    receiver = Receiver()
    receiver.answers[b"0"] = [failed(EXPIRED)] * 3
    queue = DeadLetterQueue(spool.spool, options=DeadLetterOptions(redrive_base_seconds=0.001), chance=lambda: 1.0)
    await add(spool, queue, range(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Redriver(queue, receiver.put, pace()).run)
        await until(lambda: queue.depth == 0)
        tasks.cancel_scope.cancel()
    assert receiver.delivered == [b"0"]
    assert receiver.answers[b"0"] == []


async def test_a_due_letter_in_flight_is_not_sent_twice(spool: AsyncSpool) -> None:
    receiver = Receiver()
    receiver.hold = True
    queue = DeadLetterQueue(spool.spool, chance=lambda: 0.0)
    await add(spool, queue, range(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Redriver(queue, receiver.put, pace()).run)
        await until(lambda: len(receiver.held) == 1)
        await add(spool, queue, range(1, 3))
        await until(lambda: len(receiver.held) == 3)
        receiver.deliver_held()
        await until(lambda: queue.depth == 0)
        tasks.cancel_scope.cancel()
    assert receiver.delivered == [b"0", b"1", b"2"]


async def test_a_redrive_on_demand_sends_each_matching_letter_once(spool: AsyncSpool) -> None:
    receiver = Receiver()
    receiver.answers[b"3"] = [failed(EXPIRED)]
    receiver.answers[b"4"] = [InvalidUserRecord("no")]
    queue = DeadLetterQueue(spool.spool, chance=lambda: 1.0)
    await add(spool, queue, range(1_200))
    await add(spool, queue, range(1_200, 1_210), "critical")
    progress: list[RedriveProgress] = []
    redriver = Redriver(queue, receiver.put, pace())
    report = await redriver.redrive(LetterFilter(), on_progress=progress.append)
    assert report == RedriveProgress(total=1_210, delivered=1_208, failed=2, damaged=0)
    assert receiver.delivered[:10] == [b"%d" % number for number in range(1_200, 1_210)]
    assert progress[-1] == report
    assert len(progress) == len(set(progress))
    assert queue.depth == 2
    assert (await redriver.redrive(LetterFilter())) == RedriveProgress(2, 2, 0, 0)
    assert queue.depth == 0


async def test_only_matching_letters_are_redriven(spool: AsyncSpool) -> None:
    receiver = Receiver()
    queue = DeadLetterQueue(spool.spool)
    await add(spool, queue, range(3), "bulk")
    await add(spool, queue, range(3, 5), "critical")
    report = await Redriver(queue, receiver.put, pace()).redrive(LetterFilter(tier="critical"))
    assert (report.total, report.delivered, queue.depth) == (2, 2, 3)


async def test_an_interrupted_redrive_can_be_run_again(spool: AsyncSpool) -> None:
    receiver = Receiver()
    receiver.hold = True
    queue = DeadLetterQueue(spool.spool)
    await add(spool, queue, range(100))
    async with anyio.create_task_group() as tasks:
        redriver = Redriver(queue, receiver.put, pace(in_flight_records=10))
        tasks.start_soon(redriver.redrive, LetterFilter())
        for delivered in (10, 20, 30):
            await until(lambda: len(receiver.held) == 10)
            receiver.deliver_held()
            await until(lambda delivered=delivered: queue.depth == 100 - delivered)  # type: ignore[misc]
        await until(lambda: len(receiver.held) == 10)
        tasks.cancel_scope.cancel()
    receiver.hold = False
    receiver.held.clear()
    report = await Redriver(queue, receiver.put, pace()).redrive(LetterFilter())
    assert (report.total, report.delivered, queue.depth) == (70, 70, 0)
    assert sorted(receiver.delivered) == sorted(b"%d" % number for number in range(100))


async def test_a_letter_is_retried_when_the_buffer_is_full(spool: AsyncSpool) -> None:
    receiver = Receiver()
    full = BufferFull("full", outstanding_records=1, outstanding_bytes=1)
    receiver.answers[b"0"] = [full, full]
    queue = DeadLetterQueue(spool.spool)
    await add(spool, queue, range(2))
    report = await Redriver(queue, receiver.put, pace()).redrive(LetterFilter())
    assert report == RedriveProgress(2, 2, 0, 0)
    assert receiver.delivered == [b"0", b"1"]


async def test_a_closed_producer_ends_the_redrive_and_keeps_the_letters(spool: AsyncSpool) -> None:
    receiver = Receiver()
    receiver.answers[b"0"] = [ProducerClosed("closed")]
    queue = DeadLetterQueue(spool.spool)
    await add(spool, queue, range(2))
    with pytest.raises(ProducerClosed):
        await Redriver(queue, receiver.put, pace()).redrive(LetterFilter())
    assert queue.depth == 2


async def test_a_damaged_letter_is_counted_and_kept(options: SpoolOptions) -> None:
    receiver = Receiver()
    async with AsyncSpool(Spool(options)) as spool:
        queue = DeadLetterQueue(spool.spool)
        await spool.mailbox.wait_for(
            queue.add_nowait([queue.letter(spooled(data=data), "ttl") for data in (b"whole", b"damaged")])
        )
    damaged = re.sub(b"damaged", b"DAMAGED", options.file.read_bytes())
    options.file.write_bytes(damaged)
    async with AsyncSpool(Spool(options)) as spool:
        queue = DeadLetterQueue(spool.spool, chance=lambda: 0.0)
        redriver = Redriver(queue, receiver.put, pace())
        assert await redriver.redrive(LetterFilter()) == RedriveProgress(2, 1, 0, 1)
        assert queue.depth == 1
        damaged_letter = await spool.mailbox.wait_for(queue.due_nowait(10))
        assert damaged_letter == ([], None)
    assert receiver.delivered == [b"whole"]


async def test_a_result_after_the_spool_is_closed_is_ignored(options: SpoolOptions) -> None:
    receiver = Receiver()
    receiver.hold = True
    async with AsyncSpool(Spool(options)) as spool:
        queue = DeadLetterQueue(spool.spool)
        await add(spool, queue, range(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Redriver(queue, receiver.put, pace()).redrive, LetterFilter())
            await until(lambda: len(receiver.held) == 2)
            tasks.cancel_scope.cancel()
    receiver.deliver_held()
    async with AsyncSpool(Spool(options)) as again:
        assert again.statistics().letters == 2


async def test_due_letters_are_read_in_pages_and_not_at_every_result(spool: AsyncSpool) -> None:
    receiver = Receiver()
    queue = DeadLetterQueue(spool.spool, chance=lambda: 0.0)
    await add(spool, queue, range(5_000), "bulk")
    asked = 0
    ask = queue.due_nowait

    def counted(limit: int) -> Any:
        nonlocal asked
        asked += 1
        return ask(limit)

    queue.due_nowait = counted  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Redriver(queue, receiver.put, pace()).run)
        await until(lambda: queue.depth == 0)
        tasks.cancel_scope.cancel()
    assert receiver.delivered == [b"%d" % number for number in range(5_000)]
    # Ten pages; more only for letters that were in flight while the last page was sent.
    assert asked < 100


async def test_a_critical_letter_overtakes_letters_that_found_a_full_buffer(spool: AsyncSpool) -> None:
    receiver = Receiver()
    full = BufferFull("full", outstanding_records=1, outstanding_bytes=1)
    receiver.answers[b"0"] = [full] * 3
    slow = DeliveryPace(
        records_per_second=1e6, bytes_per_second=1e9, in_flight_records=10, in_flight_bytes=1 << 30, chance=lambda: 0.2
    )
    queue = DeadLetterQueue(spool.spool, chance=lambda: 0.0)
    await add(spool, queue, range(400), "bulk")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Redriver(queue, receiver.put, slow).run)
        await until(lambda: len(receiver.answers[b"0"]) < 3)
        await add(spool, queue, range(400, 410), "critical")
        await until(lambda: queue.depth == 0)
        tasks.cancel_scope.cancel()
    assert receiver.delivered[:10] == [b"%d" % number for number in range(400, 410)]
    assert len(receiver.delivered) == 410


async def test_a_letter_delivered_while_a_page_is_read_is_not_sent_again(spool: AsyncSpool) -> None:
    receiver = Receiver()
    receiver.hold = True
    queue = DeadLetterQueue(spool.spool, chance=lambda: 0.0)
    await add(spool, queue, range(2))
    ask = queue.due_nowait
    pages: list[tuple[Future[DueLetters], Future[DueLetters]]] = []

    def slowly(limit: int) -> Future[DueLetters]:
        shown: Future[DueLetters] = Future()
        pages.append((ask(limit), shown))
        return shown

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Redriver(queue, receiver.put, pace()).run)
        await until(lambda: len(receiver.held) == 2)
        queue.due_nowait = slowly  # type: ignore[method-assign]
        await add(spool, queue, range(2, 3))
        await until(lambda: bool(pages) and pages[0][0].done())
        receiver.deliver_held()
        await until(lambda: queue.depth == 1)
        # A later commit: now the redriver knows that they are deleted.
        await spool.mailbox.wait_for(queue.remove([]))
        queue.due_nowait = ask  # type: ignore[method-assign]
        for read, shown in pages:
            shown.set_result(read.result())
        await until(lambda: bool(receiver.held))
        receiver.deliver_held()
        await until(lambda: queue.depth == 0)
        tasks.cancel_scope.cancel()
    assert receiver.delivered == [b"0", b"1", b"2"]
