import contextlib
import logging
import pickle
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import pytest
from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from kpl_core import Config, ConfigError, Producer, StreamConfig
from kpl_core.options.policy import FairnessPolicy
from kpl_core.testing import ErrorAnswer, FakeKinesis, Latency, When
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.asgi import (
    BackpressureMiddleware,
    KinesisASGI,
    KinesisLifespan,
    MissingProducer,
    StartupFailed,
    producer_of,
)
from kpl_integrations.asgi.protocol import ASGIApp, Receive, Scope, Send
from kpl_integrations.asgi.testing import KinesisDouble
from kpl_integrations.fastapi import KinesisRouter, ProducerDep, get_producer


class KinesisStateOf:
    """An application with a producer in its state."""

    def __init__(self, app: ASGIApp, producer: Producer) -> None:
        self._app = app
        self._producer = producer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "state": {"kinesis": self._producer}}, receive, send)


async def put_one(request: Request) -> JSONResponse:
    producer = producer_of(request.scope)
    result = await producer.put_nowait("orders", partition_key="42", data=b"one")
    return JSONResponse({"successful": result.successful, "own": request.scope["state"].get("own")})


@contextlib.asynccontextmanager
async def own_lifespan(app: object) -> AsyncIterator[dict[str, str]]:
    yield {"own": "kept"}


def test_it_works_as_the_lifespan_of_an_application(kinesis_double: KinesisDouble) -> None:
    lifespan = KinesisLifespan()
    with TestClient(Starlette(routes=[Route("/", put_one)], lifespan=lifespan)) as client:
        assert client.get("/").json() == {"successful": True, "own": None}
    assert lifespan.report is not None
    assert (lifespan.report.accepted, lifespan.report.delivered) == (1, 1)


def test_it_wraps_a_lifespan_and_yields_its_state(kinesis_double: KinesisDouble) -> None:
    app = Starlette(routes=[Route("/", put_one)], lifespan=KinesisLifespan(lifespan=own_lifespan))
    with TestClient(app) as client:
        assert client.get("/").json() == {"successful": True, "own": "kept"}


def test_a_router_works_beside_the_applications_own_lifespan(kinesis_double: KinesisDouble) -> None:
    app = FastAPI(lifespan=own_lifespan)
    app.include_router(KinesisRouter())
    app.add_route("/", put_one)
    with TestClient(app) as client:
        assert client.get("/").json() == {"successful": True, "own": "kept"}
        assert client.get("/readyz").status_code == 200


def test_it_wraps_any_application(kinesis_double: KinesisDouble) -> None:
    app = KinesisASGI(Starlette(routes=[Route("/", put_one)], lifespan=own_lifespan), KinesisLifespan())
    with TestClient(app) as client:
        assert client.get("/").json() == {"successful": True, "own": "kept"}


async def raises(receive, send):
    message = "this application can only handle HTTP connections"
    raise ValueError(message)


async def raises_after_the_first_message(receive, send):
    await receive()
    await raises(receive, send)


async def returns(receive, send):
    """Ignore the scope."""


async def returns_after_its_start(receive, send):
    await receive()
    await send({"type": "lifespan.startup.complete"})


@pytest.mark.parametrize("lifespan", [raises, raises_after_the_first_message, returns, returns_after_its_start])
def test_it_wraps_an_application_that_does_not_speak_lifespan(kinesis_double: KinesisDouble, lifespan) -> None:
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        delivery = producer_of(scope).put_nowait("orders", partition_key="k", data=b"x")
        await JSONResponse({"successful": (await delivery).successful})(scope, receive, send)

    with TestClient(KinesisASGI(app, KinesisLifespan())) as client:
        assert client.get("/").json() == {"successful": True}
    assert len(kinesis_double.user_records("orders")) == 1


def test_the_wrapper_passes_on_a_failed_startup(kinesis_double: KinesisDouble) -> None:
    @contextlib.asynccontextmanager
    async def broken(app: object) -> AsyncIterator[None]:
        message = "the database is away"
        raise RuntimeError(message)
        yield

    lifespan = KinesisLifespan()
    with (
        pytest.raises(RuntimeError, match="the database is away"),
        TestClient(KinesisASGI(Starlette(lifespan=broken), lifespan)),
    ):
        pass
    assert lifespan.report is not None


