"""Several producers on one shard, each as if in its own process, in virtual time."""

import time
from collections import Counter
from typing import Any

import anyio
import pytest

from kpl_core import Config, ConfigError, CoordinationOptions, Producer
from kpl_core.coordination import CoordinationStore, MemoryStore, StoreFailed
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.hooks import CoordinatorMet, Fact, RequestCompleted, ShareChanged
from tests.support.producer_scene import AT_A_TENTH, STREAM, TENTH, Watched, service
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio
SECONDS = 12.0
INTERVAL = 1.0
RECORDS_PER_SECOND = TENTH.records_per_second_per_shard


@pytest.fixture
def anyio_backend() -> Backend:
    """A fleet takes a second of CPU time. test_bad_stores.py runs the workers on both backends."""
    return virtual_time_backend("asyncio")


class Virtual(MemoryStore):
    """A store whose clock starts near the machine's clock and follows virtual time."""

    def __init__(self) -> None:
        began = time.time()
        super().__init__(lambda: began + anyio.current_time())


class Down(Virtual):
    """A store that is down, from the start or from some instant on."""

    def __init__(self, *, is_down: bool = True) -> None:
        super().__init__()
        self.is_down = is_down

    async def read(self, name):
        if self.is_down:
            message = "no answer"
            raise StoreFailed(message, reason="down")
        return await super().read(name)


def coordinated(
    transport: Watched, store: CoordinationStore | None, index: int, facts: list[Fact], **options: object
) -> Producer:
    fields: dict[str, Any] = {"max_workers": 4, "interval_seconds": INTERVAL, "worker_id": f"w{index}", **options}
    coordination = CoordinationOptions(store="memory://unused", **fields)
    config = Config(
        coordination=coordination if store else None,
        aggregation_enabled=False,
        record_ttl_ms=120_000,
        max_outstanding_records=100,
        **AT_A_TENTH,
    )
    return Producer(config, transport=transport, hooks=[facts.append], coordination_store=store)


def tenth() -> Watched:
    return service(limits=TENTH)


async def press(producer: Producer, seconds: float, *, records_per_second: float = 0.0) -> None:
    """Put as fast as there is room, or at a rate."""
    end = anyio.current_time() + seconds
    number = 0
    while anyio.current_time() < end:
        number += 1
        _ = await producer.put(STREAM, partition_key=f"key {number}", data=b"x" * 20)
        if records_per_second:
            await anyio.sleep(1 / records_per_second)


async def pressed(count: int, store: CoordinationStore | None, **options: object) -> tuple[float, float, list[Fact]]:
    """Saturate a shard; return, for the second half: throttled / sent, delivered / capacity, facts."""
    transport = tenth()
    facts: list[Fact] = []
    half: Counter[str] = Counter()

    async def one(index: int) -> None:
        async with coordinated(transport, store, index, facts, **options) as producer:
            await press(producer, SECONDS)
            await producer.close(timeout=0.1)

    async with anyio.create_task_group() as producers:
        for index in range(count):
            producers.start_soon(one, index)
        await anyio.sleep(SECONDS / 2)
        facts.clear()
        await anyio.sleep(SECONDS / 2)
        seen = list(facts)
    for fact in seen:
        if isinstance(fact, RequestCompleted):
            half["sent"] += fact.kinesis_records
            half["throttled"] += sum(fact.throttled_by_shard.values())
    return (
        half["throttled"] / half["sent"],
        (half["sent"] - half["throttled"]) / (SECONDS / 2 * RECORDS_PER_SECOND),
        seen,
    )


@pytest.mark.long
async def test_four_producers_use_one_shard_without_being_throttled():
    throttled, used, facts = await pressed(4, Virtual())
    assert throttled < 0.005
    assert used >= 0.95
    assert {fact.failure for fact in facts if isinstance(fact, CoordinatorMet)} == {""}
    assert {fact.state for fact in facts if isinstance(fact, CoordinatorMet)} == {"leased"}


@pytest.mark.long
async def test_four_producers_without_coordination_are_throttled():
    throttled, _, _ = await pressed(4, None)
    assert throttled > 0.02


async def test_the_share_of_an_idle_producer_is_used_by_the_other():
    transport, store = tenth(), Virtual()
    facts: list[Fact] = []
    async with (
        coordinated(transport, store, 1, facts, max_workers=2) as busy,
        coordinated(transport, store, 2, [], max_workers=2) as idle,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: press(idle, 12.0, records_per_second=0.4))
        await press(busy, 12.0)
        assert max(fact.records for fact in facts if isinstance(fact, ShareChanged)) > 0.8
        assert busy.coordination is not None
        assert max(busy.coordination.shares().values()) > 0.6
        assert busy.coordination.lease_age() < 2.0
        await busy.close(timeout=0.1)


