"""The breaker in the journey: it opens on records, spares the shard, and finds back; in virtual time."""

from typing import Any

import anyio
import pytest

from kpl_core.hooks import BreakerChanged
from kpl_core.options.reliability import BreakerPolicy
from kpl_core.testing import ErrorAnswer, RecordError, When
from tests.support.durability_scene import STREAM, assert_invariant, assert_streams_add_up, consumed, producer, service
from tests.support.material import even_shards, keys_in
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio
SHARD = "shardId-000000000000"
OPTIONS: dict[str, Any] = {"breaker": BreakerPolicy(), "aggregation_enabled": False, "adaptive_rate": False}


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


async def steadily(each, seconds: float, *, key: str = "k", tier="normal", per_second: int = 50, first: int = 0):
    deliveries = []
    for n in range(int(seconds * per_second)):
        deliveries.append(each.put_nowait(STREAM, partition_key=key, data=b"%d" % (first + n), tier=tier))
        await anyio.sleep(1 / per_second)
    return deliveries


async def test_throttles_inside_http_200_open_a_shard_within_a_second_and_health_closes_it_within_ten():
    transport = service(shards=2)
    throttled = transport.kinesis.faults.add(RecordError(), When(shard_id=SHARD, starts_at=2.0))
    key, other = (keys_in(shard, 1)[0] for shard in even_shards(2))
    facts: list[tuple[float, BreakerChanged]] = []

    def hook(fact):
        if isinstance(fact, BreakerChanged):
            facts.append((anyio.current_time(), fact))

    async with producer(transport, hooks=[hook], **OPTIONS) as each:
        healthy = await steadily(each, 2.0, key=key)
        before = len(transport.requests)
        waiting = await steadily(each, 8.0, key=key, first=1_000)
        others = await steadily(each, 1.0, key=other, first=5_000)
        assert each.breakers()[STREAM, SHARD].known_state == "open"
        assert each.statistics()[STREAM].breakers[SHARD] == "open"
        assert each.unready() == []
        opened_at, opened = facts[0]
        assert (opened.shard_id, opened.state) == (SHARD, "open")
        assert opened_at - 2.0 < 1.0
        # What an open breaker spares the shard: probes, not thousands of tries.
        assert len(transport.requests) - before < 200
        assert all([(await delivery).successful for delivery in healthy + others])
        transport.kinesis.faults.remove(throttled)
        healthy_at = anyio.current_time()
        assert all([(await delivery).successful for delivery in waiting])
        assert anyio.current_time() - healthy_at < 10.0
        assert each.breakers()[STREAM, SHARD].state(anyio.current_time()) == "closed"
        assert facts[-1][1].state == "closed"
        assert facts[-1][0] - healthy_at < 10.0
        assert_streams_add_up(each)
    assert_invariant(each.report())
    assert set(consumed(transport).values()) == {1}


async def test_a_service_that_is_down_opens_the_whole_stream_and_readiness_says_so():
    transport = service(shards=2)
    outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    async with producer(transport, **OPTIONS) as each:
        deliveries = await steadily(each, 3.0)
        assert any("breaker" in reason for reason in each.unready())
        transport.kinesis.faults.remove(outage)
        assert all([(await delivery).successful for delivery in deliveries])
        assert each.unready() == []
    assert_invariant(each.report())


async def test_a_mistake_of_the_caller_opens_nothing():
    transport = service()
    transport.kinesis.faults.add(RecordError("ValidationException"), When(probability=0.9))
    async with producer(transport, **OPTIONS) as each:
        _ = await steadily(each, 3.0)
        assert set(each.statistics()[STREAM].breakers.values()) == {"closed"}
    assert_invariant(each.report())


async def test_while_it_is_open_critical_is_tried_within_its_reserve_and_bulk_fails():
    transport = service()
    transport.kinesis.faults.add(RecordError(), When(starts_at=1.0))
    async with producer(transport, record_ttl_ms=60_000, **OPTIONS) as each:
        _ = await steadily(each, 3.0)
        bulk = await steadily(each, 0.5, tier="bulk", first=10_000)
        before = len(transport.requests)
        critical = await steadily(each, 0.5, tier="critical", first=20_000)
        await anyio.sleep(0.1)
        assert len(transport.requests) > before
        codes = {(await delivery).error_code for delivery in bulk[10:]}
        assert codes <= {"BreakerOpen"}
        assert not any(delivery.done for delivery in critical)
        transport.kinesis.faults.clear()
        assert all([(await delivery).successful for delivery in critical])
    assert_invariant(each.report())


async def test_a_break_ends_by_time_alone_although_nothing_is_left_that_waits_for_it():
    """A caller that puts nothing while it is open, as the gateway does, would never hear that it may put again."""
    transport = service()
    outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    facts: list[tuple[float, str]] = []

    def hook(fact):
        if isinstance(fact, BreakerChanged):
            facts.append((anyio.current_time(), fact.state))

    async with producer(transport, hooks=[hook], record_ttl_ms=500, **OPTIONS) as each:
        deliveries = await steadily(each, 1.0)
        assert not any([(await delivery).successful for delivery in deliveries])
        transport.kinesis.faults.remove(outage)
        expired_at = anyio.current_time()
        await anyio.sleep(10.0)
        assert facts[-1][1] == "half_open"
        assert facts[-1][0] - expired_at <= BreakerPolicy().max_open_seconds
        assert all([(await delivery).successful for delivery in await steadily(each, 1.0)])
        assert facts[-1][1] == "closed"
    assert_invariant(each.report())


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_refused_record_says_whose_breaker_stopped_it(is_whole):
    transport = service(shards=2)
    fault = (ErrorAnswer("InternalFailure"), When()) if is_whole else (RecordError(), When(shard_id=SHARD))
    transport.kinesis.faults.add(*fault)
    key = keys_in(even_shards(2)[0], 1)[0]
    async with producer(transport, **OPTIONS) as each:
        await steadily(each, 3.0, key=key)
        results = [await delivery for delivery in await steadily(each, 1.0, key=key, first=1_000, tier="bulk")]
        transport.kinesis.faults.clear()
    said = {result.error_message for result in results if result.error_code == "BreakerOpen"}
    assert said == {f"the circuit breaker of {f'stream {STREAM}' if is_whole else f'shard {SHARD}'} is open"}
