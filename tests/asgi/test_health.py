"""Liveness and readiness endpoints."""

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from kpl_core import BufferFull, Config
from kpl_core.limits import RejectionMonitor
from kpl_integrations.asgi import (
    BackpressureMiddleware,
    HealthEndpoints,
    KinesisLifespan,
    RequestOutboxMiddleware,
    producer_of,
    rejection_check,
)
from kpl_integrations.asgi.testing import KinesisDouble


def test_readiness_follows_the_buffer_and_never_calls_aws(kinesis_double: KinesisDouble) -> None:
    async def put_two(request: Request) -> Response:
        producer = producer_of(request.scope)
        for data in (b"first", b"second"):
            _ = producer.put_nowait("orders", partition_key="1", data=data)
        return Response()

    app = Starlette(
        routes=[Route("/", put_two)],
        middleware=[Middleware(HealthEndpoints), Middleware(RequestOutboxMiddleware)],
        lifespan=KinesisLifespan(Config(max_outstanding_records=2, record_max_buffered_time_ms=60_000)),
    )
    with TestClient(app) as client:
        assert client.get("/livez").json() == {"status": "alive"}
        assert client.get("/readyz").status_code == 200
        client.get("/")
        full = client.get("/readyz")
        assert full.status_code == 503
        assert full.json()["checks"]["buffer"] == {"ready": False, "detail": "100.0% full"}
        assert client.get("/livez").status_code == 200


@pytest.mark.anyio
async def test_readiness_follows_the_rejection_monitor(kinesis_double: KinesisDouble) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/refused":
            message = "no room"
            raise BufferFull(message, outstanding_records=1, outstanding_bytes=1)
        await Response()(scope, receive, send)

    now = 1_000.0
    monitor = RejectionMonitor(raise_above=0.05, window_seconds=60)
    guarded = HealthEndpoints(BackpressureMiddleware(app, rejections=monitor, clock=lambda: now))
    lifespan = KinesisLifespan(checks={"rejections": rejection_check(monitor, clock=lambda: now)})
    async with lifespan(None) as state:
        for _ in range(19):
            assert await _answer_of(guarded, "/", state) == (200, b"")
        assert (await _answer_of(guarded, "/readyz", state))[0] == 200
        assert (await _answer_of(guarded, "/refused", state))[0] == 503
        assert (await _answer_of(guarded, "/refused", state))[0] == 503
        status, body = await _answer_of(guarded, "/readyz", state)
        assert status == 503
        rejections = json.loads(body)["checks"]["rejections"]
        assert rejections == {"ready": False, "detail": "9.5% of requests refused"}
        now += 62
        assert (await _answer_of(guarded, "/readyz", state))[0] == 200


async def _answer_of(app: Any, path: str, state: Any) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app({"type": "http", "method": "GET", "path": path, "headers": [], "state": dict(state)}, receive, send)
    return sent[0]["status"], sent[1]["body"]