async def test_without_a_store_since_the_start_a_producer_lets_the_shard_decide_and_logs_it_once(caplog):
    transport, store = tenth(), Down()
    facts: list[Fact] = []
    async with coordinated(transport, store, 1, facts, max_workers=4) as producer:
        await press(producer, 10.0)
        sent = producer.report().delivered
        await producer.close(timeout=0.1)
    # It begins with a sixth of a quarter of the shard's rate, and has all of it after a few seconds.
    assert 0.5 * 10 * RECORDS_PER_SECOND < sent < 10 * RECORDS_PER_SECOND
    failures = {fact.failure for fact in facts if isinstance(fact, CoordinatorMet)}
    assert failures == {"down"}
    warnings = [record for record in caplog.records if "coordination" in record.message]
    assert len(warnings) == 1
    assert "no answer. In force: " in warnings[0].message
    assert warnings[0].message.endswith(
        "4.167 and 4369 a second. No store has answered since the start, so the service's throttling decides."
    )


async def test_a_store_that_goes_down_changes_no_share():
    transport, store = tenth(), Down(is_down=False)
    facts: list[Fact] = []
    async with coordinated(transport, store, 1, facts, max_workers=1) as producer, anyio.create_task_group() as tasks:
        tasks.start_soon(press, producer, 30.0)
        await anyio.sleep(6.0)
        store.is_down = True
        before = producer.report().delivered
        await anyio.sleep(15.0)
        assert producer.report().delivered - before == pytest.approx(15 * RECORDS_PER_SECOND, rel=0.05)
        tasks.cancel_scope.cancel()
        await producer.close(timeout=0.1)
    states = [fact.state for fact in facts if isinstance(fact, CoordinatorMet)]
    assert "expired" in states


async def test_in_shadow_mode_shares_are_reported_and_not_enforced(caplog):
    caplog.set_level("INFO", logger="kpl_core")
    transport, store = tenth(), Virtual()
    facts: list[Fact] = []
    async with coordinated(transport, store, 1, facts, max_workers=10, shadow=True) as producer:
        await press(producer, 5.0)
        assert producer.report().delivered > 4.5 * RECORDS_PER_SECOND
        await producer.close(timeout=0.1)
    changes = [fact for fact in facts if isinstance(fact, ShareChanged)]
    assert changes
    assert not any(fact.enforced for fact in changes)
    assert any("would be limited to" in record.message for record in caplog.records)


async def test_a_closed_producer_returns_its_share_at_once():
    transport, store = tenth(), Virtual()
    facts: list[Fact] = []
    async with coordinated(transport, store, 1, facts, max_workers=2) as staying:
        async with (
            coordinated(transport, store, 2, facts, max_workers=2) as leaving,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(press, leaving, 6.0)
            await press(staying, 6.0)
        facts.clear()
        await press(staying, 2.0)
        shares = [fact.records for fact in facts if isinstance(fact, ShareChanged)]
        assert shares[-1] > 0.9
        await staying.close(timeout=0.1)


async def test_a_store_without_options_raises():
    with pytest.raises(ConfigError, match=r"no Config\.coordination"):
        async with Producer(Config(), transport=service(), coordination_store=Virtual()):
            pass


async def test_hooks_hear_of_a_share_whose_bytes_alone_have_changed():
    facts: list[Fact] = []
    limit = (1_000.0, 1e6)
    worker = CoordinationWorker(
        Virtual(),
        CoordinationOptions(store="memory://unused", interval_seconds=INTERVAL, max_workers=4),
        usages=lambda: {"orders/shard-0": Usage(limit, (0.0, 0.0))},
        apply_shares=lambda _: None,
        tell=facts.append,
        clock=anyio.current_time,
    )

    async def told() -> list[ShareChanged]:
        facts.clear()
        await worker.step()
        return [fact for fact in facts if isinstance(fact, ShareChanged)]

    # Before the first sync a worker has its part of the limit.
    assert len(await told()) == 1
    assert await told() == []
    for limit in ((1_000.0, 5e5), (500.0, 5e5)):  # noqa: B007 - `usages` reads it
        await anyio.sleep(3 * INTERVAL)
        assert len(await told()) == 1
    # A change below 1 % is none.
    limit = (500.0, 5.02e5)
    await anyio.sleep(3 * INTERVAL)
    assert await told() == []


async def test_hooks_hear_of_the_share_of_a_shard_that_was_away():
    facts: list[Fact] = []
    usages = {"orders/shard-0": Usage((1_000.0, 1e6), (0.0, 0.0))}
    worker = CoordinationWorker(
        Virtual(),
        CoordinationOptions(store="memory://unused", interval_seconds=INTERVAL, max_workers=4),
        usages=lambda: usages,
        apply_shares=lambda _: None,
        tell=facts.append,
        clock=anyio.current_time,
    )
    told: list[int] = []
    for present in (usages, {}, usages):
        usages = present
        facts.clear()
        await worker.step()
        told.append(sum(isinstance(fact, ShareChanged) for fact in facts))
        await anyio.sleep(3 * INTERVAL)
    assert told == [1, 0, 1]
