"""The backlog goes back to the producer: in order, at a limited pace, and removed only after Kinesis confirmed it."""

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.replay.replayer import Replayer
from kpl_core.durability.spool import AsyncSpool, LetterFilter, Spool, SpoolOptions
from kpl_core.errors import BufferFull, InvalidUserRecord, ProducerClosed
from kpl_core.options.kinesis_limits import MIB
from kpl_core.records.record_result import RecordResult
from tests.durability.receiver import Gate, Receiver
from tests.support.durability_scene import DELIVERED, EXPIRED, INVALID, THROTTLED, failed, spooled
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def options(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(
        path=tmp_path / "spool.db",
        commit_interval_ms=0.0,
        replay_records_per_second=1e6,
        replay_bytes_per_second=1e9,
    )


@asynccontextmanager
async def replaying(
    spool: AsyncSpool,
    receiver: Receiver,
    options: SpoolOptions,
    queue: DeadLetterQueue | None = None,
    *,
    chance: float = 0.0,
) -> AsyncIterator[Replayer]:
    queue = DeadLetterQueue(spool.spool) if queue is None else queue
    replayer = Replayer(spool, receiver.put, options, dead_letters=queue, chance=lambda: chance)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replayer.run)
        yield replayer
        tasks.cancel_scope.cancel()


async def test_the_backlog_is_delivered_in_key_order_and_deleted(options: SpoolOptions) -> None:
    receiver = Receiver()
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(n, key=f"key-{n % 3}") for n in range(2_000)], claim=False)
        async with replaying(spool, receiver, options):
            await until(lambda: spool.statistics().records == 0)
    numbers = [int(data) for data in receiver.delivered]
    assert sorted(numbers) == list(range(2_000))
    for key in range(3):
        of_key = [number for number in numbers if number % 3 == key]
        assert of_key == sorted(of_key)


async def test_records_that_join_the_backlog_later_are_delivered_too(options: SpoolOptions) -> None:
    receiver = Receiver()
    async with AsyncSpool(Spool(options)) as spool, replaying(spool, receiver, options):
        for number in range(3):
            ids = await spool.append([spooled(number)], claim=number == 1)
            if number == 1:
                spool.release(ids)
            await until(lambda number=number: len(receiver.delivered) == number + 1)  # type: ignore[misc]
        await until(lambda: spool.statistics().records == 0)
    assert receiver.delivered == [b"0", b"1", b"2"]


async def test_a_failed_record_is_retried_before_the_next_of_its_key(options: SpoolOptions) -> None:
    receiver = Receiver()
    receiver.answers[b"0"] = [failed(THROTTLED, EXPIRED)] * 3
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(n, key="one") for n in range(5)], claim=False)
        async with replaying(spool, receiver, options):
            await until(lambda: spool.statistics().records == 0)
    assert receiver.delivered == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_result_may_arrive_outside_any_task(options: SpoolOptions) -> None:
    """The writer thread posts the call to the loop, so no task is current."""
    receiver = Receiver()
    receiver.hold = True
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(0)], claim=False)
        async with replaying(spool, receiver, options):
            await until(lambda: bool(receiver.held))
            (_, finished), receiver.hold = receiver.held.pop(), False
            post = threading.Thread(target=lambda: spool.mailbox.post(lambda: finished(failed(THROTTLED, EXPIRED))))
            post.start()
            await until(lambda: receiver.delivered == [b"0"])
            post.join()


async def test_a_record_is_retried_when_the_buffer_is_full(options: SpoolOptions) -> None:
    receiver = Receiver()
    full = BufferFull("full", outstanding_records=1, outstanding_bytes=1)
    receiver.answers[b"0"] = [full, full]
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(0)], claim=False)
        async with replaying(spool, receiver, options):
            await until(lambda: spool.statistics().records == 0)
    assert receiver.delivered == [b"0"]