def test_the_applications_lifespan_ends_before_the_producer_closes(kinesis_double: KinesisDouble) -> None:
    @contextlib.asynccontextmanager
    async def puts_at_the_end(app: object) -> AsyncIterator[dict[str, str]]:
        yield {}
        seen.append("inner")

    class Watched(KinesisLifespan):
        @contextlib.asynccontextmanager
        async def open_producer(self):
            async with super().open_producer() as state:
                yield state
                seen.append("producer")

    seen: list[str] = []
    with TestClient(Starlette(lifespan=Watched(lifespan=puts_at_the_end))):
        pass
    with TestClient(KinesisASGI(Starlette(lifespan=puts_at_the_end), Watched())):
        pass
    assert seen == ["inner", "producer"] * 2


def test_http_and_websocket_routes_get_the_same_producer(kinesis_double: KinesisDouble) -> None:
    app = FastAPI(lifespan=KinesisLifespan())
    seen: list[Producer] = []

    @app.get("/")
    async def over_http(producer: ProducerDep) -> None:
        seen.append(producer)

    @app.websocket("/ws")
    async def over_websocket(socket: WebSocket, producer: ProducerDep) -> None:
        await socket.accept()
        seen.append(producer)
        _ = producer.put_nowait("orders", partition_key="42", data=await socket.receive_bytes())
        await socket.close()

    with TestClient(app) as client:
        client.get("/")
        with client.websocket_connect("/ws") as socket:
            socket.send_bytes(b"through a socket")
    assert seen[0] is seen[1]
    assert [record.data for record in kinesis_double.user_records("orders")] == [b"through a socket"]


def test_the_dependency_can_be_overridden() -> None:
    app = FastAPI()

    @app.get("/")
    async def route(producer: ProducerDep) -> str:
        return str(producer)

    app.dependency_overrides[get_producer] = lambda: "another"
    assert TestClient(app).get("/").json() == "another"


@pytest.mark.anyio
async def test_the_dependency_needs_no_thread(kinesis_double: KinesisDouble) -> None:
    """Sync routes share 40 threads; while all of them are busy, an async route is still answered."""
    app = FastAPI()

    @app.get("/")
    async def route(producer: ProducerDep) -> str:
        return type(producer).__name__

    threads = anyio.to_thread.current_default_thread_limiter()
    tokens, threads.total_tokens = threads.total_tokens, 1
    await threads.acquire_on_behalf_of(threads)
    try:
        async with Producer(transport=kinesis_double.transport(Config())) as producer:
            transport = httpx2.ASGITransport(KinesisStateOf(app, producer))
            async with httpx2.AsyncClient(transport=transport, base_url="http://app") as client:
                with anyio.fail_after(30):
                    assert (await client.get("/")).json() == "Producer"
    finally:
        threads.release_on_behalf_of(threads)
        threads.total_tokens = tokens


def test_a_second_producer_can_have_its_own_name(kinesis_double: KinesisDouble) -> None:
    @contextlib.asynccontextmanager
    async def second(app: object) -> AsyncIterator[dict[str, object]]:
        async with KinesisLifespan(Config(region="eu-west-1")).open_producer() as state:
            yield {"kinesis_eu": state["kinesis"]}

    async def route(request: Request) -> JSONResponse:
        regions = [producer.config.region for producer in (request.state.kinesis, request.state.kinesis_eu)]
        return JSONResponse(regions)

    lifespan = KinesisLifespan(Config(region="us-east-1"), lifespan=second)
    with TestClient(Starlette(routes=[Route("/", route)], lifespan=lifespan)) as client:
        assert client.get("/").json() == ["us-east-1", "eu-west-1"]


def test_two_producers_under_one_name_are_an_error_with_advice(kinesis_double: KinesisDouble) -> None:
    outer = KinesisLifespan(lifespan=KinesisLifespan())
    with pytest.raises(ConfigError, match="under another name"), TestClient(Starlette(lifespan=outer)):
        pass
    assert outer.report is not None


