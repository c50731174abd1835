"""One request of the ASGI application, over either version of HTTP: its body as it arrives, and its answer.

`RequestCycle` keeps the order of ASGI's messages, the length of the answer, and the body until the application takes
it. A subclass for a version of HTTP writes: `Http1Cycle` bytes, `http2/stream.py:Http2Stream` frames.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from kpl_integrations.asgi.protocol import Header, Message, Scope
from kpl_integrations.ingest.admission.refusals import Refusal
from kpl_integrations.ingest.http.answers import (
    CONTINUE,
    FAILED_FIELDS,
    FAILED_TEXT,
    Headers,
    ServerRefusals,
)
from kpl_integrations.ingest.http.connection_flow import ConnectionFlow
from kpl_integrations.ingest.http.correlation import REQUEST_ID_HEADER, request_id_of_scope
from kpl_integrations.ingest.http.cpu_charges import ChargedRequest
from kpl_integrations.ingest.http.places import ConnectionPlaces
from kpl_integrations.ingest.http.read_turns import ConnectionReader, ReadTurns
from kpl_integrations.ingest.http.request_head import SERVER, Server
from kpl_integrations.ingest.http.uvicorn_server import ServerPort
from kpl_integrations.ingest.tenants import Tenant

_log: Final = logging.getLogger(__name__)
# Characters that no header field may have.
_FORBIDDEN: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CLOSE: Final = b"close"
_CHUNKED: Final = (b"transfer-encoding", b"chunked")
# Answers with these have no body (RFC 9110, sections 15.3.5 and 15.4.5).
_WITHOUT_BODY: Final = (204, 304)


class ResponseHead(NamedTuple):
    """The status and the fields of an answer, with names in lower case. `length` None: it is not known."""

    status: int
    fields: Headers
    length: int | None


class RequestCycle:
    """A request from its head to the end of its answer. The answer to HEAD has no body."""

    # Whether an answer ends with the last byte of its Content-Length, before the application says so.
    ends_with_length: ClassVar[bool]

    def __init__(self, *, is_head: bool, expects_continue: bool) -> None:
        self._is_head = is_head
        self._expects_continue = expects_continue
        self.disconnected = self.response_complete = False
        # The pieces of the body that the application has not taken, how many bytes they use of what the client may send
        # before that, and whether more will come.
        self._pieces: list[bytes] = []
        self.waiting_bytes = 0
        self._has_taken = False
        self.more_body = True
        self._changed = asyncio.Event()
        # Whether the application has started and ended its answer.
        self._has_started = self._has_ended = False
        # The head of the answer, until the first part of its body (ASGI: not before).
        self._head: ResponseHead | None = None
        # The part of the body that waits for a client which does not read.
        self._unsent: Message | None = None
        # How many bytes of the answer's body are to come, if that is known.
        self._bytes_left: int | None = None

    # What a version of HTTP does

    def ask_for_body(self) -> None:
        """Send 100 (Continue)."""
        raise NotImplementedError

    def give_back(self, size_bytes: int) -> None:
        """Let the client send as many bytes of a body again: these are taken, or dropped."""
        raise NotImplementedError

    def watch_client(self) -> None:
        """Read the connection on: the application waits for more of the body, or for the end of the client."""
        raise NotImplementedError

    def writable(self) -> Awaitable[None] | None:
        """Return what to wait for before more of the answer is written; None: the client takes what was."""
        raise NotImplementedError

    def write(self, head: ResponseHead | None, body: bytes, *, is_end: bool) -> None:
        """Write the head, if there is one, and a part of the body. `is_end`: nothing follows."""
        raise NotImplementedError

    def abort(self) -> None:
        """Break off an answer whose head is written."""
        raise NotImplementedError

    # From the connection

    def add_body(self, piece: bytes, size_bytes: int) -> None:
        """Add a piece of the body, which counts as so many bytes."""
        if self.response_complete:
            self.give_back(size_bytes)
        else:
            self._pieces.append(piece)
            self.waiting_bytes += size_bytes
            self._changed.set()

    def end_body(self) -> None:
        """Note that the body is complete."""
        self.more_body = False
        self._changed.set()

    def client_gone(self) -> None:
        """Note that the client has reset the request, or that its connection is lost."""
        if not self.response_complete:
            self.disconnected = True
            self._take_body()
        self._changed.set()

    async def run(self, application: Any, scope: Scope, refusals: ServerRefusals) -> None:  # noqa: ANN401 - ASGI's
        """Let the application answer. If its answer stays incomplete, log that, and answer 500 or break it off.

        The server cancels this when its time to shut down is over. Then the answer is 503, unless there is one that
        waits for its client.
        """
        try:
            await application(scope, self.receive, self.send)
            if not (self.response_complete or self.disconnected):
                _log.error("the application did not complete its answer")
        except Exception:  # noqa: BLE001 - an application may raise anything
            _log.exception("Exception in ASGI application; request_id=%s", request_id_of_scope(scope).decode())
        except asyncio.CancelledError:
            if self._unsent is not None and not self.disconnected:
                self._send_body(self._unsent.get("body", b""), more_body=self._unsent.get("more_body", False))
            elif not (self._has_started or self.disconnected):
                request_id = request_id_of_scope(scope)
                answer = refusals.answer(Refusal.DRAINING, request_id)
                self._start(answer.status, [(REQUEST_ID_HEADER, request_id), *answer.headers()])
                self._send_body(answer.body, more_body=False)
            raise
        finally:
            if not (self.response_complete or self.disconnected):
                self._fail(request_id_of_scope(scope))

    def _fail(self, request_id: bytes) -> None:
        if self._has_started and self._head is None:
            self.client_gone()
            self.abort()
            self.response_complete = True
        else:
            self._start(500, [(REQUEST_ID_HEADER, request_id), *FAILED_FIELDS])
            self._send_body(FAILED_TEXT, more_body=False)

    # From the application

    def whole_body(self) -> bytes | None:
        """Return the body if all of it has arrived and nothing was taken; None: call `receive`."""
        if self.more_body or self._has_taken or self._expects_continue or self.disconnected:
            return None
        return self._take_body()

    async def receive(self) -> Message:
        """Return what has arrived of the body, or wait for it; or for the end of the answer or the connection."""
        if self._expects_continue and not (self.disconnected or self._has_started):
            self._expects_continue = False
            self.ask_for_body()
        if not (self.disconnected or self.response_complete):
            self.watch_client()
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take_body(), "more_body": self.more_body}

    def _take_body(self) -> bytes:
        self._has_taken = True
        pieces, size = self._pieces, self.waiting_bytes
        self._pieces, self.waiting_bytes = [], 0
        self.give_back(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def send(self, message: Message) -> None:
        """Keep the start of the answer for its first part, or send a part once the client has taken what was sent.

        Raises:
            RuntimeError: it is not the time for this message, a header field is invalid, or the answer has another
                length than its Content-Length.
        """
        if self.disconnected:
            return
        expected = "http.response.body" if self._has_started else "http.response.start"
        if message["type"] != expected or self._has_ended:
            detail = f"the application sent {message['type']!r}, and the next message is {expected!r}"
            raise RuntimeError(detail)
        if not self._has_started:
            self._start(message["status"], message.get("headers", ()))
            return
        # A complete answer waits for its client without the application.
        writable = None if self.response_complete else self.writable()
        if writable is not None:
            self._unsent = message
            await writable
            self._unsent = None
        if not self.disconnected:
            self._send_body(message.get("body", b""), more_body=message.get("more_body", False))

    def _start(self, status: int, headers: Iterable[Header]) -> None:
        fields, length = [], None
        for name, value in headers:
            lowered = name.lower()
            if _FORBIDDEN.search(name) or _FORBIDDEN.search(value):
                detail = f"the answer's header field {lowered!r} has a control character"
                raise RuntimeError(detail)
            if lowered == b"content-length":
                length = int(value)
            fields.append((lowered, value))
        self._bytes_left = 0 if self._is_head or status in _WITHOUT_BODY else length
        self._head = ResponseHead(status, fields, self._bytes_left)
        self._has_started = True

    def _send_body(self, body: bytes, *, more_body: bool) -> None:
        if self._is_head:
            body = b""
        is_end = not more_body
        if self._bytes_left is not None:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (self._bytes_left and is_end):
                detail = f"the answer's body differs from its Content-Length by {-self._bytes_left} bytes"
                raise RuntimeError(detail)
            is_end = is_end or (self.ends_with_length and not self._bytes_left)
        self._has_ended = not more_body
        if self.response_complete:
            return
        if is_end:
            self.response_complete = True
            if self.waiting_bytes:
                self._take_body()
            self._changed.set()
        head, self._head = self._head, None
        self.write(head, body, is_end=is_end)


class Http1Port(Protocol):
    """What a request over HTTP/1.1 uses of its connection."""

    transport: asyncio.Transport
    flow: ConnectionFlow

    def start_of(self, status: int) -> bytes:
        """Return the first bytes of an answer."""

    def read_on(self) -> None:
        """Read again, unless requests wait behind this one."""

    def answered(self) -> None:
        """Note that an answer is complete."""


class Http1Cycle(RequestCycle):
    """A request over HTTP/1. `keep_alive`: the connection stays open after the answer.

    `version` 1.0 has no chunks: an answer of unknown length ends with the connection, which does not stay open, and
    100 (Continue) is not sent (RFC 9110, section 10.1.1).
    """

    ends_with_length = False

    def __init__(
        self, port: Http1Port, *, is_head: bool, keep_alive: bool, expects_continue: bool, version: str = "1.1"
    ) -> None:
        self._has_chunks = version != "1.0"
        super().__init__(is_head=is_head, expects_continue=expects_continue and self._has_chunks)
        self._port = port
        self.keep_alive = keep_alive and self._has_chunks
        # Whether the end of the answer's body is marked by a chunk.
        self._is_chunked = False

    def ask_for_body(self) -> None:
        """Send 100 (Continue)."""
        if not self._port.transport.is_closing():
            self._port.transport.write(CONTINUE)

    def give_back(self, size_bytes: int) -> None:  # noqa: ARG002 - TCP counts them
        """Read the connection again."""
        self.watch_client()

    def watch_client(self) -> None:
        """Read the connection again, unless requests wait behind this one."""
        port = self._port
        if port.flow.read_paused and not port.transport.is_closing():
            port.read_on()

    def writable(self) -> Awaitable[None] | None:
        """Wait for a client that does not read."""
        flow = self._port.flow
        return flow.writable() if flow.write_paused else None

    def write(self, head: ResponseHead | None, body: bytes, *, is_end: bool) -> None:
        """Write this at once, with the last chunk at the end."""
        start = b"" if head is None else self._encoded(head)
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = chunk + b"0\r\n\r\n" if is_end else chunk
        self._port.transport.write(start + body if start else body)
        if is_end:
            if not self.keep_alive:
                self._port.flow.close()
            self._port.answered()

    def _encoded(self, head: ResponseHead) -> bytes:
        """Return the bytes of a head, with the fields that HTTP/1.1 needs besides those of the application."""
        fields, says_close = head.fields, False
        for name, value in fields:
            if name == b"connection":
                says_close = says_close or _CLOSE in [token.strip() for token in value.lower().split(b",")]
        if says_close:
            self.keep_alive = False
        elif not self.keep_alive:
            fields.append((b"connection", _CLOSE))
        self._is_chunked = head.length is None and self._has_chunks
        if self._is_chunked and _CHUNKED not in fields:
            fields.append(_CHUNKED)
        return b"".join([self._port.start_of(head.status), *[b"%b: %b\r\n" % field for field in fields], b"\r\n"])

    def abort(self) -> None:
        """Close the connection."""
        self._port.flow.close()


class ServingConnection(Protocol):
    """What a request needs of its connection, over either version of HTTP."""

    server: ServerPort
    reader: ConnectionReader
    places: ConnectionPlaces
    turns: ReadTurns
    refusals: ServerRefusals

    def verified(self) -> None:
        """Keep this connection: it has shown valid credentials."""


def claim_connection(connection: ServingConnection, tenant: Tenant | None) -> bool:
    """Let a connection belong to the tenant of its request; None: it is not verified. Return True: it may go on."""
    connection.reader.claim(tenant)
    if tenant is not None:
        connection.verified()
    return True


def application_for(connection: ServingConnection, cycle: RequestCycle, scope: Scope) -> Any:  # noqa: ANN401 - ASGI's
    """Return what answers this request, and add to its scope what the server does for it."""
    server, reader = connection.server, connection.reader
    application = server.application
    if server.is_full(connection.places.http_2_requests):
        application = connection.refusals.application(Refusal.BUSY)
    claim: Callable[[Tenant | None], bool] = partial(claim_connection, connection)
    if connection.turns.is_active:
        application = timed = ChargedRequest(connection.turns.charges, reader, application, claim)
        claim = timed.claim
    offered = Server(claim, connection.verified, reader.watch_body, cycle.whole_body)
    scope["extensions"] = {SERVER: {"request": offered}}
    return application