@pytest.mark.parametrize("answer", [failed(INVALID), InvalidUserRecord("too large")], ids=["result", "exception"])
async def test_a_record_that_can_never_be_delivered_becomes_a_dead_letter(
    options: SpoolOptions, answer: RecordResult | Exception
) -> None:
    receiver = Receiver()
    receiver.answers[b"1"] = [answer]
    async with AsyncSpool(Spool(options)) as spool:
        queue = DeadLetterQueue(spool.spool)
        await spool.append([spooled(n, key="one") for n in range(3)], claim=False)
        async with replaying(spool, receiver, options, queue):
            await until(lambda: spool.statistics().records == 0)
        letters = await spool.mailbox.wait_for(queue.select_nowait(LetterFilter(), 10))
    assert receiver.delivered == [b"0", b"2"]
    (stored,) = letters
    assert stored.letter is not None
    assert (stored.letter.data, stored.letter.reason) == (b"1", "invalid")
    if isinstance(answer, RecordResult):
        # In Unix time, though the attempt has the loop's.
        wall_offset = time.time() - anyio.current_time()
        assert stored.letter.last_attempt == pytest.approx(INVALID.ended_at + wall_offset, abs=60.0)


async def test_an_undeliverable_record_stays_in_the_spool_while_the_dead_letters_are_full(
    tmp_path: Path,
) -> None:
    receiver = Receiver()
    poison = bytes(2_000)
    receiver.answers[poison] = [failed(INVALID)] * 100_000
    # Without a rate limit and a pause the replay has nothing to wait for, and must still let other tasks run.
    small = SpoolOptions(
        path=tmp_path / "small.db",
        commit_interval_ms=0.0,
        max_dead_letter_bytes=MIB,
        replay_records_per_second=1e9,
        replay_bytes_per_second=1e12,
    )
    async with AsyncSpool(Spool(small)) as spool:
        queue = DeadLetterQueue(spool.spool)
        nearly_all = queue.letter(spooled(data=bytes(MIB - 500)), "ttl")
        await spool.mailbox.wait_for(queue.add_nowait([nearly_all]))
        await spool.append([spooled(data=poison)], claim=False)
        async with replaying(spool, receiver, small, queue):
            await until(lambda: len(receiver.answers[poison]) < 99_998)
        assert len(receiver.answers[poison]) > 0
        assert (spool.statistics().records, spool.statistics().letters) == (1, 1)
        assert spool.statistics().backlog_records == 1


async def test_each_of_several_undeliverable_records_becomes_one_letter(options: SpoolOptions) -> None:
    receiver = Receiver()
    receiver.answers = {b"%d" % number: [failed(INVALID)] for number in range(3)}
    async with AsyncSpool(Spool(options)) as spool:
        queue = DeadLetterQueue(spool.spool)
        await spool.append([spooled(number, key=f"key-{number}") for number in range(3)], claim=False)
        async with replaying(spool, receiver, options, queue):
            await until(lambda: spool.statistics().records == 0)
        letters = await spool.mailbox.wait_for(queue.select_nowait(LetterFilter(), 10))
    assert sorted(each.letter.data for each in letters if each.letter is not None) == [b"0", b"1", b"2"]


async def test_a_record_without_a_place_for_its_letter_delays_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver()
    poison = bytes(2 * MIB)
    receiver.answers[poison] = [failed(INVALID)] * 100_000
    small = SpoolOptions(path=tmp_path / "small.db", commit_interval_ms=0.0, max_dead_letter_bytes=MIB)
    async with AsyncSpool(Spool(small)) as spool:
        await spool.append([spooled(data=poison, key="one")], claim=False)
        async with replaying(spool, receiver, small, chance=1.0):
            await until(lambda: len(receiver.answers[poison]) == 99_999)
            for number in range(20):
                await spool.append([spooled(number, key="one")], claim=False)
                await until(lambda: spool.statistics().records == 1)
            # It was tried once or twice more, not with each of them.
            assert len(receiver.answers[poison]) >= 99_997
            await until(lambda: len(receiver.answers[poison]) <= 99_997)
        # A look at the backlog that was cancelled releases what it claims when the writer thread has ended it.
        await until(lambda: spool.statistics().backlog_records == 1)
        statistics = spool.statistics()
    assert receiver.delivered == [b"%d" % number for number in range(20)]
    assert (statistics.records, statistics.letters, statistics.backlog_records) == (1, 0, 1)
    lines = [record.getMessage() for record in caplog.records if "no place for its dead letter" in record.message]
    assert lines
    assert "max_dead_letter_bytes of 1,048,576" in lines[0]
    assert "tries again in 0.5 s" in lines[0]


