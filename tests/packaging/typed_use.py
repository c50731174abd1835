"""Not run: user code as a type checker reads it. Lines marked "wrong" must be rejected."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, assert_type

from fastapi import FastAPI

from kpl_core import (
    BlockingDelivery,
    BlockingProducer,
    Compressed,
    Config,
    Deliveries,
    Delivery,
    Producer,
    ProducerReport,
    ReceivedRecord,
    RecordResult,
    Topic,
    TopicProducer,
    UserRecord,
    decode,
    user_records,
)
from kpl_integrations.asgi import OutboxDelivery, OutboxProducer
from kpl_integrations.fastapi import KinesisRouter, ProducerDep, topic_dependency


async def puts(producer: Producer) -> None:
    delivery = producer.put_nowait("orders", partition_key="42", data=b"...")
    assert_type(delivery, Delivery)
    assert_type(await delivery, RecordResult)
    assert_type((await delivery).shard_id, str | None)
    assert_type(await producer.put_many("orders", [("42", b"..."), UserRecord("42", b"...")]), Deliveries)
    assert_type(await producer.put("orders", partition_key="42", data=bytearray(b"...")), Delivery)
    assert_type(await producer.put_many("orders", [("42", memoryview(b"..."))]), Deliveries)
    assert_type(await producer.flush(timeout=1.0), ProducerReport)
    producer.put_nowait("orders", "42", b"...")  # wrong: by keyword
    producer.put_nowait("orders", partition_key="42", data="text")  # wrong: bytes
    producer.put_nowait("orders", partition_key="42", data=b"...", tier="urgent")  # wrong: no such tier


def threads() -> None:
    with BlockingProducer(Config(region="us-east-1")) as producer:
        result = producer.put("orders", partition_key="42", data=b"...").result(timeout=1.0)
        assert_type(result, RecordResult)


def values() -> None:
    assert_type(decode(b"..."), tuple[UserRecord, ...] | None)
    Config(ordering="per_user")  # wrong: no such order
    Config("us-east-1")  # wrong: by keyword


app = FastAPI()
app.include_router(KinesisRouter(Config()))


@app.post("/orders")
async def take(producer: ProducerDep) -> None:
    assert_type(producer, Producer)


@app.post("/threads")
def take_in_a_thread(producer: ProducerDep) -> None:
    delivery = producer.put_blocking("orders", partition_key="42", data=b"...", timeout=1.0, flow="tenant")
    assert_type(delivery.wait(timeout=1.0), RecordResult)
    producer.put_blocking("orders", partition_key="42", data=b"...", flow=7)  # wrong: a str


@dataclass
class Order:
    customer: str
    total: int


orders = Topic("orders", Order, partition_key=lambda order: order.customer)
Topic("orders", Order, partition_key=lambda order: order.total)  # wrong: a str
Topic("orders", Order, partition_key=lambda order: order.buyer)  # wrong: no such field
Topic("orders", Order, partition_key=lambda order: order.customer, encoder="xml")  # wrong: no such encoder
Topic("orders", Order, partition_key=lambda order: order.customer, encoder=Compressed("msgpack", "zstd"))


async def topics(producer: Producer, outbox: OutboxProducer) -> None:
    bound: TopicProducer[Order] = orders.bind(producer)
    assert_type(bound.put_nowait(Order("42", 1)), Delivery)
    assert_type(await bound.put(Order("42", 1)), Delivery)
    assert_type(await bound.put_many([Order("42", 1)]), Deliveries)
    assert_type(await orders.bind(outbox).put(Order("42", 1)), OutboxDelivery)
    bound.put_nowait("text")  # wrong: an order
    await bound.put_many([("42", b"...")])  # wrong: orders


def topics_in_threads(producer: BlockingProducer) -> None:
    bound = orders.bind(producer)
    assert_type(bound.put(Order("42", 1)), BlockingDelivery)
    many: Sequence[BlockingDelivery] = bound.put_many([Order("42", 1)])
    assert_type(many[0], BlockingDelivery)
    bound.put(42)  # wrong: an order


Orders = Annotated[TopicProducer[Order], topic_dependency(orders)]


@app.post("/topics")
async def take_a_topic(order: Order, orders: Orders) -> None:
    assert_type(await orders.put(order), Delivery)


def reading(event: dict[str, object]) -> None:
    for record in user_records(event):
        assert_type(record, ReceivedRecord)
        assert_type(record.trace_context, dict[str, str])
    user_records(7)  # wrong: no source
