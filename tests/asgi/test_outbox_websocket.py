"""A WebSocket has no status, so it uses the producer itself; a full buffer closes or rejects the connection."""

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket

from kpl_core import Config, Producer
from kpl_integrations.asgi import (
    BackpressureMiddleware,
    KinesisLifespan,
    OutboxProducer,
    RequestOutboxMiddleware,
    producer_of,
)
from kpl_integrations.asgi.testing import KinesisDouble


def put_two(producer: OutboxProducer | Producer) -> None:
    producer.put_nowait("orders", partition_key="1", data=b"first")
    producer.put_nowait("orders", partition_key="1", data=b"second")


def test_a_websocket_uses_the_producer_itself(kinesis_double: KinesisDouble) -> None:
    async def socket(websocket: WebSocket) -> None:
        producer = producer_of(websocket.scope)
        await websocket.accept()
        assert (await producer.put_nowait("orders", partition_key="1", data=b"ws")).successful
        await websocket.close()

    app = Starlette(
        routes=[WebSocketRoute("/", socket)],
        middleware=[Middleware(RequestOutboxMiddleware)],
        lifespan=KinesisLifespan(),
    )
    with TestClient(app) as client, client.websocket_connect("/"):
        pass
    assert [record.data for record in kinesis_double.user_records("orders")] == [b"ws"]


def test_a_full_buffer_closes_a_websocket_with_try_again_later(kinesis_double: KinesisDouble) -> None:
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        producer = producer_of(websocket.scope)
        put_two(producer)
        put_two(producer)

    app = Starlette(
        routes=[WebSocketRoute("/", socket)],
        middleware=[Middleware(BackpressureMiddleware)],
        lifespan=KinesisLifespan(Config(max_outstanding_records=2)),
    )
    with TestClient(app) as client, client.websocket_connect("/") as websocket:
        assert websocket.receive() == {"type": "websocket.close", "code": 1013, "reason": "buffer-full"}


def test_a_full_buffer_rejects_a_websocket_handshake_with_503(kinesis_double: KinesisDouble) -> None:
    async def socket(websocket: WebSocket) -> None:
        put_two(producer_of(websocket.scope))
        put_two(producer_of(websocket.scope))

    app = Starlette(
        routes=[WebSocketRoute("/", socket)],
        middleware=[Middleware(BackpressureMiddleware)],
        lifespan=KinesisLifespan(Config(max_outstanding_records=2)),
    )
    with TestClient(app) as client:
        with pytest.raises(WebSocketDenialResponse) as raised, client.websocket_connect("/"):
            pass
        answer = raised.value
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["code"] == "buffer-full"
