"""A topic has the put methods of each producer, and their results."""

import asyncio
from typing import Annotated

import msgspec
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from starlette.testclient import TestClient

from kpl_core import BlockingProducer, BufferFull, Config, Producer, Topic, TopicProducer, user_records
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.asgi import KinesisLifespan, RequestOutboxMiddleware
from kpl_integrations.asgi.testing import KinesisDouble
from kpl_integrations.fastapi import topic_dependency
from kpl_integrations.otel import current_trace_context
from tests.support.orders import OrderModel, OrderStruct

ORDERS = Topic("orders", OrderStruct, partition_key=lambda order: order.customer)
VALUES = [OrderStruct(f"c-{number}", number) for number in range(3)]


def stored(fake: FakeKinesis) -> list[OrderStruct]:
    records = [record for each in fake.records("orders") for record in user_records(each.data)]
    return [msgspec.json.decode(record.data, type=OrderStruct) for record in records]


def test_an_async_producer_puts_values() -> None:
    fake = FakeKinesis({"orders": 1})

    async def main() -> None:
        async with Producer(transport=FakeTransport(fake)) as producer:
            orders = ORDERS.bind(producer)
            deliveries = [orders.put_nowait(VALUES[0]), await orders.put(VALUES[1]), *await orders.put_many(VALUES[2:])]
            assert {(await delivery).successful for delivery in deliveries} == {True}

    asyncio.run(main())
    assert stored(fake) == VALUES


def test_a_blocking_producer_puts_values() -> None:
    fake = FakeKinesis({"orders": 1})
    with BlockingProducer(transport=FakeTransport(fake)) as producer:
        orders = ORDERS.bind(producer)
        deliveries = [orders.put_nowait(VALUES[0]), orders.put(VALUES[1]), *orders.put_many(VALUES[2:])]
        assert {delivery.result(10).successful for delivery in deliveries} == {True}
    assert stored(fake) == VALUES


def test_a_full_buffer_is_the_producers_error() -> None:
    async def main() -> None:
        config = Config(max_outstanding_records=1)
        async with Producer(config, transport=FakeTransport(FakeKinesis({"orders": 1}))) as producer:
            orders = ORDERS.bind(producer)
            _ = orders.put_nowait(VALUES[0])
            with pytest.raises(BufferFull):
                _ = orders.put_nowait(VALUES[1])

    asyncio.run(main())


orders_of_models = Topic("orders", OrderModel, partition_key=lambda order: order.customer)
Orders = Annotated[TopicProducer[OrderModel], topic_dependency(orders_of_models)]


@pytest.mark.parametrize("has_outbox", [False, True])
def test_a_route_gets_the_topic_of_its_request(kinesis_double: KinesisDouble, *, has_outbox: bool) -> None:
    app = FastAPI(lifespan=KinesisLifespan())
    if has_outbox:
        app.add_middleware(RequestOutboxMiddleware)

    @app.post("/async")
    async def async_route(order: OrderModel, orders: Orders) -> None:
        _ = await orders.put(order)
        _ = await orders.put_many([order])

    @app.post("/sync")
    def sync_route(order: OrderModel, orders: Orders) -> None:
        _ = orders.put_nowait(order)

    with TestClient(app) as client:
        for path in ("/async", "/sync"):
            assert client.post(path, json={"customer": path, "total": 1}).status_code == 200
    records = kinesis_double.user_records("orders")
    assert [record.partition_key for record in records] == ["/async", "/async", "/sync"]
    assert msgspec.json.decode(records[0].data) == {"customer": "/async", "total": 1}


def test_the_trace_context_of_the_current_span_is_read_back() -> None:
    traced = Topic("orders", OrderStruct, partition_key=lambda _: "1", trace_context=current_trace_context)
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        data = traced.record(VALUES[0]).data
    (received,) = user_records(data)
    assert f"{span.get_span_context().trace_id:032x}" in received.trace_context["traceparent"]
    (outside,) = user_records(traced.record(VALUES[0]).data)
    assert outside.trace_context == {}
