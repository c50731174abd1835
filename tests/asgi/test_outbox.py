import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from kpl_core import (
    BufferFull,
    Config,
    InvalidUserRecord,
    Producer,
    ProducerClosed,
    TierPolicy,
    UserRecord,
)
from kpl_core.records.user_record import Tier
from kpl_integrations.asgi import (
    BackpressureMiddleware,
    HealthEndpoints,
    KinesisLifespan,
    OutboxProducer,
    RequestOutboxMiddleware,
    ResultBeforeResponse,
    producer_of,
)
from kpl_integrations.asgi.testing import KinesisDouble
from kpl_integrations.metrics.sources import outbox_source

Endpoint = Callable[[Request, OutboxProducer], Awaitable[Response]]


def application(
    endpoint: Endpoint, config: Config | None = None, outboxes: Sequence[Middleware] = (), **options: Any
) -> Starlette:
    async def route(request: Request) -> Response:
        return await endpoint(request, cast("OutboxProducer", producer_of(request.scope)))

    outboxes = outboxes or [Middleware(RequestOutboxMiddleware)]
    middleware = [Middleware(HealthEndpoints), Middleware(BackpressureMiddleware), *outboxes]
    return Starlette(
        routes=[Route("/", route, methods=["GET", "POST"])],
        middleware=middleware,
        lifespan=KinesisLifespan(config, **options),
    )


def put_two(producer: OutboxProducer | Producer) -> None:
    producer.put_nowait("orders", partition_key="1", data=b"first")
    producer.put_nowait("orders", partition_key="1", data=b"second")


def stored(double: KinesisDouble) -> list[bytes]:
    return [record.data for record in double.user_records("orders")]


@pytest.mark.parametrize(
    ("status", "expected"), [(200, 2), (204, 2), (302, 2), (399, 2), (400, 0), (404, 0), (499, 0), (500, 0), (503, 0)]
)
def test_the_status_decides_what_is_published(kinesis_double: KinesisDouble, status: int, expected: int) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        return Response(status_code=status)

    with TestClient(application(endpoint)) as client:
        assert client.get("/").status_code == status
    assert stored(kinesis_double) == [b"first", b"second"][:expected]


def test_publish_when_decides_by_status_and_discarded_records_are_counted(kinesis_double: KinesisDouble) -> None:
    statuses = iter([401, 404, 422, 500, 200])

    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        return Response(status_code=next(statuses))

    discarded: Counter[int] = Counter()
    audit = Middleware(RequestOutboxMiddleware, publish_when={200, 401, 404}.__contains__, discarded=discarded)
    with TestClient(application(endpoint, outboxes=[audit])) as client:
        assert [client.get("/").status_code for _ in range(5)] == [401, 404, 422, 500, 200]
    assert len(stored(kinesis_double)) == 6
    assert discarded == {422: 2, 500: 2}
    assert [tuple(sample) for sample in outbox_source(discarded)()] == [
        ("kinesis_outbox_discarded_records_total", ("422",), 2),
        ("kinesis_outbox_discarded_records_total", ("500",), 2),
    ]


def test_an_exception_in_publish_when_discards_and_is_logged(
    kinesis_double: KinesisDouble, caplog: pytest.LogCaptureFixture
) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        return Response(status_code=200)

    def fail(status: int) -> bool:
        raise LookupError(status)

    discarded: Counter[int] = Counter()
    outbox = Middleware(RequestOutboxMiddleware, publish_when=fail, discarded=discarded)
    with caplog.at_level(logging.ERROR), TestClient(application(endpoint, outboxes=[outbox])) as client:
        assert client.get("/").status_code == 200
    assert stored(kinesis_double) == []
    assert discarded == {200: 2}
    assert "publish_when failed for status 200" in caplog.text


