"""One request on an HTTP/2 connection, as the application sees it: its body as it arrives, and the answer."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Final, Protocol

from kpl_integrations.asgi.protocol import Message
from kpl_integrations.ingest.http.correlation import REQUEST_ID_HEADER
from kpl_integrations.ingest.http.request_cycle import FORBIDDEN, WITHOUT_BODY

# Fields of HTTP/1.1 that HTTP/2 does not have (RFC 9113, section 8.2.2).
_OF_CONNECTIONS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_FAILED: Final = b"Internal Server Error"
_FAILED_FIELDS: Final = ((b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(_FAILED)))

Headers = Iterable[tuple[bytes, bytes]]


class StreamPort(Protocol):
    """What a stream uses of its connection."""

    def send_head(self, stream_id: int, status: int, headers: list[tuple[bytes, bytes]], *, end: bool) -> None:
        """Send the head of an answer. `end`: nothing follows."""

    def send_data(self, stream_id: int, data: bytes, *, end: bool) -> Awaitable[None] | None:
        """Send a part of the answer as the client takes it. `end`: nothing follows, and None is returned."""

    def send_continue(self, stream_id: int) -> None:
        """Ask for the body."""

    def received(self, stream_id: int, size_bytes: int) -> None:
        """Let the client send as many bytes again."""

    def give_up(self, stream_id: int) -> None:
        """Abort an answer that has begun."""


class Http2Stream:
    """A request from its head to the end of its answer. The answer to HEAD has no body."""

    def __init__(self, port: StreamPort, stream_id: int, *, is_head: bool, expects_continue: bool) -> None:
        self._port = port
        self._id = stream_id
        self._is_head = is_head
        self._expects_continue = expects_continue
        self.disconnected = self.response_complete = False
        # The pieces of the body that the application has not taken, and the bytes that they have used of the windows.
        self._pieces: list[bytes] = []
        self._window_bytes = 0
        self._has_taken = False
        self.more_body = True
        self._changed = asyncio.Event()
        # The head of the answer until the first part of its body; None: there is none, or it is sent.
        self._head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._has_started = False
        # How many bytes of the answer's body are to come, if a Content-Length says so.
        self._bytes_left: int | None = None

    # From the connection

    def add_body(self, piece: bytes, window_bytes: int) -> None:
        """Add a piece of the body, which has used so many bytes of the windows."""
        self._window_bytes += window_bytes
        if self.response_complete:
            self._release_window()
        else:
            self._pieces.append(piece)
            self._changed.set()

    def end_body(self) -> None:
        """Note that the body is complete."""
        self.more_body = False
        self._changed.set()

    def client_gone(self) -> None:
        """Note that the client has reset the request, or that its connection is lost."""
        if not self.response_complete:
            self.disconnected = True
            self._pieces.clear()
            self._release_window()
        self._changed.set()

    def fail(self, request_id: bytes) -> None:
        """Answer 500, or abort an answer that has begun."""
        if self._head is None and self._has_started:
            self._port.give_up(self._id)
            return
        self._complete()
        self._port.send_head(self._id, 500, [*_FAILED_FIELDS, (REQUEST_ID_HEADER, request_id)], end=self._is_head)
        if not self._is_head:
            self._port.send_data(self._id, _FAILED, end=True)

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
            self._port.send_continue(self._id)
        if not (self.disconnected or self.response_complete):
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take_body(), "more_body": self.more_body}

    def _take_body(self) -> bytes:
        self._has_taken = True
        pieces, self._pieces = self._pieces, []
        self._release_window()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _release_window(self) -> None:
        size, self._window_bytes = self._window_bytes, 0
        if size:
            self._port.received(self._id, size)

    async def send(self, message: Message) -> None:
        """Send the start or a part of the answer. Returns when the client has taken the part, unless it is the last.

        Raises:
            RuntimeError: it is not the time for this message, a header field is invalid, or the answer has another
            length than its Content-Length.
        """
        if self.disconnected:
            return
        expected = "http.response.body" if self._has_started else "http.response.start"
        if self.response_complete and message["type"] == expected and not message.get("body"):
            # The connection has ended an answer of known length by itself.
            return
        if message["type"] != expected or self.response_complete:
            detail = f"the application sent {message['type']!r}, and the next message is {expected!r}"
            raise RuntimeError(detail)
        if self._has_started:
            await self._send_body(message.get("body", b""), more_body=message.get("more_body", False))
        else:
            self._start(message["status"], message.get("headers", ()))

    def _start(self, status: int, headers: Headers) -> None:
        fields = [(name.lower(), value) for name, value in headers]
        for name, value in fields:
            if FORBIDDEN.search(name) or FORBIDDEN.search(value):
                detail = f"the answer's header field {name!r} has a control character"
                raise RuntimeError(detail)
        length = dict(fields).get(b"content-length")
        self._bytes_left = None if length is None else int(length)
        if self._is_head or status in WITHOUT_BODY:
            self._bytes_left = 0
        self._head = status, [field for field in fields if field[0] not in _OF_CONNECTIONS]
        self._has_started = True

    async def _send_body(self, body: bytes, *, more_body: bool) -> None:
        if self._is_head:
            body = b""
        if self._bytes_left is not None:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (self._bytes_left and not more_body):
                detail = f"the answer's body differs from its Content-Length by {-self._bytes_left} bytes"
                raise RuntimeError(detail)
            more_body = self._bytes_left > 0
        if not more_body:
            self._complete()
        has_head = self._head is not None
        if self._head is not None:
            (status, fields), self._head = self._head, None
            self._port.send_head(self._id, status, fields, end=not (body or more_body))
        if body or not (more_body or has_head):
            taken = self._port.send_data(self._id, body, end=not more_body)
            if taken is not None:
                await taken

    def _complete(self) -> None:
        """Note that all of the answer is known, and release the body."""
        self.response_complete = True
        self._pieces.clear()
        self._release_window()
        self._changed.set()
