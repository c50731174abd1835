"""The shard map: fetched in the background, the old one in use, one clear warning."""

import logging
from itertools import pairwise

import anyio
import pytest

from kpl_core import Config, InvalidUserRecord, Producer
from kpl_core.hooks import ShardMapRefreshed
from kpl_core.testing import ErrorAnswer, FakeKinesis, Latency, RecordingHook, SplitDuringRequest, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.producer_scene import (
    STREAM,
    know_shards,
    producer,
    put,
    reasons,
    sent_records,
    service,
    unmetered,
)

pytestmark = pytest.mark.anyio

LIST = "ListShards"


class Listing(FakeTransport):
    """Notes when the shards were asked for."""

    def __init__(self, kinesis: FakeKinesis) -> None:
        super().__init__(kinesis, latency_seconds=0.0)
        self.asked_at: list[float] = []
        self.asked_limit_at: list[float] = []

    async def list_shards(self, stream):
        self.asked_at.append(anyio.current_time())
        return await super().list_shards(stream)

    async def max_record_bytes(self, stream):
        self.asked_limit_at.append(anyio.current_time())
        return await super().max_record_bytes(stream)


def listing(shards: int = 1) -> Listing:
    return Listing(FakeKinesis({STREAM: shards}, enforce_limits=False))


async def test_attempts_are_one_second_apart_then_half_as_long_again_up_to_thirty_with_jitter():
    transport = listing()
    transport.kinesis.faults.add(ErrorAnswer("LimitExceededException"), When(operation=LIST))
    async with producer(transport) as orders:
        put(orders, 1)
        await anyio.sleep(300.0)
    waits = [later - earlier for earlier, later in pairwise(transport.asked_at)]
    longest = 1.0
    for wait in waits:
        assert longest / 2 <= wait <= longest
        longest = min(30.0, longest * 1.5)
    assert longest == 30.0


async def test_the_map_is_asked_for_again_each_minute_in_which_records_are_delivered():
    transport = listing()
    async with producer(transport) as orders:
        for _ in range(100):
            put(orders, 10)
            await anyio.sleep(1.0)
        assert [round(asked_at) for asked_at in transport.asked_at] == [0, 60]
        await anyio.sleep(1_000.0)
    assert len(transport.asked_at) == 2


async def test_many_surprises_at_once_are_one_refresh():
    transport = listing(8)
    facts = RecordingHook()
    async with Producer(Config(), transport=transport, hooks=[facts]) as orders:
        await know_shards(orders)
        for _ in range(8):
            transport.kinesis.reshard(STREAM, SplitDuringRequest(), now=anyio.current_time())
        deliveries = put(orders, 500)
        await orders.flush()
        assert len(transport.asked_at) <= 3
    assert reasons(deliveries) == {"": 500}
    assert facts.of(ShardMapRefreshed)[-1] == ShardMapRefreshed(STREAM, 16)


async def test_the_old_map_stays_in_use_while_a_new_one_is_fetched():
    transport = unmetered(2)
    async with producer(transport) as orders:
        await know_shards(orders)
        transport.kinesis.faults.add(Latency(10.0), When(operation=LIST))
        transport.kinesis.reshard(STREAM, SplitDuringRequest(), now=anyio.current_time())
        for _ in range(50):
            put(orders, 20)
            await anyio.sleep(0.1)
        recent = sent_records(transport)[1:]
        assert len(recent) > 50
        assert {shard for _, shard, _ in recent} <= {"shardId-000000000000", "shardId-000000000001"}
        await orders.flush()


async def test_a_denied_listing_warns_once_degrades_its_stream_and_touches_no_other(caplog):
    transport = service(streams={STREAM: 2, "denied": 2})
    transport.kinesis.faults.add(
        ErrorAnswer("AccessDeniedException", "not authorized to perform: kinesis:ListShards"),
        When(operation=LIST, stream="denied"),
    )
    async with producer(transport) as orders:
        await know_shards(orders)
        deliveries = []
        for _ in range(30):
            deliveries += put(orders, 20, stream="denied")
            deliveries += put(orders, 20)
            await anyio.sleep(1.0)
        await orders.flush()
    assert reasons(deliveries) == {"": 1_200}
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage() == (
        "shards of stream 'denied' cannot be listed (AccessDeniedException: not authorized to perform: "
        "kinesis:ListShards); trying again in the background, until then its user records travel alone, "
        "without aggregation"
    )
    for request in transport.requests:
        assert all(not record.aggregated for record in request.records) or request.stream == STREAM


