"""Starlette and FastAPI run `def` routes and dependencies in threads: they put too, with and without an outbox."""

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, cast

import pytest
from fastapi import Depends, FastAPI, HTTPException
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from kpl_core import Config, RecordResult
from kpl_integrations.asgi import (
    BackpressureMiddleware,
    KinesisLifespan,
    OutboxProducer,
    RequestOutboxMiddleware,
    ResultBeforeResponse,
    producer_of,
)
from kpl_integrations.asgi.testing import KinesisDouble
from kpl_integrations.fastapi import ProducerDep


def application(config: Config | None = None, *, outbox: bool) -> FastAPI:
    app = FastAPI(lifespan=KinesisLifespan(config))
    if outbox:
        app.add_middleware(RequestOutboxMiddleware)
    app.add_middleware(BackpressureMiddleware)

    def audited(number: int, producer: ProducerDep) -> int:
        _ = producer.put_nowait("orders", partition_key="audit", data=b"audit %d" % number)
        return number

    @app.post("/orders/{number}")
    def order(number: Annotated[int, Depends(audited)], producer: ProducerDep) -> None:
        _ = producer.put_nowait("orders", partition_key="42", data=b"order %d" % number)
        if number == 13:
            raise HTTPException(409)

    @app.post("/waiting")
    def waiting(producer: ProducerDep) -> bool:
        result: RecordResult = producer.put_nowait("orders", partition_key="42", data=b"waiting").wait(10)
        return result.successful

    return app


@pytest.mark.parametrize("outbox", [False, True])
def test_a_sync_route_puts(kinesis_double: KinesisDouble, *, outbox: bool) -> None:
    with TestClient(application(outbox=outbox)) as client:
        assert [client.post(f"/orders/{number}").status_code for number in (1, 13, 2)] == [200, 409, 200]
    numbers = [1, 2] if outbox else [1, 13, 2]
    expected = {text % number for number in numbers for text in (b"audit %d", b"order %d")}
    assert {record.data for record in kinesis_double.user_records("orders")} == expected


# FastAPI 0.121 brought scopes. Before 0.118 every dependency ended before the response.
HAS_SCOPES = "scope" in inspect.signature(Depends).parameters


@pytest.mark.parametrize(
    ("options", "published"), [({"scope": "function"}, 0), ({}, 1)] if HAS_SCOPES else [({}, 0)], ids=str
)
def test_the_scope_of_a_dependency_decides_whether_its_failed_commit_discards_the_records(
    kinesis_double: KinesisDouble, options: dict[str, Any], published: int
) -> None:
    app = FastAPI(lifespan=KinesisLifespan())
    app.add_middleware(RequestOutboxMiddleware)

    def committing() -> Iterator[None]:
        yield
        message = "the commit fails"
        raise RuntimeError(message)

    @app.post("/orders", dependencies=[Depends(committing, **options)])
    def order(producer: ProducerDep) -> None:
        _ = producer.put_nowait("orders", partition_key="42", data=b"order")

    with TestClient(app, raise_server_exceptions=False) as client:
        # After a response that has begun, the test client sees its status.
        assert client.post("/orders").status_code == (200 if published else 500)
    assert len(kinesis_double.user_records("orders")) == published


def test_a_sync_route_waits_for_its_result(kinesis_double: KinesisDouble) -> None:
    with TestClient(application(outbox=False)) as client:
        assert client.post("/waiting").json() is True


def test_a_full_buffer_is_503_in_a_sync_route_too(kinesis_double: KinesisDouble) -> None:
    config = Config(max_outstanding_records=1, record_max_buffered_time_ms=10_000)
    with TestClient(application(config, outbox=False)) as client:
        response = client.post("/orders/1")
        assert response.status_code == 503
        assert response.json()["code"] == "buffer-full"
    assert [record.data for record in kinesis_double.user_records("orders")] == [b"audit 1"]


def threaded(route: Callable[[OutboxProducer], Response], config: Config | None = None) -> Starlette:
    """An application whose route runs in a thread."""

    def endpoint(request: Request) -> Response:
        return route(cast("OutboxProducer", producer_of(request.scope)))

    middleware = [Middleware(BackpressureMiddleware), Middleware(RequestOutboxMiddleware)]
    return Starlette(routes=[Route("/", endpoint)], middleware=middleware, lifespan=KinesisLifespan(config))


@pytest.mark.parametrize(("status", "expected"), [(200, 2), (500, 0)])
def test_the_status_decides_about_records_of_a_threaded_route_too(
    kinesis_double: KinesisDouble, status: int, expected: int
) -> None:
    def route(producer: OutboxProducer) -> Response:
        for data in (b"first", b"second"):
            _ = producer.put_nowait("orders", partition_key="1", data=data)
        return Response(status_code=status)

    with TestClient(threaded(route)) as client:
        assert client.get("/").status_code == status
    assert [record.data for record in kinesis_double.user_records("orders")] == [b"first", b"second"][:expected]


def test_a_threaded_route_that_fills_the_buffer_is_answered_503_and_its_room_is_released(
    kinesis_double: KinesisDouble,
) -> None:
    def route(producer: OutboxProducer) -> Response:
        for number in range(3):
            _ = producer.put_blocking("orders", partition_key="1", data=b"%d" % number)
        return Response()

    app = threaded(route, Config(max_outstanding_records=2))
    with TestClient(app) as client:
        assert [client.get("/").status_code for _ in range(3)] == [503, 503, 503]
    assert [record.data for record in kinesis_double.user_records("orders")] == []


def test_a_background_task_in_a_thread_waits_for_the_result(kinesis_double: KinesisDouble) -> None:
    results: list[bool] = []

    def route(producer: OutboxProducer) -> Response:
        delivery = producer.put_nowait("orders", partition_key="1", data=b"x")
        with pytest.raises(ResultBeforeResponse, match="published when the response begins"):
            delivery.wait()

        def later() -> None:
            results.append(delivery.wait(10).successful)
            results.append(producer.put_blocking("orders", partition_key="1", data=b"after").wait(10).successful)

        return Response(background=BackgroundTask(later))

    with TestClient(threaded(route, Config(max_outstanding_records=1))) as client:
        client.get("/")
    assert results == [True, True]
    assert [record.data for record in kinesis_double.user_records("orders")] == [b"x", b"after"]
