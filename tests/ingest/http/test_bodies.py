"""The bounds of one body and of all bodies together are the same on every route."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kpl_integrations.asgi.protocol import Receive
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.admission.clients import ClientRoom, SharedRoom
from kpl_integrations.ingest.admission.refusals import Refused
from kpl_integrations.ingest.http.bodies import read_body
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.gateway_scene import JSON, STREAM, Client, kinesis, open_gateway

pytestmark = pytest.mark.anyio

AMZ = {"content-type": "application/x-amz-json-1.1", "x-amz-target": "Kinesis_20131202.PutRecord"}
ROUTES = {
    "native": (f"/v1/streams/{STREAM}/records", {"content-type": JSON}),
    "kinesis": ("/", AMZ),
    "otlp": ("/v1/logs", {"content-type": JSON}),
}
DIRECTORY = OpenTenants(Tenant(id="local", otlp_streams={"logs": STREAM}))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_above_the_bound_is_too_large_on_every_route(route: str, is_declared: bool) -> None:
    path, headers = ROUTES[route]
    async with open_gateway(directory=DIRECTORY, max_body_bytes=2_048) as gateway:
        length = {} if is_declared else {"content-length": "10"}
        answer = await Client(gateway).call("POST", path, b" " * 2_049, headers={**headers, **length})
        assert answer.status == 413
        assert b"2,048" in answer.body


async def answers_to_a_large_body(gateway: IngestGateway, receive: Receive, **headers: str) -> list[Any]:
    """Return the status, and for each part of the answer if more follows."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message.get("status") or message.get("more_body"))

    path, typed = ROUTES["native"]
    fields = {**typed, "content-length": "9000000", **headers}
    pairs = [(name.encode(), value.encode()) for name, value in fields.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": pairs}
    await gateway(scope, receive, send)
    return sent


@pytest.mark.parametrize(("piece_bytes", "seconds"), [(1 << 20, 0.0), (1_000, 2.0)], ids=["bytes", "time"])
async def test_the_rest_of_a_refused_body_is_dropped_within_bounds(piece_bytes: int, seconds: float) -> None:
    started, dropped = anyio.current_time(), [0]

    async def receive() -> Any:
        # Without end: at once, or slowly.
        await anyio.sleep(0.1 if seconds else 0.0)
        dropped[0] += piece_bytes
        return {"type": "http.request", "body": b" " * piece_bytes, "more_body": True}

    async with open_gateway(directory=DIRECTORY, max_body_bytes=2_048) as gateway:
        assert await answers_to_a_large_body(gateway, receive) == [413, True, None]
    assert anyio.current_time() - started == pytest.approx(seconds, abs=0.2)
    assert dropped[0] <= 64 << 20


async def test_no_body_is_read_if_the_client_waits_for_100_continue() -> None:
    async def receive() -> Any:
        pytest.fail("it would ask for the body")

    async with open_gateway(directory=DIRECTORY, max_body_bytes=2_048) as gateway:
        assert await answers_to_a_large_body(gateway, receive, expect="100-Continue") == [413, None]


async def test_a_gateway_that_closes_does_not_wait_for_the_rest_of_a_refused_body() -> None:
    ended: list[float] = []

    async def receive() -> Any:
        await anyio.sleep_forever()

    async def run() -> None:
        assert await answers_to_a_large_body(gateway, receive) == [413, True, None]
        ended.append(anyio.current_time())

    async with open_gateway(directory=DIRECTORY, max_body_bytes=2_048) as gateway, anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.sleep(0.5)
        assert not ended
        closed_at = anyio.current_time()
        await gateway.close()
    assert ended[0] - closed_at < 0.1


class Slow:
    """Sends the start of a body, and the rest after `go_on` is set."""

    def __init__(self, gateway: IngestGateway, route: str, body: bytes) -> None:
        self._gateway = gateway
        self._path, self._headers = ROUTES[route]
        self._pieces = [body[:-1], body[-1:]]
        self.go_on = anyio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}

    async def receive(self) -> Any:
        if len(self._pieces) == 1:
            await self.go_on.wait()
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}

    async def run(self) -> None:
        fields = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        scope = {"type": "http", "method": "POST", "path": self._path, "query_string": b"", "headers": fields}
        await self._gateway(scope, self.receive, self.send)


