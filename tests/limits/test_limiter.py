"""The limiter of seed 000, alone, on asyncio and trio."""

import anyio
import pytest

from kpl_core import Config, ProducerClosed
from kpl_core.limits.limiter import Limiter
from kpl_core.records.kinesis_record import KinesisRecord
from tests.support.material import kinesis_record, shard_id

pytestmark = pytest.mark.anyio

TEN_A_SECOND = Config(rate_limit_records_per_sec_per_shard=10.0, burst_seconds=0.1)


class Gate:
    """Records which records were admitted or expired, and when."""

    def __init__(self, config: Config = TEN_A_SECOND, *, slow_seconds: float = 0.0) -> None:
        self.admitted: list[tuple[float, KinesisRecord]] = []
        self.expired: list[tuple[float, KinesisRecord, str]] = []
        self.slow_seconds = slow_seconds
        self.limiter = Limiter(config, on_admit=self.on_admit, on_expired=self.on_expired)

    async def on_admit(self, record: KinesisRecord) -> None:
        if self.slow_seconds:
            await anyio.sleep(self.slow_seconds)
        self.admitted.append((anyio.current_time(), record))

    async def on_expired(self, record: KinesisRecord, reason: str) -> None:
        self.expired.append((anyio.current_time(), record, reason))

    @property
    def admitted_at(self) -> list[float]:
        return [at for at, _ in self.admitted]


def records(count: int, *, shard: int = 0, expires_at: float = 1e9) -> list[KinesisRecord]:
    return [
        kinesis_record(shard=shard_id(shard), deadline=float(number), expires_at=expires_at) for number in range(count)
    ]


async def test_a_record_whose_tokens_are_available_passes_within_the_put():
    gate = Gate()
    async with gate.limiter as limiter:
        await limiter.put(*records(1))
        assert gate.admitted_at == [0.0]


async def test_records_leave_within_25_ms_of_their_tokens_in_the_order_of_their_deadlines():
    gate = Gate()
    waiting = records(6)
    async with gate.limiter as limiter:
        for record in [waiting[0], *reversed(waiting[1:])]:
            await limiter.put(record)
        await anyio.sleep(2.0)
    assert gate.admitted_at == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], abs=0.025)
    assert [record.deadline for _, record in gate.admitted] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


async def test_shards_do_not_wait_for_each_other():
    gate = Gate()
    async with gate.limiter as limiter:
        for record in [*records(3), *records(3, shard=1), *records(1, shard=2)]:
            await limiter.put(record)
        await anyio.sleep(1.0)
    assert sorted(gate.admitted_at) == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.1, 0.2, 0.2], abs=0.025)


async def test_a_record_that_expires_while_it_waits_is_reported_in_time_and_costs_no_tokens():
    gate = Gate()
    async with gate.limiter as limiter:
        for record in [*records(2), *records(1, expires_at=0.05), *records(1)]:
            await limiter.put(record)
        await anyio.sleep(1.0)
    ((at, _, reason),) = gate.expired
    assert at == pytest.approx(0.05, abs=0.025)
    assert reason == "Expired"
    assert gate.admitted_at == pytest.approx([0.0, 0.1, 0.2], abs=0.025)


async def test_a_flush_admits_all_unexpired_records_at_once():
    gate = Gate()
    async with gate.limiter as limiter:
        for record in records(10):
            await limiter.put(record)
        await limiter.flush()
        assert gate.admitted_at == [0.0] * 10
        await limiter.put(*records(1))
        assert len(gate.admitted) == 11


async def test_closing_is_idempotent_and_ends_only_its_own_task():
    gate = Gate()
    async with gate.limiter as limiter:
        await limiter.aclose()
        await limiter.aclose()
        await anyio.sleep(1.0)
        went_on = True
        with pytest.raises(ProducerClosed, match="closed"):
            await limiter.put(*records(1))
    assert went_on
    await gate.limiter.aclose()


async def test_records_that_wait_at_close_can_still_be_flushed():
    gate = Gate()
    async with gate.limiter as limiter:
        for record in records(5):
            await limiter.put(record)
    assert len(gate.admitted) == 1
    await gate.limiter.flush()
    assert len(gate.admitted) == 5


async def test_closing_while_records_are_passed_on_loses_none():
    """Records that had left their queue were lost with the task that passed them on."""
    gate = Gate(Config(rate_limit_records_per_sec_per_shard=10.0, burst_seconds=1.0), slow_seconds=0.3)
    async with gate.limiter as limiter:
        gate.slow_seconds = 0.0
        waiting = records(15)
        for record in waiting:
            await limiter.put(record)
        gate.slow_seconds = 10.0
        await anyio.sleep(1.0)
        await limiter.aclose()
        gate.slow_seconds = 0.0
        await limiter.flush()
    # The callback itself handles its cancellation while a record is passed to it.
    assert len(gate.admitted) >= 14


async def test_an_exception_of_the_block_is_raised_unchanged():
    gate = Gate()

    async def fail() -> None:
        async with gate.limiter:
            message = "mine"
            raise ValueError(message)

    with pytest.raises(ValueError, match="mine"):
        await fail()


async def test_a_callback_that_raises_ends_the_block():
    async def broken(record: KinesisRecord) -> None:
        message = "a bug"
        raise ZeroDivisionError(message)

    gate = Gate()
    limiter = Limiter(TEN_A_SECOND, on_admit=broken, on_expired=gate.on_expired)
    with pytest.RaisesGroup(ZeroDivisionError):
        async with limiter:
            with pytest.raises(ZeroDivisionError):
                await limiter.put(*records(1))
            await limiter.put(*records(1))
            await anyio.sleep(10.0)


async def test_a_limiter_that_was_not_entered_rejects_records():
    gate = Gate()
    with pytest.raises(ProducerClosed, match="put inside"):
        await gate.limiter.put(*records(1))
    await gate.limiter.aclose()


async def test_the_defaults_are_the_limits_of_a_shard():
    gate = Gate(Config())
    async with gate.limiter as limiter:
        for record in records(1_500):
            await limiter.put(record)
        await anyio.sleep(0.25)
        assert len(gate.admitted) == pytest.approx(1_250, abs=30)
