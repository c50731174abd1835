"""The fast path on a socket: a request in any form and in any pieces is answered once and in order."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.http.answers import AnswerStarts
from kpl_integrations.ingest.request import records
from kpl_integrations.ingest.serving import GatewayServer
from tests.ingest.served import served, spoken
from tests.support.gateway_scene import JSON, NDJSON, STREAM, gateway_of, kinesis
from tests.support.producer_scene import stored
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


def request(body: bytes = ONE, *fields: str, target: str = PATH, version: str = "1.1") -> bytes:
    head = [
        f"POST {target} HTTP/{version}",
        "host: x",
        f"content-type: {JSON}",
        f"content-length: {len(body)}",
        *fields,
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


DELIVERED_PATH = PATH + "?ack=delivered"
DELIVERED = request(target=DELIVERED_PATH)
LAST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def address_of(server: GatewayServer) -> tuple[str, int]:
    host, _, port = server.url.rpartition("/")[2].partition(":")
    return host, int(port)


def count_of(gateway: IngestGateway) -> Callable[[], int]:
    """Count the requests that reach the application."""
    called = 0
    application = type(gateway).__call__

    class Counted(type(gateway)):  # type: ignore[misc] # a class that is an argument's
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            nonlocal called
            called += 1
            await application(self, scope, receive, send)

    gateway.__class__ = Counted
    return lambda: called


async def test_many_requests_in_one_piece_are_answered_in_order():
    gateway = gateway_of(kinesis())
    async with served(gateway) as server:
        await spoken(server, request(), LAST)
        bad = request(b"{")
        slow = request(target=PATH + "?ack=delivered")
        said = await spoken(server, request() + bad + request() + slow + request() + bad + LAST)
        assert [said[at + 9 : at + 12] for at in range(len(said)) if said.startswith(b"HTTP/1.1 ", at)] == [
            b"202", b"400", b"202", b"200", b"202", b"400", b"200"]  # fmt: skip
    assert gateway.tally.answers[202] == 4


async def test_delivered_requests_wait_for_their_results_outside_of_the_application():
    transport = kinesis()
    gateway = gateway_of(transport)
    async with served(gateway) as server:
        await spoken(server, request(), LAST)
        reached = count_of(gateway)
        said = await asyncio.gather(*(spoken(server, DELIVERED, DELIVERED, LAST, pause=0.3) for _ in range(20)))
        assert {each.count(b'"delivered":1') for each in said} == {2}
        # Only the last request of each connection.
        assert reached() == 20
        reader, writer = await asyncio.open_connection(*address_of(server))
        writer.write(DELIVERED)
        await reader.readuntil(b'"delivered":1')
        # An idle connection does not hold the records of its last request.
        assert [each.cycle for each in server._server.server_state.connections] == [None]  # type: ignore[union-attr] # noqa: SLF001
        writer.close()
    assert len(stored(transport, STREAM)) == 42


@pytest.mark.parametrize("pause", [0.0, 0.001], ids=["in one piece", "in two"])
async def test_requests_behind_a_pending_answer_are_answered_after_it(pause):
    async with served(gateway_of(kinesis())) as server:
        await spoken(server, request(), LAST)
        for first in (b"", request(target=DELIVERED_PATH)):
            said = await spoken(server, first + DELIVERED, request() + DELIVERED + LAST, pause=pause)
            statuses = [said[at + 9 : at + 12] for at in range(len(said)) if said.startswith(b"HTTP/1.1 ", at)]
            assert statuses == [b"200"] * bool(first) + [b"200", b"202", b"200", b"200"]
            assert said.count(b'"delivered":1') == 2 + bool(first)


def accepted(gateway: IngestGateway) -> int:
    account = gateway.opened.accounts.find("local")
    return 0 if account is None else account.accepted_records


async def test_a_client_that_leaves_does_not_disturb_its_records(caplog):
    transport = kinesis()
    gateway = gateway_of(transport)
    async with served(gateway) as server:
        await spoken(server, request(), LAST)
        _, writer = await asyncio.open_connection(*address_of(server))
        writer.write(DELIVERED)
        await until(lambda: accepted(gateway) == 2)
        writer.transport.abort()
        await spoken(server, DELIVERED, LAST)
    assert len(stored(transport, STREAM)) == 3
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


# Results of so many records are encoded in slices, which a task does.
MANY = 1_200
MANY_DELIVERED = request(b"\n".join([b'{"data":"x"}'] * MANY), target=DELIVERED_PATH).replace(
    JSON.encode(), NDJSON.encode()
)


def statuses_of(said: bytes) -> list[bytes]:
    return [said[at + 9 : at + 12] for at in range(len(said)) if said.startswith(b"HTTP/1.1 ", at)]


async def answers_in_turn(server: GatewayServer, *asked: bytes) -> list[bytes]:
    """Send each request of a connection after the answer to the one before."""
    reader, writer = await asyncio.open_connection(*address_of(server))
    answers = []
    for each in asked:
        writer.write(each)
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answers.append(head + await reader.readexactly(size))
    writer.close()
    return answers


async def test_a_task_goes_on_with_a_request_and_those_behind_it_keep_their_order(tmp_path):
    transport = kinesis()
    gateway = gateway_of(transport, spool=tmp_path / "spool.db")
    spooled = request(target=PATH + "?ack=spooled")
    keyed = request(ONE, 'idempotency-key: "k"')
    async with served(gateway) as server:
        await spoken(server, request(), LAST)
        reached = count_of(gateway)
        answers = await answers_in_turn(server, MANY_DELIVERED, spooled, spooled, keyed, keyed)
        assert [statuses_of(each) for each in answers] == [[b"200"], *[[b"202"]] * 4]
        assert answers[0].count(b'"sequence_number"') == MANY
        assert reached() == 0
        said = await spoken(server, spooled + MANY_DELIVERED + keyed + request(b"{") + spooled + LAST)
        assert statuses_of(said) == [b"202", b"200", b"202", b"400", b"202", b"200"]
        assert said.count(b'"ack":"spooled"') == 2
    # The requests with the key count once.
    assert len(stored(transport, STREAM)) == 1 + 2 * MANY + 2 + 1 + 2


async def test_nothing_is_sent_to_a_client_that_leaves_before_a_task_goes_on_with_its_request(caplog, monkeypatch):
    transport = kinesis()
    gateway = gateway_of(transport)
    sent = []
    async with served(gateway) as server:
        await spoken(server, request(), LAST)
        finish = type(gateway).finish

        async def noted(self: IngestGateway, steps: Any, need: Any, send: Any) -> None:
            await finish(self, steps, need, send)
            sent.append(gateway.tally.answers[200])

        monkeypatch.setattr(type(gateway), "finish", noted)
        _, writer = await asyncio.open_connection(*address_of(server))
        writer.write(MANY_DELIVERED)
        await until(lambda: accepted(gateway) == 1 + MANY)
        writer.transport.abort()
        await until(lambda: bool(sent))
        tasks = server._server.server_state.tasks  # noqa: SLF001
        await until(lambda: not tasks)
    assert len(stored(transport, STREAM)) == 1 + MANY
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_shutdown_delivers_the_records_and_sends_the_pending_answers():
    gateway = gateway_of(kinesis(), record_max_buffered_time_ms=60_000)
    async with served(gateway) as server:
        await spoken(server, request(), LAST)
        reader, writer = await asyncio.open_connection(*address_of(server))
        writer.write(DELIVERED)
        await until(lambda: accepted(gateway) == 2)
    assert (await asyncio.wait_for(reader.read(), 1.0)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_an_exception_of_a_pending_answer_is_answered_500(caplog, monkeypatch):
    async with served(gateway_of(kinesis())) as server:
        await spoken(server, request(), LAST)
        monkeypatch.setattr(records, "all_delivered", _fails)
        assert (await spoken(server, DELIVERED)).startswith(b"HTTP/1.1 500")
    assert "Exception in the fast path" in caplog.text


@pytest.mark.parametrize(
    ("asked_for", "calls"),
    [
        (request(), 1),
        (request(ONE, "connection: close"), 1),
        (request(ONE, "expect: 100-continue"), 2),
        (request(version="1.0"), 1),
        (request().replace(b"content-length: 32", b"transfer-encoding: chunked")[: -len(ONE)]
         + b"20\r\n" + ONE + b"\r\n0\r\n\r\n", 2),
    ],
    ids=["plain", "close", "expect", "1.0", "chunked"],
)  # fmt: skip
async def test_a_request_in_any_form_is_accepted_once(asked_for, calls):
    transport = kinesis()
    gateway = gateway_of(transport)
    async with served(gateway) as server, httpx.AsyncClient() as client:
        assert (await client.post(server.url + PATH, json=json.loads(ONE))).status_code == 202
        reached = count_of(gateway)
        assert b" 202 " in await spoken(server, asked_for, LAST, pause=0.05)
        assert reached() <= calls
    assert len(stored(transport, STREAM)) == 2


@pytest.mark.parametrize("cut", [1, 10, 40, -32, -31, -1])
async def test_a_request_in_two_pieces_is_accepted_once_wherever_it_is_split(cut):
    transport = kinesis()
    async with served(gateway_of(transport)) as server, httpx.AsyncClient() as client:
        assert (await client.post(server.url + PATH, json=json.loads(ONE))).status_code == 202
        whole = request()
        said = await spoken(server, whole[:cut], whole[cut:] + LAST, pause=0.05)
        assert said.startswith(b"HTTP/1.1 202")
        assert said.count(b"HTTP/1.1 ") == 2
    assert len(stored(transport, STREAM)) == 2


async def test_a_request_that_is_not_http_after_its_head_is_not_accepted():
    transport = kinesis()
    head = request()[: -len(ONE)].replace(b"content-length: 32", b"transfer-encoding: chunked")
    async with served(gateway_of(transport)) as server:
        await spoken(server, request(), LAST)
        assert b"HTTP/1.1 400" in await spoken(server, head + b"no length\r\n")
    assert len(stored(transport, STREAM)) == 1


async def test_an_idle_connection_of_the_fast_path_is_closed():
    async with served(gateway_of(kinesis(), keep_alive_seconds=1)) as server:
        await spoken(server, request(), LAST)
        started = asyncio.get_running_loop().time()
        # The client sends nothing more, and the server closes the connection.
        said = await spoken(server, request(), request(), pause=0.3)
        assert said.count(b"HTTP/1.1 202") == 2
        assert asyncio.get_running_loop().time() - started >= 1.2


async def test_an_exception_is_answered_500_and_logged_once(caplog):
    gateway = gateway_of(kinesis())
    async with served(gateway) as server:
        gateway.begin = _fails  # type: ignore[method-assign, assignment] # there is no way to make it fail
        said = await spoken(server, request())
    assert said.startswith(b"HTTP/1.1 500")
    assert b"connection: close" in said
    logged = [each.message for each in caplog.records if each.levelno >= logging.ERROR]
    request_id = said.partition(b"x-request-id: ")[2][:24].decode()
    assert logged == [f"Exception in the fast path; answered with request_id={request_id}"]


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["alone", "after another"])
async def test_requests_behind_an_answer_that_closes_are_not_accepted(before):
    transport = kinesis()
    gateway = gateway_of(transport)
    async with served(gateway) as server:
        gateway.begin = _fails  # type: ignore[method-assign, assignment] # there is no way to make it fail
        said = await spoken(server, before, request() + request() + request(), pause=0.1)
        assert [said[at + 9 : at + 12] for at in range(len(said)) if said.startswith(b"HTTP/1.1 ", at)] == (
            [b"200", b"500"] if before else [b"500"]
        )
    assert stored(transport, STREAM) == []


@pytest.mark.parametrize(
    "target", ["http://host", "http://host:70000/", "/" + "x" * 65_536], ids=["no path", "no port", "too long"]
)
async def test_an_invalid_target_is_answered_400_with_and_without_its_body(target, caplog):
    async with served(gateway_of(kinesis(), max_header_bytes=1_048_576)) as server:
        whole = request(target=target)
        with caplog.at_level(logging.DEBUG, "kpl_integrations.ingest.http"):
            for asked_for in (whole, whole[: -len(ONE)]):
                assert (await spoken(server, asked_for)).startswith(b"HTTP/1.1 400")
        logged = [each for each in caplog.records if each.getMessage().startswith("invalid HTTP of ")]
        assert [each.levelno for each in logged] == [logging.DEBUG] * 2


def _fails(*_: object) -> None:
    message = "on purpose"
    raise RuntimeError(message)


async def test_answers_start_with_the_current_header_fields_of_the_server():
    starts = AnswerStarts()
    fields = [(b"date", b"now"), (b"server", b"x")]
    for _ in range(2):
        assert starts.of(202, fields) == b"HTTP/1.1 202 Accepted\r\ndate: now\r\nserver: x\r\n"
    assert starts.of(400, fields).startswith(b"HTTP/1.1 400 Bad Request\r\ndate: now")
    # The server makes a new list.
    assert starts.of(202, [(b"date", b"later")]) == b"HTTP/1.1 202 Accepted\r\ndate: later\r\n"


async def test_a_client_that_does_not_read_its_answers_is_paused():
    gateway = gateway_of(kinesis())
    async with served(gateway) as server:
        await spoken(server, request(), LAST)
        reader, writer = await asyncio.open_connection(*address_of(server), limit=1_024)
        try:
            writer.write(request(b"{") * 150_000)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), 1.0)
            # The buffers of both sockets and of the server take some answers. The other requests are not read.
            assert gateway.tally.answers[400] < 150_000
            assert await reader.read(12) == b"HTTP/1.1 400"
        finally:
            writer.transport.abort()