def test_the_error_of_a_mounted_app_with_its_own_lifespan_has_cause_and_fix() -> None:
    inner = FastAPI(lifespan=KinesisLifespan())

    @inner.get("/")
    async def route(producer: ProducerDep) -> None: ...

    with TestClient(Starlette(routes=[Mount("/inner", inner)])) as client:
        with pytest.raises(MissingProducer, match="mounted at '/inner'") as raised:
            client.get("/inner/")
        assert "a mounted app's lifespan never runs" in str(raised.value)
        assert "give KinesisLifespan to the outermost app" in str(raised.value)


def test_a_mounted_app_shares_the_outermost_apps_producer(kinesis_double: KinesisDouble) -> None:
    inner = Starlette(routes=[Route("/", put_one)])
    with TestClient(Starlette(routes=[Mount("/inner", inner)], lifespan=KinesisLifespan())) as client:
        assert client.get("/inner/").json()["successful"]


def test_the_error_of_an_app_without_a_lifespan_run_lists_the_usual_causes() -> None:
    app = FastAPI(lifespan=KinesisLifespan())

    @app.get("/")
    async def route(producer: ProducerDep) -> None: ...

    with pytest.raises(MissingProducer, match="enter the client"):
        TestClient(app).get("/")


@pytest.mark.anyio
async def test_the_error_under_httpx_says_that_its_transport_runs_no_lifespan() -> None:
    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        producer_of(scope)

    transport = httpx2.ASGITransport(KinesisASGI(app, KinesisLifespan()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://app") as client:
        with pytest.raises(MissingProducer, match="httpx's ASGITransport runs no lifespan: wrap the app in asgi_life"):
            await client.get("/")


def test_lazy_startup_does_not_call_kinesis(kinesis_double: KinesisDouble) -> None:
    fault = kinesis_double.faults.add(ErrorAnswer("ResourceNotFoundException"))
    with TestClient(Starlette(lifespan=KinesisLifespan())) as client:
        assert client.get("/").status_code == 404
    assert fault.fired == 0


@pytest.mark.long
def test_steady_state_lists_shards_once_and_never_describes_the_stream(
    kinesis_double: KinesisDouble,
) -> None:
    asked = {
        name: kinesis_double.faults.add(Latency(0.0), When(operation=name))
        for name in ("ListShards", "DescribeStreamSummary", "DescribeStream")
    }
    with TestClient(Starlette(routes=[Route("/", put_one)], lifespan=KinesisLifespan())) as client:
        for _ in range(20):
            client.get("/")
    assert asked["ListShards"].fired == 1
    assert asked["DescribeStreamSummary"].fired <= 1
    assert asked["DescribeStream"].fired == 0


def test_verify_fails_at_once_with_the_stream_and_kinesis_answer(kinesis_double: KinesisDouble) -> None:
    app = Starlette(lifespan=KinesisLifespan(streams=["orders", "refunds"], startup="verify"))
    with pytest.raises(StartupFailed, match="'refunds' cannot be used: ResourceNotFoundException"), TestClient(app):
        pass


@pytest.mark.parametrize(
    ("code", "fix"),
    [("ResourceNotFoundException", "create it"), ("InternalFailure", "correct the endpoint, the region or the cred")],
)
def test_verify_advises_to_create_a_stream_only_if_it_is_missing(
    code: str, fix: str, kinesis_double: KinesisDouble
) -> None:
    kinesis_double.faults.add(ErrorAnswer(code), When(operation="ListShards"))
    app = Starlette(lifespan=KinesisLifespan(streams=["orders"], startup="verify"))
    with pytest.raises(StartupFailed, match=f"'orders' cannot be used: {code}: .*; {fix}"), TestClient(app):
        pass


def test_wait_retries_until_the_stream_answers(kinesis_double: KinesisDouble) -> None:
    fault = kinesis_double.faults.add(ErrorAnswer("ResourceNotFoundException"), When(operation="ListShards", times=1))
    app = Starlette(routes=[Route("/", put_one)], lifespan=KinesisLifespan(streams=["orders"], startup="wait"))
    with TestClient(app) as client:
        assert fault.fired == 1
        assert client.get("/").status_code == 200


class BlackHole(FakeTransport):
    """Never answers, and counts the calls."""

    asked = 0

    async def list_shards(self, stream: str):
        self.asked += 1
        await anyio.sleep_forever()


@pytest.mark.anyio
async def test_wait_gives_up_in_time_if_nothing_answers() -> None:
    hole = BlackHole(FakeKinesis({"orders": 1}))
    lifespan = KinesisLifespan(streams=["orders"], startup="wait", startup_seconds=0.05, transport=lambda _: hole)
    with anyio.fail_after(5), pytest.raises(StartupFailed, match=r"'orders' cannot be used after 0\.05 s: no answer"):
        async with lifespan.open_producer():
            pass
    assert hole.asked == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startup": "eager"}, "startup is 'eager'"),
        ({"startup": "verify"}, "name the streams"),
        ({"startup": "verify", "streams": "orders"}, "name the streams"),
        ({"close_seconds": -1.0}, "close_seconds is -1.0"),
        ({"startup_seconds": float("nan")}, "startup_seconds is nan"),
    ],
)
def test_an_option_out_of_bounds_is_an_error(options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        KinesisLifespan(**options)


@pytest.mark.parametrize("seconds", [-1, 0, 1.5])
def test_an_invalid_retry_after_is_an_error(seconds: float) -> None:
    with pytest.raises(ConfigError, match="retry_after_seconds"):
        BackpressureMiddleware(Starlette(), retry_after_seconds=seconds)  # type: ignore[arg-type]


def test_lifespan_and_config_pickle() -> None:
    config = Config(region="us-east-1", streams={"orders": StreamConfig(record_ttl_ms=500)}, fairness=FairnessPolicy())
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own
    assert pickle.loads(pickle.dumps(KinesisLifespan(config))).config == config  # noqa: S301


def test_the_report_is_logged(kinesis_double: KinesisDouble, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "kpl_integrations.asgi"),
        TestClient(Starlette(routes=[Route("/", put_one)], lifespan=KinesisLifespan())) as client,
    ):
        client.get("/")
    assert "1 accepted: 1 delivered, 0 failed, 0 buffered" in caplog.text