def test_a_crash_counts_as_500_also_for_publish_when(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        raise LookupError

    audit = Middleware(RequestOutboxMiddleware, publish_when={500}.__contains__)
    with TestClient(application(endpoint, outboxes=[audit]), raise_server_exceptions=False) as client:
        assert client.get("/").status_code == 500
    assert len(stored(kinesis_double)) == 2


@pytest.mark.parametrize(("status", "expected"), [(200, 2), (404, 0)])
def test_of_two_nested_outboxes_the_outer_one_decides(
    kinesis_double: KinesisDouble, status: int, expected: int
) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        return Response(status_code=status)

    everything = Middleware(RequestOutboxMiddleware, publish_when=lambda _: True)
    with TestClient(application(endpoint, outboxes=[Middleware(RequestOutboxMiddleware), everything])) as client:
        assert client.get("/").status_code == status
    assert len(stored(kinesis_double)) == expected


def test_puts_after_a_discarding_response_are_counted(kinesis_double: KinesisDouble) -> None:
    discarded: Counter[int] = Counter()

    async def put_later(producer: OutboxProducer) -> None:
        put_two(producer)

    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        return Response(status_code=404, background=BackgroundTask(put_later, producer))

    outbox = Middleware(RequestOutboxMiddleware, discarded=discarded)
    with TestClient(application(endpoint, outboxes=[outbox])) as client:
        client.get("/")
    assert stored(kinesis_double) == []
    assert discarded == {404: 2}


def test_an_exception_publishes_no_record_and_releases_the_capacity(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        raise LookupError

    app = application(endpoint, Config(max_outstanding_records=2))
    with TestClient(app, raise_server_exceptions=False) as client:
        assert [client.get("/").status_code for _ in range(3)] == [500] * 3
    assert stored(kinesis_double) == []


def test_a_full_buffer_raises_at_the_put_and_becomes_503(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        _ = producer.put_nowait("orders", partition_key="1", data=b"third")
        return Response()

    with TestClient(application(endpoint, Config(max_outstanding_records=2))) as client:
        answer = client.get("/")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["title"], problem["code"]) == (503, "Service Unavailable", "buffer-full")
    assert stored(kinesis_double) == []


def test_without_an_outbox_a_503_does_not_claim_that_no_record_was_put(kinesis_double: KinesisDouble) -> None:
    async def route(request: Request) -> Response:
        put_two(producer_of(request.scope))
        return Response()

    app = Starlette(
        routes=[Route("/", route)],
        middleware=[Middleware(BackpressureMiddleware)],
        lifespan=KinesisLifespan(Config(max_outstanding_records=1)),
    )
    with TestClient(app) as client:
        answer = client.get("/")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "The service's record buffer is full; send this request again later."
    assert stored(kinesis_double) == [b"first"]


def test_a_reserved_record_always_fits(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        with pytest.raises(BufferFull):
            _ = await producer.put("orders", partition_key="1", data=b"third")
        return Response()

    with TestClient(application(endpoint, Config(max_outstanding_records=2))) as client:
        assert client.get("/").status_code == 200
    assert stored(kinesis_double) == [b"first", b"second"]


def test_each_tier_reserves_its_own_capacity_until_the_response(kinesis_double: KinesisDouble) -> None:
    tiers = TierPolicy(critical_reserve=0.2, bulk_share=0.5)
    put: list[bytes] = []

    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        for tier, count in (("bulk", 4), ("normal", 4), ("critical", 2)):
            for number in range(count):
                data = f"{tier} {number}".encode()
                _ = producer.put_nowait("orders", partition_key="1", data=data, tier=cast("Tier", tier))
                put.append(data)
            with pytest.raises(BufferFull):
                _ = producer.put_nowait("orders", partition_key="1", data=b"more", tier=cast("Tier", tier))
        return Response()

    async def check(producer: Producer) -> None:
        limit = producer.buffer_limit
        await producer.flush(5.0)
        assert (limit.outstanding_records, limit.outstanding_bytes) == (0, 0)

    async def route(request: Request) -> Response:
        return await endpoint(request, cast("OutboxProducer", producer_of(request.scope)))

    lifespan = KinesisLifespan(Config(max_outstanding_records=10, tiers=tiers))
    app = Starlette(routes=[Route("/", route)], middleware=[Middleware(RequestOutboxMiddleware)], lifespan=lifespan)
    with TestClient(app) as client:
        assert client.get("/").status_code == 200
        assert client.portal is not None
        client.portal.call(check, client.app_state["kinesis"])
    assert sorted(stored(kinesis_double)) == sorted(put)


def test_put_many_keeps_all_records_or_none(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        with pytest.raises(BufferFull):
            await producer.put_many("orders", [("1", b"a"), ("1", b"b"), ("1", b"c")])
        with pytest.raises(InvalidUserRecord):
            await producer.put_many("orders", [("1", b"a"), ("", b"b")])
        assert len(await producer.put_many("orders", [("1", b"a"), ("1", b"b")])) == 2
        return Response()

    with TestClient(application(endpoint, Config(max_outstanding_records=2))) as client:
        assert client.get("/").status_code == 200
    assert stored(kinesis_double) == [b"a", b"b"]


def test_put_many_that_fails_drops_no_record_of_a_thread(
    kinesis_double: KinesisDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        limit = cast("Any", producer)._producer.buffer_limit  # noqa: SLF001 - the outbox does not offer it
        reserve = limit.reserve
        putting = threading.Thread(
            target=producer.put_nowait, args=("orders",), kwargs={"partition_key": "1", "data": b"of a thread"}
        )

        def full_at_the_second(**of_record: Any) -> None:
            if of_record["size_bytes"] == 3:
                putting.start()
                putting.join(0.2)
                raise limit.full()
            reserve(**of_record)

        monkeypatch.setattr(limit, "reserve", full_at_the_second)
        with pytest.raises(BufferFull):
            await producer.put_many("orders", [("1", b"a"), ("1", b"bb")])
        monkeypatch.undo()
        putting.join()
        return Response()

    with TestClient(application(endpoint)) as client:
        assert client.get("/").status_code == 200
    assert stored(kinesis_double) == [b"of a thread"]


def test_a_mutable_buffer_is_copied_at_the_put(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        buffer = bytearray(b"first")
        _ = producer.put_record_nowait("orders", UserRecord("1", cast("bytes", buffer)))
        await producer.put_many("orders", [("1", memoryview(buffer))])
        buffer[:] = b"later"
        return Response()

    with TestClient(application(endpoint)) as client:
        assert client.get("/").status_code == 200
    assert stored(kinesis_double) == [b"first", b"first"]


def test_an_outbox_has_the_producers_methods(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        assert (producer.unready(), producer.statistics(), producer.report().accepted) == ([], {}, 0)
        return Response()

    with TestClient(application(endpoint)) as client:
        assert client.get("/").status_code == 200


def test_awaiting_a_delivery_inside_the_request_is_an_error(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        delivery = producer.put_nowait("orders", partition_key="1", data=b"x")
        assert not delivery.done
        with pytest.raises(ResultBeforeResponse, match="awaiting its delivery inside the request would never return"):
            await delivery
        return Response()

    with TestClient(application(endpoint)) as client:
        assert client.get("/").status_code == 200


def test_a_background_task_may_await_the_delivery(kinesis_double: KinesisDouble) -> None:
    results = []

    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        delivery = producer.put_nowait("orders", partition_key="1", data=b"x")

        async def later() -> None:
            results.append(await delivery)
            results.append(await producer.put_nowait("orders", partition_key="1", data=b"after"))

        return PlainTextResponse("ok", background=BackgroundTask(later))

    with TestClient(application(endpoint)) as client:
        client.get("/")
    assert [result.successful for result in results] == [True, True]
    assert stored(kinesis_double) == [b"x", b"after"]


def test_after_the_response_puts_wait_for_capacity_like_the_producers(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)

        async def later() -> None:
            _ = await producer.put("orders", partition_key="1", data=b"third")
            await producer.put_many("orders", [("1", b"%d" % number) for number in range(5)])

        return PlainTextResponse("ok", background=BackgroundTask(later))

    with TestClient(application(endpoint, Config(max_outstanding_records=2))) as client:
        client.get("/")
    assert stored(kinesis_double) == [b"first", b"second", b"third", b"0", b"1", b"2", b"3", b"4"]


def test_a_streaming_response_can_put(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)

        async def body() -> AsyncIterator[str]:
            for number in range(3):
                _ = producer.put_nowait("orders", partition_key="1", data=b"%d" % number)
                yield str(number)

        return StreamingResponse(body())

    with TestClient(application(endpoint)) as client:
        assert client.get("/").text == "012"
    assert stored(kinesis_double) == [b"first", b"second", b"0", b"1", b"2"]


def test_awaiting_a_discarded_delivery_raises(kinesis_double: KinesisDouble) -> None:
    kept = []

    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        kept.append(producer.put_nowait("orders", partition_key="1", data=b"x"))
        return Response(status_code=500)

    with TestClient(application(endpoint)) as client:
        client.get("/")
    with pytest.raises(ResultBeforeResponse, match="discarded with its request"):
        kept[0].result()


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "expected"), [(200, [b"first", b"second"]), (500, [])])
async def test_a_disconnected_client_changes_nothing(
    kinesis_double: KinesisDouble, status: int, expected: list[bytes]
) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        await request.body()
        assert await request.is_disconnected()
        return Response(status_code=status)

    await _request_of_a_vanished_client(application(endpoint))
    assert stored(kinesis_double) == expected


@pytest.mark.anyio
async def test_a_cancelled_request_publishes_no_record(kinesis_double: KinesisDouble) -> None:
    async def endpoint(request: Request, producer: OutboxProducer) -> Response:
        put_two(producer)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await _request_of_a_vanished_client(application(endpoint))
    assert stored(kinesis_double) == []


@pytest.mark.anyio
async def test_discarding_wakes_a_put_that_waits_for_capacity(kinesis_double: KinesisDouble) -> None:
    async with Producer(Config(max_outstanding_records=1), transport=kinesis_double.transport(Config())) as producer:
        entered, go_on = asyncio.Event(), asyncio.Event()

        async def endpoint(request: Request, outbox: OutboxProducer) -> Response:
            _ = outbox.put_nowait("orders", partition_key="1", data=b"never")
            entered.set()
            await go_on.wait()
            return Response(status_code=500)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_request_of_a_vanished_client(application(endpoint), {"kinesis": producer}))
            await entered.wait()
            waiting = tasks.create_task(producer.put("orders", partition_key="1", data=b"waited"))
            await asyncio.sleep(0)
            go_on.set()
            async with asyncio.timeout(5):
                assert (await (await waiting)).successful
    assert stored(kinesis_double) == [b"waited"]


@pytest.mark.anyio
async def test_a_producer_that_closed_during_the_request_becomes_503(kinesis_double: KinesisDouble) -> None:
    statuses: list[int] = []
    async with Producer(transport=kinesis_double.transport(Config())) as producer:

        async def endpoint(request: Request, outbox: OutboxProducer) -> Response:
            put_two(outbox)
            await producer.close()
            return Response()

        await _request_of_a_vanished_client(application(endpoint), {"kinesis": producer}, statuses)
        with pytest.raises(ProducerClosed):
            put_two(producer)
        assert producer.buffer_limit.outstanding_records == 0
    assert statuses == [503]


async def _request_of_a_vanished_client(
    app: Starlette, state: dict[str, Any] | None = None, statuses: list[int] | None = None
) -> None:
    """Run the app for a client that disconnected after its request."""
    received = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if statuses is not None and message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "raw_path": b"/",
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    if state is not None:
        await app({**scope, "state": state}, receive, send)
        return
    async with app.router.lifespan_context(app) as opened:
        await app({**scope, "state": dict(cast("dict[str, Any]", opened))}, receive, send)