@asynccontextmanager
async def gateway_with_little_room() -> AsyncIterator[IngestGateway]:
    async with open_gateway(
        # A room for two bodies of 3,000 bytes.
        kinesis(),
        DIRECTORY,
        max_body_bytes=4_096,
        max_reading_bytes=8_192,
        body_seconds=5,
    ) as gateway:
        yield gateway


def used_bytes(gateway: IngestGateway) -> int:
    return gateway.opened.verified_room.used_bytes + gateway.opened.anonymous_room.used_bytes


@pytest.mark.parametrize("route", ROUTES)
async def test_slow_bodies_share_one_budget_and_complete_bodies_do_not_use_it(route: str) -> None:
    body = json.dumps({"partition_key": "k", "data": "x" * 3_000}).encode()
    async with gateway_with_little_room() as gateway, anyio.create_task_group() as tasks:
        # Without credentials all use the room of their address.
        slow = [Slow(gateway, "kinesis" if route == "kinesis" else "native", body) for _ in range(2)]
        for each in slow:
            tasks.start_soon(each.run)
        await anyio.sleep(1.0)
        refused = Slow(gateway, route, body)
        await refused.run()
        # The Kinesis API's error code.
        assert refused.status == (400 if route == "kinesis" else 503)
        if route != "kinesis":
            assert int(refused.headers["retry-after"]) >= 1
        assert (await Client(gateway).post({"partition_key": "k", "data": "whole"})).status == 202
        for each in slow:
            each.go_on.set()
        await anyio.sleep(1.0)
        assert [each.status for each in slow] == ([400, 400] if route == "kinesis" else [202, 202])
        assert used_bytes(gateway) == 0


@pytest.mark.parametrize("route", ["native", "kinesis"])
async def test_a_gateway_that_verifies_no_credentials_uses_all_its_room_for_any_route(route: str) -> None:
    async with (
        open_gateway(kinesis(), max_body_bytes=4_096, max_reading_bytes=16_384, body_seconds=5) as gateway,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(5):
            tasks.start_soon(Slow(gateway, route, b" " * 3_000).run)
        await anyio.sleep(1.0)
        assert used_bytes(gateway) == 5 * 2_999


async def test_a_body_without_room_is_told_why() -> None:
    room = SharedRoom(1_000)
    told: list[str] = []

    async def read(client: str, size: int, delay: float) -> None:
        pieces = iter([b"x" * size])

        async def receive() -> Any:
            piece = next(pieces, None)
            if piece is None:
                await anyio.sleep_forever()
            return {"type": "http.request", "body": piece, "more_body": True}

        await anyio.sleep(delay)
        try:
            await read_body(receive, most_bytes=1_000, seconds=5.0, room=ClientRoom(room, client))
        except Refused as refused:
            told.append(refused.detail)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, "a", 900, 0.0)
        tasks.start_soon(read, "b", 950, 0.1)
        tasks.start_soon(read, "c", 200, 0.2)
    assert told[0].startswith(
        "unfinished bodies use 900 of 1,000 bytes, and no other client uses more than this one would with this body;"
    )
    assert "another client needed the bytes of this body, the largest of the client that used most;" in told[1]


async def test_slow_and_disconnected_clients_release_their_part_of_the_budget() -> None:
    async with gateway_with_little_room() as gateway, anyio.create_task_group() as tasks:
        late = Slow(gateway, "native", b" " * 3_000)
        tasks.start_soon(late.run)
        gone = Slow(gateway, "native", b" " * 3_000)
        with anyio.move_on_after(2.0):
            await gone.run()
        assert used_bytes(gateway) == 2_999
        await anyio.sleep(4.0)
        assert late.status == 408
        assert used_bytes(gateway) == 0


def test_a_budget_below_the_bound_of_one_body_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_reading_bytes is 2,048, below max_body_bytes, 4,096"):
        load_settings(max_body_bytes=4_096, max_reading_bytes=2_048)
