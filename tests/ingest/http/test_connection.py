"""One connection with small applications, in virtual time and without a socket: answers, failures, order, idleness."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kpl_integrations.ingest.http.connection import HttpConnection
from kpl_integrations.ingest.http.connection_flow import (
    LEAST_BYTES,
    LINGER_SECONDS,
    PIPELINED_BYTES,
    SEND_SECONDS,
    USUAL_BYTES,
)
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES
from kpl_integrations.ingest.http.request_head import SERVER
from tests.ingest.wire import Wire
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
Application = Callable[[Any, Any, Any], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> Backend:
    """Connections are asyncio's."""
    return virtual_time_backend("asyncio")


def connect(application: Application, **options: Any) -> tuple[Any, Wire]:
    kind: Any = HttpConnection
    config = uvicorn.Config(application, http=kind, lifespan="off", ws="none", log_config=None, **options)
    connection: Any = HttpConnection(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(wire := Wire())
    return connection, wire


async def asked(application: Application, *requests: bytes) -> Wire:
    connection, wire = connect(application)
    for request in requests:
        connection.data_received(request)
        await asyncio.sleep(1)
    connection.connection_lost(None)
    return wire


def answer(*bodies: bytes, status: int = 200, headers: Any = ()) -> Application:
    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    return application


LENGTH_2 = [(b"Content-Length", b"2")]
ANSWERS = [
    (answer(b"ab", headers=LENGTH_2), GET, [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"]),
    (answer(b"a", b"b", headers=LENGTH_2), GET, [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\na", b"b"]),
    (answer(b"ab"), GET, [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"]),
    (answer(b"a", b""), GET, [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", b"0\r\n\r\n"]),
    (answer(b"", status=204), GET, [b"HTTP/1.1 204 No Content\r\n\r\n"]),
    (
        answer(b"ab", headers=LENGTH_2),
        GET.replace(b"GET", b"HEAD"),
        [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"],
    ),
    (
        answer(b"", status=204),
        GET.replace(b"/1.1", b"/1.0"),
        [b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"],
    ),
]


@pytest.mark.parametrize(("application", "request_", "writes"), ANSWERS)
async def test_an_answer_is_written_as_the_application_sends_it(application, request_, writes):
    wire = await asked(application, request_)
    assert wire.writes == writes
    assert wire.closed is (b"connection: close" in writes[0])


async def fails(_scope: object, _receive: object, _send: object) -> None:
    raise LookupError


async def says_nothing(_scope: object, _receive: object, _send: object) -> None:
    """Return without an answer."""


FAILURES = {
    "raises": fails,
    "says nothing": says_nothing,
    "only a head": answer(),
    "too long": answer(b"abc", headers=LENGTH_2),
    "too short": answer(b"a", headers=LENGTH_2),
    "a line break in a field": answer(b"", headers=[(b"a", b"b\r\nset-cookie: c")]),
    "twice": answer(b"ab", b"ab", headers=LENGTH_2),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failed_application_is_answered_500_and_logged(name, caplog):
    wire = await asked(FAILURES[name], GET)
    said = b"".join(wire.writes)
    assert wire.closed
    if name == "twice":
        # Its answer had begun, so that the client sees it end too early.
        assert said == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"
    else:
        assert said.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        assert said.count(b"HTTP/1.1") == 1
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


async def test_the_answer_to_head_of_a_failed_application_has_no_body():
    wire = await asked(fails, GET.replace(b"GET", b"HEAD"))
    assert b"".join(wire.writes).endswith(b"content-length: 21\r\nconnection: close\r\n\r\n")


async def test_each_request_learns_that_its_client_is_gone():
    """Of an event stream with a request behind it, only that request was told."""
    heard: list[str] = []

    async def application(scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        heard.append(scope["path"])
        heard.append((await receive())["type"])

    connection, _ = connect(application)
    connection.data_received(GET + GET.replace(b"/a", b"/b"))
    await asyncio.sleep(1)
    assert heard == ["/a"]
    connection.connection_lost(None)
    await asyncio.sleep(1)
    assert heard == ["/a", "http.disconnect"]


async def test_requests_in_one_piece_are_answered_in_order():
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep({"/a": 3, "/b": 0, "/c": 1}[scope["path"]])
        body = scope["path"].encode()
        assert (await receive())["body"] == b"xy"
        await answer(body, headers=[(b"content-length", b"2")])(scope, receive, send)

    connection, wire = connect(application)
    pieces = [b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nxy" % path for path in (b"a", b"b", b"c")]
    connection.data_received(b"".join(pieces))
    await asyncio.sleep(2)
    assert wire.writes == []
    await asyncio.sleep(5)
    assert [each[-2:] for each in wire.writes] == [b"/a", b"/b", b"/c"]
    connection.connection_lost(None)


async def test_an_idle_connection_is_closed_and_bytes_of_no_request_do_not_keep_it():
    connection, wire = connect(answer(b"", status=204), timeout_keep_alive=10)
    connection.data_received(GET)
    await asyncio.sleep(6)
    connection.data_received(GET)
    await asyncio.sleep(9)
    connection.data_received(b"\r\n")
    assert not wire.closed
    await asyncio.sleep(2)
    assert (wire.closed, len(wire.writes)) == (True, 2)
    connection.connection_lost(None)


async def test_the_time_of_a_pause_does_not_count_for_an_idle_connection():
    connection, wire = connect(answer(b"", status=204), timeout_keep_alive=10)
    connection.data_received(GET)
    await asyncio.sleep(8)
    connection.stop_timers()
    await asyncio.sleep(30)
    connection.restart_timers()
    await asyncio.sleep(1)
    assert not wire.closed
    await asyncio.sleep(2)
    assert wire.closed
    connection.connection_lost(None)


@pytest.mark.parametrize("bodies", [(b"ab",), (b"a", b"b")])
async def test_at_the_end_of_the_server_an_answer_that_waits_for_its_client_stays_the_answer(bodies):
    """Its records are accepted, and 503 asks the client to send them again."""
    connection, wire = connect(answer(*bodies, headers=LENGTH_2))
    connection.pause_writing()
    connection.data_received(GET)
    await asyncio.sleep(1)
    assert wire.writes == []
    for task in connection.server.shared.tasks:
        task.cancel()
    await asyncio.sleep(1)
    assert wire.writes == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + bodies[0]]
    assert wire.closed is (len(bodies) > 1)
    assert connection.refusals._tally.answers == {}  # noqa: SLF001 - of no gateway
    connection.connection_lost(None)


async def test_a_slow_request_is_not_idle():
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(30)
        await answer(b"", status=204)(scope, receive, send)

    connection, wire = connect(application, timeout_keep_alive=10)
    for number in (1, 2):
        connection.data_received(GET)
        await asyncio.sleep(31)
        assert (wire.closed, len(wire.writes)) == (False, number)
    await asyncio.sleep(10)
    assert wire.closed
    connection.connection_lost(None)


async def test_a_client_that_does_not_read_stops_the_application():
    sent: list[int] = []

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            sent.append(number)
            connection.pause_writing()

    connection, _ = connect(application)
    connection.data_received(GET)
    await asyncio.sleep(1)
    assert sent == [0]
    connection.resume_writing()
    await asyncio.sleep(1)
    assert sent == [0, 1]
    connection.connection_lost(None)
    await asyncio.sleep(1)
    # What it sends now goes nowhere.
    assert sent == [0, 1, 2]


@pytest.mark.parametrize(("read_bytes", "is_aborted"), [(0, True), (LEAST_BYTES - 1, True), (LEAST_BYTES, False)])
async def test_a_client_that_takes_too_little_of_its_answers_is_cut_off(read_bytes, is_aborted):
    """One held its connection for good, with a small answer behind others that it did not read."""
    connection, wire = connect(answer(b"", status=204))
    wire.unread_bytes = 100_000
    connection.pause_writing()
    connection.data_received(GET)
    await asyncio.sleep(SEND_SECONDS - 1.0)
    wire.unread_bytes -= read_bytes
    assert not wire.aborted
    await asyncio.sleep(2.0)
    assert wire.aborted is is_aborted
    await asyncio.sleep(SEND_SECONDS)
    assert wire.aborted
    connection.connection_lost(None)


async def test_a_client_that_closes_its_side_and_never_reads_is_cut_off():
    connection, wire = connect(answer(b"", status=204))
    connection.data_received(GET)
    await asyncio.sleep(1)
    wire.unread_bytes = 1_000
    connection.eof_received()
    await asyncio.sleep(LINGER_SECONDS + 1.0)
    assert wire.aborted
    connection.connection_lost(None)


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (["content-length: 2\r\n\r\nab"], b"ab"),
        (["content-length: 2\r\n\r\n", "ab"], None),
        (["content-length: 0\r\n\r\n"], b""),
        (["content-length: 2\r\nexpect: 100-continue\r\n\r\nab"], None),
    ],
)
async def test_a_body_that_has_arrived_is_there_without_waiting(pieces, whole):
    heard: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        take = scope["extensions"][SERVER]["request"].whole_body
        heard.append(take())
        # What was taken is not there again.
        message = await receive() if heard[0] is None else {"body": take() or heard[0]}
        heard.append(message["body"])
        await answer(b"", status=204)(scope, receive, send)

    first = b"POST /a HTTP/1.1\r\nhost: x\r\n"
    await asked(application, first + pieces[0].encode(), *(each.encode() for each in pieces[1:]))
    assert heard == [whole, b"" if whole == b"" else b"ab"]


async def test_a_large_body_that_was_taken_does_not_stop_the_reading():
    """A client that leaves while its answer is pending is noticed only by reading."""
    flow: list[bool] = []

    async def application(scope: Any, _receive: Any, send: Any) -> None:
        flow.append(connection.flow.read_paused)
        assert len(scope["extensions"][SERVER]["request"].whole_body()) == 100_000
        flow.append(connection.flow.read_paused)
        await answer(b"", status=204)(scope, _receive, send)

    connection, _ = connect(application)
    connection.data_received(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + bytes(100_000))
    await asyncio.sleep(1)
    assert flow == [True, False]
    connection.connection_lost(None)


async def test_a_connection_is_not_read_while_a_request_waits():
    """Each answer let in two more requests, so that hundreds waited behind the first."""
    paused: list[bool] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        _ = await receive()
        paused.append(connection.flow.read_paused)
        await answer(b"", status=204)(scope, receive, send)

    connection, _ = connect(application)
    connection.data_received(3 * GET)
    await asyncio.sleep(1)
    assert paused == [True, True, False]
    connection.connection_lost(None)


async def test_received_bytes_are_parsed_only_until_a_request_waits():
    """250 KB of pipelined requests became 10 MB of waiting ones."""
    may_answer = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await may_answer.wait()
        await answer(b"", status=204)(scope, receive, send)

    connection, wire = connect(application)
    connection.data_received(9_000 * GET)
    await asyncio.sleep(1)
    assert 0 < len(connection.waiting) <= SLICE_BYTES // len(GET)
    may_answer.set()
    await asyncio.sleep(2)
    assert wire.said.count(b"HTTP/1.1 204 ") == 9_000
    assert not wire.closed
    connection.connection_lost(None)


@pytest.mark.parametrize(
    "behind", [b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nhost: " + bytes(40_000)], ids=["invalid", "large"]
)
async def test_a_complete_request_gets_its_answer_although_the_bytes_behind_it_are_refused(behind):
    may_answer = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await may_answer.wait()
        await answer(b"", status=204)(scope, receive, send)

    connection, wire = connect(application)
    connection.data_received(GET)
    connection.data_received(behind)
    await asyncio.sleep(1)
    assert not wire.closed
    may_answer.set()
    await asyncio.sleep(1)
    assert (wire.said, wire.closed) == (b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n", True)
    connection.connection_lost(None)


async def test_a_connection_whose_client_sends_no_more_makes_room_first():
    """A client that has gone looks like one that waits for its answer."""

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    connection, wire = connect(application)
    connection.data_received(GET)
    await asyncio.sleep(1)
    assert connection.eof_received()
    places: Any = connection.places
    assert list(places.half_closed) == [wire]
    places.take(other := SimpleNamespace(transport=Wire()), 2, 1)
    assert (wire.aborted, other.transport.aborted, list(places.half_closed)) == (True, False, [])
    connection.connection_lost(None)
    places.keep(other)


def received(connection: Any, data: bytes) -> int:
    """Let a connection receive these bytes as a loop does; return how large the buffer for them was."""
    buffer = connection.get_buffer(-1)
    taken = data[: len(buffer)]
    buffer[: len(taken)] = taken
    connection.buffer_updated(len(taken))
    return len(buffer)


async def test_only_a_connection_with_pipelined_requests_is_read_in_small_pieces():
    """200 of them kept the loop from all others for 80 ms."""
    bodies: list[int] = []

    async def application(_scope: Any, receive: Any, send: Any) -> None:
        size, is_whole = 0, False
        while not is_whole:
            message = await receive()
            size, is_whole = size + len(message["body"]), not message["more_body"]
        bodies.append(size)
        await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    def post(size: int) -> bytes:
        return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size)

    connection, _ = connect(application)
    assert received(connection, post(10)) == USUAL_BYTES
    # One large body, in as few pieces as possible.
    assert received(connection, post(100_000)) == USUAL_BYTES
    assert received(connection, post(10) * 200) == USUAL_BYTES
    # It has sent many requests in one piece. What is small says nothing new.
    assert received(connection, post(10)) == PIPELINED_BYTES
    large = post(50_000)
    assert received(connection, large) == PIPELINED_BYTES
    assert received(connection, large[PIPELINED_BYTES:]) == USUAL_BYTES
    for _ in range(2_000):
        await asyncio.sleep(0)
    assert bodies == [10, 100_000, *[10] * 201, 50_000]
    connection.connection_lost(None)


async def test_many_requests_for_an_upgrade_in_one_piece_are_all_answered():
    """A proxy's connection gets up to 256 KiB at once while tenants take turns."""
    connection, wire = connect(answer(b"ab", headers=LENGTH_2))
    connection.data_received(GET)
    await asyncio.sleep(1)
    connection.feed(GET.replace(b"x\r\n", b"x\r\nconnection: upgrade\r\nupgrade: h2c\r\n") * 3_000)
    await asyncio.sleep(1)
    assert wire.said.count(b"HTTP/1.1 200 OK") == 3_001
    connection.connection_lost(None)
