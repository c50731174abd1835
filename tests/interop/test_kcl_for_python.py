"""The recipe of docs/howto/kcl.md: the real MultiLangDaemon, and the example's record processor in Python."""

import asyncio
import json
import uuid
from collections.abc import Iterable, Sequence

from kpl_core import Producer, RecordResult, UserRecord
from tests.interop.consumers.order_storage import NAME, OrderStorage
from tests.interop.consumers.user_records import ReadUserRecord
from tests.interop.ledger import Ledger, PutUserRecord
from tests.interop.production import assert_all_delivered, assert_delivered_where_told, config
from tests.interop.streams import Stream

TEXTS = ("", "plain", "höchst 🦉", "\u2028\x00\n", "x" * 300)
MOST_AGGREGATED_RECORDS = 10
# What the daemon logs for each shard when it asks the processor for a last checkpoint.
ASKED = '{"action":"status","responseFor":"shutdownRequested"}'


def _orders(count: int, *, customers: int = 7) -> list[PutUserRecord]:
    """Return orders with ids of their own, on `customers` partition keys, with data of many lengths."""
    orders = []
    for number in range(count):
        order = {"id": str(uuid.uuid4()), "text": TEXTS[number % len(TEXTS)]}
        data = json.dumps(order, ensure_ascii=number % 2 == 0).encode()
        orders.append(PutUserRecord(f"customer-{number % customers}", data))
    return orders


def _put(
    stream: Stream, records: Sequence[PutUserRecord], *, aggregate: bool = True
) -> tuple[list[PutUserRecord], list[RecordResult]]:
    """Put a first order and the records in order, and return all. Before the first result, no shard is known."""
    put = [PutUserRecord("first", json.dumps({"id": f"first-{uuid.uuid4()}"}).encode()), *records]

    async def run() -> list[RecordResult]:
        options = config(stream.emulator, aggregation_enabled=aggregate, ordering="per_key")
        async with Producer(options) as producer:
            user_records = [UserRecord(record.partition_key, record.data) for record in put]
            first = await (await producer.put_many(stream.name, user_records[:1])).results()
            return [*first, *await (await producer.put_many(stream.name, user_records[1:])).results()]

    results = asyncio.run(run())
    assert_all_delivered(put, results)
    return put, results


def _kinesis_records(results: Sequence[RecordResult]) -> set[tuple[str | None, str | None]]:
    return {(result.shard_id, result.sequence_number) for result in results}


def test_the_kcl_for_python_stores_each_order_once_in_order_and_byte_for_byte(
    order_storage: OrderStorage, ledger: Ledger
) -> None:
    stream = order_storage.stream
    before = {record.sequence_number for record in order_storage.stored()}
    orders, single = _orders(1_000), _orders(50)

    put, results = _put(stream, orders)
    put_alone, single_results = _put(stream, single, aggregate=False)
    # A producer that gets no answer sends again: these orders come twice, with two sequence numbers.
    put_again, _ = _put(stream, orders[:200])
    order_storage.wait_until_caught_up()

    assert len(_kinesis_records(results)) <= MOST_AGGREGATED_RECORDS
    assert len(_kinesis_records(single_results)) == len(put_alone)
    read = [record for record in order_storage.stored() if record.sequence_number not in before]
    ledger.compare(str(stream.emulator), NAME, put=[*put, *put_alone, *put_again[:1]], read=read)
    assert_delivered_where_told([*put, *put_alone], [*results, *single_results], read)
    assert _by_customer(read) == _by_customer([*put, *put_alone, *put_again[:1]])
    for shard in stream.open_shards():
        places = order_storage.places(shard.shard_id)
        # Java de-aggregated: the program decodes nothing, and gets each user record with its place.
        assert {sub for _, sub in places} >= set(range(10))
        assert places == sorted(places, key=lambda place: (int(place[0]), place[1]))


def test_the_kcl_for_python_sets_a_record_that_is_no_order_aside(order_storage: OrderStorage) -> None:
    malformed = [b"", b"no JSON", b"[1]", bytes(range(256)), b"[" * 20_000, b'{"id": "\\ud800"}']
    before = len(order_storage.rejected())

    put, _ = _put(order_storage.stream, [PutUserRecord("customer-1", data) for data in malformed])
    order_storage.wait_until_caught_up()

    assert order_storage.rejected()[before:] == malformed
    assert put[0].data in {record.data for record in order_storage.stored()}


def test_the_kcl_for_python_continues_inside_an_aggregated_record_after_a_failure(order_storage: OrderStorage) -> None:
    stream = order_storage.stream
    orders = _orders(380, customers=1)
    order_storage.wait_until_first_lease()
    order_storage.change(
        f"CREATE TRIGGER full BEFORE INSERT ON orders WHEN new.id = '{json.loads(orders[350].data)['id']}' "
        "BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )

    _, results = _put(stream, orders)
    shard_id, number = str(results[-1].shard_id), str(results[-1].sequence_number)
    inside = [order.data for order, result in zip(orders, results[1:], strict=True) if result.sequence_number == number]
    failing = inside.index(orders[350].data)
    assert order_storage.wait_until_ended() == 1

    assert "disk full" in order_storage.log()
    stored = _stored_of(order_storage, number)
    # The transaction of the failed order is gone, and its records are at most 100.
    assert max(0, failing - 100) < len(stored) <= failing
    assert stored == inside[: len(stored)]
    assert order_storage.checkpoint(shard_id) == (number, len(stored) - 1)

    order_storage.change("DROP TRIGGER full")
    order_storage.start()
    order_storage.wait_until_caught_up()

    assert _stored_of(order_storage, number) == inside
    assert f"shard {shard_id} starts after {number}/{len(stored) - 1}" in order_storage.log()


def test_the_kcl_for_python_asks_for_a_last_checkpoint_on_sigterm(order_storage: OrderStorage) -> None:
    order_storage.wait_until_first_lease()
    before = order_storage.log().count(ASKED)

    order_storage.terminate()
    log = order_storage.log()
    order_storage.start()

    assert log.count(ASKED) - before == len(order_storage.stream.open_shards())


def _stored_of(order_storage: OrderStorage, number: str) -> list[bytes]:
    return [record.data for record in order_storage.stored() if record.sequence_number == number]


def _by_customer(records: Iterable[PutUserRecord] | Iterable[ReadUserRecord]) -> dict[str, list[bytes]]:
    by_customer: dict[str, list[bytes]] = {}
    for record in records:
        by_customer.setdefault(record.partition_key, []).append(record.data)
    return by_customer