def test_permanently_failed_records_make_the_report_a_warning(
    kinesis_double: KinesisDouble, caplog: pytest.LogCaptureFixture
) -> None:
    app = Starlette(routes=[Route("/", put_one)], lifespan=KinesisLifespan())
    kinesis_double.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    with caplog.at_level(logging.WARNING), TestClient(app) as client:
        client.get("/")
    assert [record.levelname for record in caplog.records if "is closed" in record.message] == ["WARNING"]


@pytest.mark.anyio
async def test_undelivered_records_are_in_the_report(kinesis_double: KinesisDouble) -> None:
    kinesis_double.faults.add(ErrorAnswer("ServiceUnavailable", status=503))
    lifespan = KinesisLifespan(close_seconds=0.1)
    with anyio.fail_after(5):
        async with lifespan(None) as state:
            state["kinesis"].put_nowait("orders", partition_key="1", data=b"x")
    assert lifespan.report is not None
    assert (lifespan.report.accepted, lifespan.report.failed_total, lifespan.report.complete) == (1, 1, False)


def test_the_producer_is_reachable_in_the_inner_lifespan(kinesis_double: KinesisDouble) -> None:
    found: list[Any] = []

    @contextlib.asynccontextmanager
    async def inner(_: object) -> AsyncIterator[None]:
        found.append(await kinesis.producer.put("orders", partition_key="job", data=b"at the start"))
        yield
        found.append(kinesis.producer.report().accepted)

    kinesis = KinesisLifespan(lifespan=inner)
    with pytest.raises(MissingProducer, match="not open"):
        _ = kinesis.producer
    with TestClient(Starlette(lifespan=kinesis)):
        pass
    assert found[1] == 1
    assert found[0].peek().successful
    with pytest.raises(MissingProducer):
        _ = kinesis.producer
