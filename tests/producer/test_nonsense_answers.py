"""A transport may be the caller's own: an invalid answer is a failure, and every record has its result."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from kpl_core import Config, Producer
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsEntry, RequestFailure
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.producer_scene import STREAM, assert_books_close, know_shards, put, reasons

pytestmark = pytest.mark.anyio

Changed = Callable[[Any], Any]


class Altering(FakeTransport):
    """Answers, for a while, something else than the service did."""

    def __init__(self, shards: int = 2) -> None:
        super().__init__(FakeKinesis({STREAM: shards}, enforce_limits=False), latency_seconds=0.01)
        self.answer: Changed | None = None
        self.shards: Changed | None = None
        self.limit: Changed | None = None
        self.listings = 0

    async def put_records(self, request: Any) -> Any:
        answer = await super().put_records(request)
        return answer if self.answer is None else self.answer(answer)

    async def list_shards(self, stream: str) -> Any:
        self.listings += 1
        shards = await super().list_shards(stream)
        return shards if self.shards is None else self.shards(shards)

    async def max_record_bytes(self, stream: str) -> Any:
        limit = await super().max_record_bytes(stream)
        return limit if self.limit is None else self.limit(limit)


NO_ANSWERS: list[Changed] = [
    lambda _: None,
    lambda entries: "x" * len(entries),
    lambda entries: [{"ShardId": entry.shard_id} for entry in entries],
    iter,
    lambda entries: [*entries[:-1], None],
    lambda entries: [PutRecordsEntry(None, None, 500, "oops") for _ in entries],  # type: ignore[arg-type]
    lambda entries: [PutRecordsEntry(None, None, [], "oops") for _ in entries],  # type: ignore[arg-type]
    lambda entries: [PutRecordsEntry("1", [], None, None) for _ in entries],  # type: ignore[arg-type]
    lambda _: RequestFailure(None, None),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("nonsense", NO_ANSWERS)
async def test_an_answer_that_is_none_is_a_failed_request_and_the_books_close(nonsense: Changed) -> None:
    transport = Altering()
    async with Producer(Config(record_ttl_ms=2_000), transport=transport) as orders:
        await know_shards(orders)
        transport.answer = nonsense
        failing = put(orders, 20)
        await anyio.sleep(3.0)
        transport.answer = None
        delivered = put(orders, 20)
    assert reasons(failing) == {"Expired": 20}
    (first, *_) = failing[0].result().attempts
    assert first.error_code == "Internal"
    assert "the transport's put_records returned" in (first.error_message or "")
    assert reasons(delivered) == {"": 20}
    report = orders.report()
    assert (report.accepted, report.delivered, report.failed_total) == (41, 21, 20)


@pytest.mark.parametrize("message", [None, 5, ["text"]])
async def test_an_expired_record_quotes_a_message_of_any_type(message: Any) -> None:
    transport = Altering()
    transport.answer = lambda _: RequestFailure("Odd", message)
    async with Producer(Config(record_ttl_ms=2_000), transport=transport) as orders:
        deliveries = put(orders, 20)
    assert reasons(deliveries) == {"Expired": 20}
    assert f"the last attempt: Odd{f': {message}' if message else ''}" in (deliveries[0].result().error_message or "")


async def test_an_answer_in_any_sequence_is_one() -> None:
    transport = Altering()
    transport.answer = tuple
    async with Producer(transport=transport) as orders:
        deliveries = put(orders, 20)
    assert_books_close(orders.report(), deliveries)
    assert reasons(deliveries) == {"": 20}


NO_SHARDS: list[Changed] = [
    lambda _: None,
    lambda _: [{}],
    lambda _: [Shard("shardId-000000000000", 0, 2**128)],
    lambda _: [Shard("shardId-000000000000", -1, 2**127)],
    lambda _: [Shard("shardId-000000000000", 2**127, 5)],
    lambda _: [Shard([], 0, 2**128 - 1)],  # type: ignore[arg-type]
]


@pytest.mark.parametrize("nonsense", NO_SHARDS)
async def test_shards_that_cannot_be_are_asked_for_again_and_end_nothing(
    nonsense: Changed, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Altering()
    transport.shards = nonsense
    async with Producer(transport=transport) as orders:
        deliveries = put(orders, 20)
        await orders.flush()
        assert caplog.text.count("the transport's list_shards returned") == 1
        transport.shards = None
        await anyio.sleep(60.0)
        deliveries += put(orders, 20)
    assert_books_close(orders.report(), deliveries)
    assert transport.requests[-1].records[0].aggregated


@pytest.mark.parametrize("nonsense", [None, 0, -1, "1"])
async def test_an_impossible_record_limit_refuses_no_record(nonsense: object) -> None:
    transport = Altering()
    transport.limit = lambda _: nonsense
    async with Producer(transport=transport) as orders:
        await know_shards(orders)
        deliveries = put(orders, 20)
    assert reasons(deliveries) == {"": 20}


def _none(_: Sequence[Shard]) -> list[Shard]:
    return []


def _the_first(shards: Sequence[Shard]) -> list[Shard]:
    return [shards[0]]


@pytest.mark.parametrize("incomplete", [_none, _the_first])
async def test_a_map_with_a_gap_is_asked_for_again_as_soon_as_a_record_is_stored_in_it(incomplete: Changed) -> None:
    transport = Altering()
    transport.shards = incomplete
    async with Producer(transport=transport) as orders:
        await know_shards(orders)
        put(orders, 20)
        await orders.flush()
        transport.shards = None
        put(orders, 20)
        await anyio.sleep(2.0)
        before = len(transport.requests)
        listings = transport.listings
        put(orders, 100)
        await orders.flush()
        assert all(record.aggregated for request in transport.requests[before:] for record in request.records)
        # And then it is left alone.
        await anyio.sleep(60.0)
        assert transport.listings == listings
