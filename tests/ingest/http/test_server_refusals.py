"""What the server refuses by itself is answered as every other refusal: a problem document with an id, and counted."""

import asyncio
import contextlib
import json
import re
from typing import Any

import pytest

from kpl_integrations.ingest.admission.refusals import REFUSALS, SERVER_REFUSALS, Refusal
from tests.ingest.http2.scene import AS_JSON, PATH, Talk, in_virtual_time, talking
from tests.ingest.served import connected, served, spoken
from tests.support.gateway_scene import gateway_of, kinesis
from tests.support.http2_frames import DATA, frames_of, heads, request

HEAD = "GET /livez HTTP/1.1\r\nhost: x\r\n{}\r\n"
# What a client sends; a gateway that is busy refuses a request that is valid.
SENT: dict[Refusal, str] = {
    Refusal.BUSY: HEAD.format(""),
    Refusal.BAD_HTTP: HEAD.format("host: y\r\n"),
    Refusal.SLOW_HEAD: "GET /livez HTTP/1.1\r\nhost: x\r\n",
    Refusal.LARGE_HEAD: HEAD.format(f"x: {'x' * 40_000}\r\n"),
    Refusal.TRANSFER_CODING: HEAD.format("transfer-encoding: gzip\r\n"),
    Refusal.HTTP_VERSION: HEAD.format("").replace("HTTP/1.1", "HTTP/2.0"),
}


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


def parsed(said: bytes) -> tuple[int, dict[str, str], Any]:
    """Return status, header fields and problem of one answer."""
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in lines), json.loads(body)


def test_every_refusal_of_the_server_is_tried():
    assert SENT.keys() == SERVER_REFUSALS.keys()


@pytest.mark.anyio
@pytest.mark.parametrize("refusal", SENT, ids=lambda refusal: refusal.name)
async def test_a_refusal_of_the_server_has_the_form_of_all_refusals(refusal: Refusal) -> None:
    gateway = gateway_of(kinesis(), header_seconds=0.2, max_connections=2 if refusal is Refusal.BUSY else 100)
    async with served(gateway) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(2 if refusal is Refusal.BUSY else 0):
            stack.callback((await connected(server)).writer.close)
        status, fields, problem = parsed(await spoken(server, SENT[refusal].encode()))
        row = REFUSALS[refusal]
        assert (status, problem["status"], problem["code"]) == (row.status, row.status, row.code)
        assert (fields["content-type"], fields["connection"]) == ("application/problem+json", "close")
        assert fields["x-request-id"] == problem["request_id"]
        assert problem["detail"] == SERVER_REFUSALS[refusal]
        assert fields.get("retry-after") == ("1" if refusal is Refusal.BUSY else None)
        assert (gateway.tally.refusals, gateway.tally.answers) == ({refusal: 1}, {row.status: 1})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [("x-request-id: mine\r\n", True), ("x-request-id: not mine\r\n", False), ("x-request-id: mine\r\n" * 2, False)],
)
async def test_a_refused_head_keeps_the_id_of_its_client(fields: str, is_kept: bool) -> None:
    async with served(gateway_of(kinesis())) as server:
        _, found, problem = parsed(await spoken(server, HEAD.format(f"host: y\r\n{fields}").encode()))
        assert found["x-request-id"] == problem["request_id"]
        assert (problem["request_id"] == "mine") is is_kept


@pytest.mark.anyio
async def test_clients_that_a_busy_server_refuses_together_are_not_asked_back_together():
    numbers = iter(range(6))
    gateway = gateway_of(kinesis(), chance=lambda: next(numbers) / 6, max_connections=2)
    async with served(gateway) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            stack.callback((await connected(server)).writer.close)
        waits = [parsed(await spoken(server, HEAD.format("").encode()))[1]["retry-after"] for _ in range(6)]
    assert waits == ["1", "1", "2", "2", "3", "3"]


@pytest.mark.anyio
@pytest.mark.parametrize("refusal", [refusal for refusal in SENT if refusal is not Refusal.BUSY])
async def test_a_refused_head_request_gets_the_fields_of_a_refusal_and_no_body(refusal: Refusal) -> None:
    async with served(gateway_of(kinesis(), header_seconds=0.2)) as server:
        head, _, body = (await spoken(server, SENT[refusal].replace("GET", "HEAD").encode())).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % REFUSALS[refusal].status)
        assert re.search(rb"\r\ncontent-length: [12]\d\d(\r|$)", head)
        assert body == b""


@pytest.mark.anyio
@pytest.mark.parametrize("sent", ["GET http://[ HTTP/1.1\r\nhost: x\r\n", "GET /livez HTTP/1.1\r\nhost: x\r\n"])
@pytest.mark.parametrize("end", ["\r\n", "", "\0\r\n\r\n"], ids=["complete", "slow", "invalid"])
async def test_a_refusal_has_the_id_of_the_head_that_was_read(sent: str, end: str) -> None:
    async with served(gateway_of(kinesis(), header_seconds=0.2)) as server:
        request = f"{sent}x-request-id: mine\r\nexpect: nothing\r\n{end}".encode()
        head = (await spoken(server, request, b"\0")).partition(b"\r\n\r\n")[0]
        assert b"\r\nx-request-id: mine\r\n" in head + b"\r\n"


@pytest.mark.anyio
async def test_bytes_that_are_no_request_do_not_get_the_id_of_the_request_before():
    async with served(gateway_of(kinesis())) as server:
        said = await spoken(server, HEAD.format("x-request-id: mine\r\n").encode(), b"\0", pause=0.05)
        assert said.count(b"HTTP/1.1 400") == said.count(b"x-request-id: mine\r\n") == 1


@in_virtual_time
async def test_a_server_with_too_many_connections_says_over_http_2_when_to_come_back():
    async with talking() as (scene, _):
        scene.server.connections.update(range(100_000))
        talk = Talk(scene)
        talk.write(talk.client.say() + request(1, "GET", "/livez", ("x-request-id", "mine")))
        await asyncio.sleep(0.1)
        fields = heads(talk.wire.said)[1]
        assert (fields[":status"], fields["retry-after"], fields["x-request-id"]) == ("503", "1", "mine")
        body = next(payload for kind, _, stream, payload in frames_of(talk.wire.said) if (kind, stream) == (DATA, 1))
        assert (json.loads(body)["code"], json.loads(body)["request_id"]) == (REFUSALS[Refusal.BUSY].code, "mine")


@in_virtual_time
async def test_a_request_over_http_2_whose_body_does_not_come_is_asked_to_come_back_at_the_end():
    async with talking() as (scene, talk):
        stream = talk.client.begin("POST", PATH, [*AS_JSON, ("x-request-id", "mine")])
        await talk.exchange()
        for task in scene.server.tasks:
            task.cancel()
        await talk.exchange()
        status, fields, body = talk.client.answers[stream]
        assert (status, fields["retry-after"], fields["x-request-id"]) == (503, "1", "mine")
        assert json.loads(body)["request_id"] == "mine"
        assert scene.gateway.tally.refusals == {Refusal.DRAINING: 1}


@in_virtual_time
async def test_a_target_that_is_no_path_is_refused_over_http_2_with_an_id():
    async with talking() as (_, talk):
        status, fields, body = await talk.ask("GET", "http://else/livez")
        problem = json.loads(body)
        assert (status, problem["code"], problem["detail"]) == (400, "bad-http", SERVER_REFUSALS[Refusal.BAD_HTTP])
        assert fields["x-request-id"] == problem["request_id"]