async def test_a_slow_listing_delays_no_put():
    transport = service(streams={STREAM: 2, "slow": 2})
    transport.kinesis.faults.add(Latency(20.0), When(operation=LIST, stream="slow"))
    async with producer(transport) as orders:
        deliveries = [*put(orders, 50, stream="slow"), *put(orders, 50)]
        for delivery in deliveries:
            await delivery
        assert anyio.current_time() < 0.3


async def test_it_warns_again_for_another_reason_and_after_a_recovery(caplog):
    transport = unmetered()

    def fail(code: str) -> None:
        transport.kinesis.faults.add(ErrorAnswer(code), When(operation=LIST, times=2))

    # Of two faults armed at once the first wins, and both are used up: the second has one left.
    fail("AccessDeniedException")
    transport.kinesis.faults.add(ErrorAnswer("LimitExceededException"), When(operation=LIST, times=3))
    async with producer(transport) as orders:
        put(orders, 1)
        await anyio.sleep(10.0)
        fail("AccessDeniedException")
        transport.kinesis.reshard(STREAM, SplitDuringRequest(), now=anyio.current_time())
        put(orders, 50)
        await orders.flush()
    codes = [message.split("(")[1].split(":")[0] for message in caplog.messages]
    assert codes == ["AccessDeniedException", "LimitExceededException", "AccessDeniedException"]


async def test_a_refresh_that_fails_says_that_the_old_map_is_in_use(caplog):
    transport = unmetered()
    async with producer(transport) as orders:
        await know_shards(orders)
        transport.kinesis.faults.add(ErrorAnswer("LimitExceededException"), When(operation=LIST, times=2))
        transport.kinesis.reshard(STREAM, SplitDuringRequest(), now=anyio.current_time())
        put(orders, 50)
        await orders.flush()
    assert caplog.text.count("the old shard map stays in use") == 1
    assert orders.report().delivered == 51


async def test_a_record_limit_that_may_not_be_asked_for_is_the_default_and_no_warning(caplog):
    transport = unmetered()
    transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="DescribeStreamSummary"))
    async with producer(transport) as orders:
        await know_shards(orders)
        put(orders, 1, size=1_000_000)
    assert orders.report().delivered == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_record_limit_that_could_not_be_had_is_asked_for_again_ever_more_rarely():
    transport = listing()
    transport.kinesis.update_max_record_size(STREAM, max_record_size_kib=10_240, now=0.0)
    transport.kinesis.faults.add(
        ErrorAnswer("AccessDeniedException"), When(operation="DescribeStreamSummary", ends_at=3_600.0)
    )
    async with producer(transport) as orders:
        put(orders, 1)
        await anyio.sleep(3_599.0)
        with pytest.raises(InvalidUserRecord, match="1,048,576"):
            put(orders, 1, size=1_500_000)
        await anyio.sleep(601.0)
        put(orders, 1, size=1_500_000)
        # It is known, and not asked for again.
        await anyio.sleep(7_200.0)
    asked_at = transport.asked_limit_at
    assert 15 <= len(asked_at) <= 35
    assert 3_600.0 <= asked_at[-1] <= 4_200.0
    waits = [later - earlier for earlier, later in pairwise(asked_at)]
    assert 0.5 <= waits[0] <= 1.0
    assert max(waits) <= 600.0
    assert orders.report().delivered == 2


async def test_a_configured_record_limit_is_not_asked_for():
    transport = unmetered()
    async with producer(transport, max_record_size=2_000_000) as orders:
        await know_shards(orders)
        calls = transport.kinesis.calls["DescribeStreamSummary"]
        put(orders, 1, size=1_500_000)
        await orders.flush()
        assert transport.kinesis.calls["DescribeStreamSummary"] == calls
