"""One request of the ASGI application: its body as it arrives, and the answer that the application sends."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from kpl_integrations.asgi.protocol import Message, Receive, Scope, Send
from kpl_integrations.ingest.http.connection_flow import ConnectionFlow
from kpl_integrations.ingest.http.correlation import request_id_of_scope
from kpl_integrations.ingest.http.raw_answers import CONTINUE, FAILED_CONTENT

_log: Final = logging.getLogger(__name__)
# A connection is not read while the application has not taken so many bytes of a body.
_MOST_WAITING_BYTES: Final = 65_536
FORBIDDEN: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no header field may have."""
_CLOSE: Final = b"close"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
# Answers with these have no body (RFC 9110, sections 15.3.5 and 15.4.5).
WITHOUT_BODY: Final = (204, 304)


Headers = Iterable[tuple[bytes, bytes]]


def _nothing() -> None:
    """Do nothing: the request has ended."""


class Cycle(Protocol):
    """A request of an application, over HTTP/1.1 or HTTP/2."""

    disconnected: bool
    response_complete: bool

    async def receive(self) -> Message:
        """Return the next message for the application."""

    async def send(self, message: Message) -> None:
        """Send a message of the application."""

    def fail(self, request_id: bytes) -> None:
        """End an answer that the application has not completed, to the request with this id."""


async def let_answer(application: Any, scope: Scope, cycle: Cycle) -> None:  # noqa: ANN401 - an ASGI application
    """Run the application for one request. If its answer stays incomplete, log that and fail the cycle."""
    try:
        await application(scope, cycle.receive, cycle.send)
        if not (cycle.response_complete or cycle.disconnected):
            _log.error("the application did not complete its answer")
    except Exception:  # noqa: BLE001 - an application may raise anything
        _log.exception("Exception in ASGI application; request_id=%s", request_id_of_scope(scope).decode())
    finally:
        if not (cycle.response_complete or cycle.disconnected):
            cycle.fail(request_id_of_scope(scope))


class RequestCycle:
    """A request from its head to the end of its answer.

    `start_of` returns the first bytes of an answer by status. `answered` is called when the answer is complete. The
    answer to HEAD has no body.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: ConnectionFlow,
        *,
        start_of: Callable[[int], bytes],
        answered: Callable[[], None],
        is_head: bool,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._is_head = is_head
        self._transport = transport
        self._flow = flow
        self._start_of = start_of
        self._answered = answered
        self._expects_continue = expects_continue
        self.keep_alive = keep_alive
        self.disconnected = False
        # The pieces of the body that the application has not taken, and whether more will come.
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._has_taken = False
        self.more_body = True
        self._changed = asyncio.Event()
        self._has_started = False
        self.response_complete = False
        # The head of the answer, until the first part of its body (ASGI: not before).
        self._head = b""
        # How many bytes of the answer's body are to come; None: its end is marked by a chunk.
        self._bytes_left: int | None = None

    # From the connection

    def add_body(self, piece: bytes) -> None:
        """Add a piece of the body."""
        if self.response_complete:
            return
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            self._flow.pause_reading()
        self._changed.set()

    def end_body(self) -> None:
        """Note that the body is complete."""
        if not self.response_complete:
            self.more_body = False
            self._changed.set()

    def client_gone(self) -> None:
        """Note that the connection is lost."""
        if not self.response_complete:
            self.disconnected = True
        self._changed.set()

    async def run(self, application: Any, scope: Scope) -> None:  # noqa: ANN401 - an ASGI application
        """Let the application answer."""
        try:
            await let_answer(application, scope, self)
        finally:
            self._answered = _nothing

    def fail(self, request_id: bytes) -> None:
        """Answer 500, or close the connection if an answer has begun."""
        if self._head or not self._has_started:
            self._transport.write(b"%bx-request-id: %b\r\n%b" % (self._start_of(500), request_id, FAILED_CONTENT))
        self.keep_alive = False
        self._complete()

    # From the application

    def whole_body(self) -> bytes | None:
        """Return the body if all of it has arrived and nothing was taken; None: call `receive`."""
        if self.more_body or self._has_taken or self._expects_continue or self.disconnected:
            return None
        self._flow.resume_reading()
        return self._take_body()

    async def receive(self) -> Message:
        """Return what has arrived of the body, or wait for it; or for the end of the answer or the connection."""
        if self._expects_continue and not self._transport.is_closing():
            self._expects_continue = False
            self._transport.write(CONTINUE)
        if not (self.disconnected or self.response_complete):
            self._flow.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take_body(), "more_body": self.more_body}

    def _take_body(self) -> bytes:
        self._has_taken = True
        pieces, self._pieces, self._waiting_bytes = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def send(self, message: Message) -> None:
        """Send the start or a part of the answer, once the client reads.

        Raises:
            RuntimeError: it is not the time for this message, a header field is invalid, or the answer has another
                length than its Content-Length.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.writable()
        if self.disconnected:
            return
        expected = "http.response.body" if self._has_started else "http.response.start"
        if message["type"] != expected or self.response_complete:
            detail = f"the application sent {message['type']!r}, and the next message is {expected!r}"
            raise RuntimeError(detail)
        if self._has_started:
            self._send_body(message.get("body", b""), more_body=message.get("more_body", False))
        else:
            self._send_start(message["status"], message.get("headers", ()))

    def _send_start(self, status: int, headers: Headers) -> None:
        lines = [self._start_of(status)]
        self._bytes_left = self._add_fields(lines, headers)
        self._has_started = True
        self._expects_continue = False
        if self._is_head or status in WITHOUT_BODY:
            self._bytes_left = 0
        elif self._bytes_left is None and _CHUNKED not in lines:
            lines.append(_CHUNKED)
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def _add_fields(self, lines: list[bytes], headers: Headers) -> int | None:
        """Add the application's fields, and that the connection closes; return the Content-Length."""
        length, says_close = None, False
        for name, value in headers:
            lowered = name.lower()
            if FORBIDDEN.search(name) or FORBIDDEN.search(value):
                detail = f"the answer's header field {lowered!r} has a control character"
                raise RuntimeError(detail)
            if lowered == b"content-length":
                length = int(value)
            elif lowered == b"connection":
                says_close = _CLOSE in [token.strip() for token in value.lower().split(b",")]
            lines.append(b"%b: %b\r\n" % (lowered, value))
        if says_close:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return length

    def _send_body(self, body: bytes, *, more_body: bool) -> None:
        if self._is_head:
            body = b""
        if self._bytes_left is None:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = chunk if more_body else chunk + b"0\r\n\r\n"
        else:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (self._bytes_left and not more_body):
                detail = f"the answer's body differs from its Content-Length by {-self._bytes_left} bytes"
                raise RuntimeError(detail)
        head, self._head = self._head, b""
        self._transport.write(head + body if head else body)
        if not more_body:
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self._changed.set()
        if not self.keep_alive:
            self._flow.close()
        self._answered()


async def service_unavailable(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer 503: there are as many connections or requests as there may be."""
    body = b"Service Unavailable"
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