async def test_keeping_a_letter_that_is_cancelled_ends_with_one_letter_and_no_record(
    options: SpoolOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the wait does not end the commit."""
    receiver = Receiver()
    receiver.answers[b"0"] = [failed(INVALID)]
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(0)], claim=False)
        gate = Gate(monkeypatch)
        async with replaying(spool, receiver, options):
            await until(gate.reached.is_set)
        gate.opened.set()
        await until(lambda: (spool.statistics().records, spool.statistics().letters) == (0, 1))
        async with replaying(spool, receiver, options):
            await spool.append([spooled(1)], claim=False)
            await until(lambda: receiver.delivered == [b"1"])
        assert spool.statistics().claimed_records == 0


async def test_a_letter_that_cannot_be_kept_releases_its_record(options: SpoolOptions) -> None:
    receiver = Receiver()
    receiver.answers[b"0"] = [failed(INVALID)]

    def no_clock() -> float:
        message = "no clock"
        raise OSError(message)

    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(0)], claim=False)
        queue = DeadLetterQueue(spool.spool, wall_clock=no_clock)
        replayer = Replayer(spool, receiver.put, options, dead_letters=queue)
        with pytest.raises(OSError, match="no clock"):
            await replayer.run()
        assert (spool.statistics().claimed_records, spool.statistics().backlog_records) == (0, 1)


async def test_records_in_flight_stay_within_the_bound(tmp_path: Path) -> None:
    receiver = Receiver()
    receiver.hold = True
    few = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0, replay_in_flight_records=10)
    async with AsyncSpool(Spool(few)) as spool:
        await spool.append([spooled(n, key=f"key-{n}") for n in range(100)], claim=False)
        async with replaying(spool, receiver, few):
            while len(receiver.delivered) < 100:
                await until(lambda: bool(receiver.held))
                receiver.deliver_held()
            await until(lambda: spool.statistics().records == 0)
    assert receiver.most_held <= 10


async def test_cancelling_releases_waiting_records_and_confirms_those_in_flight(
    tmp_path: Path,
) -> None:
    receiver = Receiver()
    receiver.hold = True
    few = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0, replay_in_flight_records=2)
    async with AsyncSpool(Spool(few)) as spool:
        await spool.append([spooled(n, key=f"key-{n}") for n in range(5)], claim=False)
        async with replaying(spool, receiver, few):
            await until(lambda: len(receiver.held) == 2)
            assert spool.statistics().claimed_records == 5
        assert (spool.statistics().claimed_records, spool.statistics().backlog_records) == (2, 3)
        (_, first), (_, second) = receiver.held
        first(DELIVERED)
        second(failed(EXPIRED))
        await until(lambda: spool.statistics().records == 4)
        assert (spool.statistics().claimed_records, spool.statistics().backlog_records) == (0, 4)


async def test_a_closed_producer_ends_the_replay_without_losing_records(options: SpoolOptions) -> None:
    receiver = Receiver()
    receiver.answers[b"0"] = [ProducerClosed("closed")]
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(0)], claim=False)
        replayer = Replayer(spool, receiver.put, options, dead_letters=DeadLetterQueue(spool.spool))
        with pytest.raises(ProducerClosed):
            await replayer.run()
        assert spool.statistics().backlog_records == 1


async def test_a_result_after_the_spool_is_closed_is_ignored(options: SpoolOptions) -> None:
    receiver = Receiver()
    receiver.hold = True
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(0, key="a"), spooled(1, key="b")], claim=False)
        async with replaying(spool, receiver, options):
            await until(lambda: len(receiver.held) == 2)
    (_, first), (_, second) = receiver.held
    first(DELIVERED)
    second(failed(EXPIRED))
    async with AsyncSpool(Spool(options)) as again:
        assert again.statistics().records == 2


async def test_undeliverable_records_are_released_when_the_replay_ends_first(options: SpoolOptions) -> None:
    receiver = Receiver()
    receiver.answers[b"0"] = [failed(INVALID)]
    receiver.answers[b"1"] = [ProducerClosed("closed")]
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(0, key="a"), spooled(1, key="b")], claim=False)
        replayer = Replayer(spool, receiver.put, options, dead_letters=DeadLetterQueue(spool.spool))
        with pytest.raises(ProducerClosed):
            await replayer.run()
        assert (spool.statistics().backlog_records, spool.statistics().letters) == (2, 0)
