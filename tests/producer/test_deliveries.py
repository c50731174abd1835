"""What `put_many` returns: a sequence that makes deliveries when they are asked for, and all results at once."""

import asyncio
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given, strategies as st

from kpl_core import Deliveries, Delivery, UserRecord
from kpl_core.producer.delivery import each_alone
from kpl_core.records.outcome import Outcome
from kpl_core.records.record_result import Attempt
from tests.support.producer_scene import STREAM, producer, service, unmetered

pytestmark = pytest.mark.anyio


async def test_it_is_a_sequence_of_deliveries_in_the_order_of_the_records():
    async with producer(unmetered(4)) as orders:
        put = [(f"key {number}", b"%d" % number) for number in range(600)]
        deliveries = await orders.put_many(STREAM, [*put, UserRecord("k", b"x", "7"), ("k", bytes(60_000))])
        assert isinstance(deliveries, Sequence)
        assert len(deliveries) == 602
        assert repr(deliveries) == "<Deliveries of 602 user records>"
        await orders.flush()
    results = await deliveries.results()
    assert [result.successful for result in results] == [True] * 602
    assert [delivery.result() for delivery in deliveries] == results
    assert [deliveries[at].result() for at in (0, 601, -1)] == [results[at] for at in (0, 601, -1)]
    assert deliveries[600].outcome is not deliveries[601].outcome
    assert isinstance(deliveries[5], Delivery)
    with pytest.raises(IndexError):
        _ = deliveries[602]
    with pytest.raises(TypeError):
        _ = deliveries[0] in deliveries


async def test_a_slice_of_it_has_results_too():
    async with producer(unmetered(4)) as orders:
        deliveries = await orders.put_many(STREAM, [(f"key {number}", b"x") for number in range(10)])
        results = await deliveries.results()
    assert await deliveries[2:9:3].results() == results[2:9:3]
    assert await deliveries[10:].results() == []
    assert await deliveries[10:].all_successful()


async def test_the_deliveries_of_each_record_apart_have_its_result():
    async with producer(unmetered(4)) as orders:
        deliveries = await orders.put_many(STREAM, [(f"key {number}", b"x") for number in range(10)])
        apart = list(each_alone(deliveries))
        assert [len(each) for each in apart] == [1] * 10
        assert [await each.results() for each in apart] == [[result] for result in await deliveries.results()]
        assert [each[0].index for each in apart] == [each.index for each in deliveries]


async def test_results_wait_for_the_last_record():
    transport = unmetered(2, latency_seconds=0.5)
    async with producer(transport) as orders:
        deliveries = await orders.put_many(STREAM, [(f"key {number}", b"x") for number in range(1_000)])
        with anyio.move_on_after(0.3) as scope:
            await deliveries.results()
        assert scope.cancelled_caught
        assert all(result.successful for result in await deliveries.results())


async def test_failures_wait_for_the_last_record():
    async with producer(unmetered(2, latency_seconds=0.5)) as orders:
        deliveries = await orders.put_many(STREAM, [(f"key {number}", b"x") for number in range(1_000)])
        with anyio.move_on_after(0.3) as scope:
            await deliveries.failures()
        assert scope.cancelled_caught
        assert await deliveries.failures() == {}
        assert await deliveries.all_successful()


@given(st.lists(st.sampled_from(["stored", "failed", "moved and stored", "moved and failed"])))
async def test_failures_are_the_results_that_are_not_successful(ends):
    outcomes = {end: Outcome() for end in ("stored", "failed")}
    first = Outcome()
    deliveries = Deliveries(len(ends))
    for position, end in enumerate(ends):
        how = end.removeprefix("moved and ")
        deliveries.set(position, Delivery(outcomes[how] if how == end else first, position))
        if how != end:
            first.move(position, outcomes[how], position)
    outcomes["stored"].settle(shard_id="shard-0", sequence_number="1")
    outcomes["failed"].settle()
    results = await deliveries.results()
    failures = {position: result for position, result in enumerate(results) if not result.successful}
    assert sorted(failures) == [position for position, end in enumerate(ends) if end.endswith("failed")]
    assert await deliveries.failures() == failures
    assert await deliveries.all_successful() == (not failures)


async def test_results_of_records_that_moved_and_failed_apart_are_their_own():
    first, second = Outcome(), Outcome()
    deliveries = Deliveries(3)
    for position in range(3):
        deliveries.set(position, Delivery(first, position))
    first.move(1, second, 0)
    first.attempted(Attempt(True, None, None, 0.0, 1.0))
    first.settle(shard_id="shardId-000000000000", sequence_number="1")
    second.attempted(Attempt(False, "Expired", "too late", 0.0, 2.0))
    second.settle()
    assert [result.error_code for result in await deliveries.results()] == [None, "Expired", None]
    assert [result.error_code for result in await deliveries.results()] == [None, "Expired", None]


async def test_a_failed_record_is_a_result(anyio_backend_name):
    async with producer(service(), record_ttl_ms=100, record_max_buffered_time_ms=50) as orders:
        deliveries = await orders.put_many("unknown", [("k", b"x")] * 3)
        results = await deliveries.results()
    assert [result.successful for result in results] == [False] * 3
    if anyio_backend_name == "asyncio":
        assert await asyncio.gather(*deliveries) == results


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (None, "records must be an iterable of pairs or of UserRecords, not NoneType"),
        ([("k", b"x", "7")], "a tuple of 3"),
    ],
)
async def test_what_is_no_list_of_records_is_refused_by_name(records, problem):
    async with producer(unmetered(1)) as orders:
        with pytest.raises(TypeError, match=problem):
            await orders.put_many(STREAM, records)
        assert orders.report().accepted == 0
