"""A spool that cannot store, with `failure="refuse"`: an application answers 503, and nothing is put or half put."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketDisconnect

from kpl_core import Config, NotSpooled, Producer, SpoolOptions
from kpl_integrations.asgi import BackpressureMiddleware, KinesisLifespan, RequestOutboxMiddleware
from kpl_integrations.asgi.testing import KinesisDouble
from kpl_integrations.fastapi import UNAVAILABLE_RESPONSES, ProducerDep
from tests.support.durability_scene import make_writable
from tests.support.waiting import until


async def let_store(producer: Producer, *, stores: bool) -> None:
    """Let the spool store again, or not; return when the producer knows."""
    await make_writable(producer, writable=stores)
    if not stores:
        with pytest.raises(NotSpooled):
            _ = await producer.put("orders", partition_key="1", data=b"finds out")
    await until(lambda: producer.spool_state is not None and producer.spool_state.can_store is stores)


def add_controls(app: FastAPI, lifespan: KinesisLifespan) -> None:
    """Add the routes in which the spool stops to store, or stores again."""

    @app.post("/late")
    async def late(producer: ProducerDep) -> None:
        """Put while the spool stores; the response comes when it does not."""
        _ = producer.put_nowait("orders", partition_key="1", data=b"late")
        await let_store(lifespan.producer, stores=False)

    @app.post("/stores/{stores}")
    async def set_stores(stores: bool) -> None:
        await let_store(lifespan.producer, stores=stores)


def application(path: Path, *, has_outbox: bool) -> FastAPI:
    spool = SpoolOptions(path=path / "spool.db", mode="write_ahead", failure="refuse", commit_interval_ms=1.0)
    lifespan = KinesisLifespan(Config(spool=spool))
    app = FastAPI(lifespan=lifespan)
    if has_outbox:
        app.add_middleware(RequestOutboxMiddleware)
    app.add_middleware(BackpressureMiddleware, retry_after_seconds=2)

    @app.post("/nowait", responses=UNAVAILABLE_RESPONSES)
    async def nowait(producer: ProducerDep) -> None:
        _ = producer.put_nowait("orders", partition_key="1", data=b"nowait")

    @app.post("/thread")
    def thread(producer: ProducerDep) -> None:
        _ = producer.put_nowait("orders", partition_key="1", data=b"thread")

    @app.post("/put")
    async def put(producer: ProducerDep) -> None:
        _ = await producer.put("orders", partition_key="1", data=b"put")

    @app.post("/many")
    async def many(producer: ProducerDep) -> None:
        _ = await producer.put_many("orders", [("1", b"many"), ("2", b"more")])

    @app.post("/caught")
    async def caught(producer: ProducerDep) -> JSONResponse:
        """Hear of it at the put, while the route can still answer something else."""
        try:
            _ = producer.put_nowait("orders", partition_key="1", data=b"caught")
        except NotSpooled:
            return JSONResponse({"put": False}, status_code=202)
        return JSONResponse({"put": True})

    add_controls(app, lifespan)

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        websocket.state.kinesis.put_nowait("orders", partition_key="1", data=b"socket")

    return app


@pytest.fixture(params=[False, True], ids=["producer", "outbox"])
def client(request: pytest.FixtureRequest, kinesis_double: KinesisDouble, tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(application(tmp_path, has_outbox=request.param)) as client:
        yield client


def outstanding(client: TestClient) -> tuple[int, int]:
    producer: Any = client.app_state["kinesis"]
    return producer.buffer_limit.outstanding_records, producer.report().accepted


@pytest.mark.parametrize("path", ["/nowait", "/thread", "/put", "/many"])
def test_a_refused_put_becomes_503_with_the_reason_until_the_spool_stores_again(
    client: TestClient, kinesis_double: KinesisDouble, path: str
) -> None:
    assert client.post("/stores/0").status_code == 200
    before = outstanding(client)
    for _ in range(3):
        answer = client.post(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "not-spooled"
        assert answer.json()["detail"] == "The service's spool cannot store records; send this request again later."
    assert outstanding(client) == before
    assert client.post("/stores/1").status_code == 200
    assert client.post(path).status_code == 200
    stored = [b"many", b"more"] if path == "/many" else [path[1:].encode()]
    assert [each.data for each in kinesis_double.wait_for("orders", count=len(stored))] == stored


def test_a_route_hears_of_the_refusal_at_the_put(client: TestClient) -> None:
    assert client.post("/stores/0").status_code == 200
    answer = client.post("/caught")
    assert (answer.status_code, answer.json()) == (202, {"put": False})
    assert outstanding(client)[0] == 0


def test_a_websocket_is_closed_with_try_again_later(client: TestClient) -> None:
    assert client.post("/stores/0").status_code == 200
    with client.websocket_connect("/socket") as socket, pytest.raises(WebSocketDisconnect) as closed:
        _ = socket.receive_text()
    assert (closed.value.code, closed.value.reason) == (1013, "not-spooled")


def test_a_spool_that_fails_between_the_put_and_the_response_makes_it_503(
    kinesis_double: KinesisDouble, tmp_path: Path
) -> None:
    with TestClient(application(tmp_path, has_outbox=True)) as client:
        answer = client.post("/late")
        assert (answer.status_code, answer.json()["code"]) == (503, "not-spooled")
        assert outstanding(client) == (0, 1)
        assert client.post("/stores/1").status_code == 200
        assert client.post("/nowait").status_code == 200
        assert [each.data for each in kinesis_double.wait_for("orders", count=1)] == [b"nowait"]


def test_openapi_names_the_code() -> None:
    content = UNAVAILABLE_RESPONSES[503]["content"]["application/problem+json"]
    assert content["schema"]["properties"]["code"]["enum"] == ["buffer-full", "not-spooled", "shutting-down"]
