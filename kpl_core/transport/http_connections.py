"""POST requests over HTTP/1.1 connections that are kept open, for asyncio: what the producer needs, and no more.

A request has a body of known length, is sent once, and follows no redirect. Its body is written in pieces, with a wait
for the socket after each, so that the event loop is never busy with megabytes and the socket copies none.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import SplitResult

PIECE_BYTES: Final = 256 * 1024
# An idle connection is not used after this time, because the server may be about to close it.
IDLE_SECONDS: Final = 12.0
_MAX_HEAD_BYTES: Final = 64 * 1024
_FIRST_FINAL_STATUS: Final = 200


class HttpAnswer(NamedTuple):
    """An answer. The names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Reader(asyncio.StreamReader):
    """Notes that the server has closed its side, even while there is unread data."""

    has_ended = False

    def feed_eof(self) -> None:
        self.has_ended = True
        super().feed_eof()


class _Connection:
    """An open connection, with one exchange at a time."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    def is_usable(self, now: float) -> bool:
        """Return True if the next request can use it."""
        return not (self.reader.has_ended or self.writer.is_closing() or now > self.idle_since + IDLE_SECONDS)

    def abort(self) -> None:
        """Close it without a wait for the server."""
        self.writer.transport.abort()

    async def exchange(self, head: bytes, body: bytes) -> tuple[HttpAnswer, bool]:
        """Return the answer, and whether the connection may be used again."""
        is_sent = False
        # A server may answer before it has read the whole body, and then close.
        with contextlib.suppress(ConnectionError):
            view = memoryview(body)
            self.writer.write(b"".join((head, view[:PIECE_BYTES])))
            for start in range(PIECE_BYTES, len(body), PIECE_BYTES):
                await self.writer.drain()
                self.writer.write(view[start : start + PIECE_BYTES])
            await self.writer.drain()
            is_sent = True
        try:
            answer, keeps = await self._answer()
        except asyncio.IncompleteReadError as error:
            message = "the server closed the connection before its answer was complete"
            raise ConnectionError(message) from error
        except asyncio.LimitOverrunError as error:
            message = f"the answer's head has more than {_MAX_HEAD_BYTES} bytes"
            raise ValueError(message) from error
        return answer, keeps and is_sent

    async def _answer(self) -> tuple[HttpAnswer, bool]:
        while True:
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            version, code, *_ = *first.split(" ", 2), ""
            if not version.startswith("HTTP/1."):
                message = f"the answer begins with {first[:100]!r}, and not with HTTP/1.1 and a status"
                raise ValueError(message)
            status = int(code)
            if status >= _FIRST_FINAL_STATUS:  # interim answers, such as 100, precede the final one
                break
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
        }
        keeps = version == "HTTP/1.1" and "close" not in headers.get("connection", "").lower()
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body = await self._chunks()
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body, keeps = await self.reader.read(), False
        return HttpAnswer(status, headers, body), keeps

    async def _chunks(self) -> bytes:
        chunks = []
        while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            chunks.append((await self.reader.readexactly(size + 2))[:-2])
        while await self.reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        return b"".join(chunks)


class HttpConnections:
    """At most `max_connections` at a time. Each is made within `connect_seconds`, with TLS for https."""

    def __init__(self, *, max_connections: int, connect_seconds: float, tls: ssl.SSLContext | None) -> None:
        self._places = asyncio.Semaphore(max_connections)
        self._connect_seconds = connect_seconds
        self._tls = tls
        # By scheme and host; the one that was used last is the next one to be used.
        self._idle: dict[tuple[str, str], list[_Connection]] = {}

    async def post(self, url: SplitResult, head: bytes, body: bytes) -> HttpAnswer:
        """Send a request, whose `head` is complete, and return its answer.

        Raises:
            OSError: there is no connection, or it broke.
            ValueError: the answer is not one of HTTP/1.1.
        """
        clock = asyncio.get_running_loop().time
        async with self._places:
            idle = self._idle.setdefault((url.scheme, url.netloc), [])
            for connection in [each for each in idle if not each.is_usable(clock())]:
                idle.remove(connection)
                connection.abort()
            connection, is_reusable = idle.pop() if idle else await self._connect(url), False
            try:
                answer, is_reusable = await connection.exchange(head, body)
            finally:
                if is_reusable:
                    connection.idle_since = clock()
                    idle.append(connection)
                else:
                    connection.abort()
        return answer

    async def _connect(self, url: SplitResult) -> _Connection:
        loop = asyncio.get_running_loop()
        is_tls = url.scheme == "https"
        port = url.port or (443 if is_tls else 80)
        reader = _Reader(limit=_MAX_HEAD_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(self._connect_seconds):
                transport, _ = await loop.create_connection(
                    lambda: protocol,
                    url.hostname or "",
                    port,
                    ssl=self._tls if is_tls else None,
                )
        except TimeoutError as error:
            message = f"no connection to {url.hostname}:{port} within {self._connect_seconds:g} s"
            raise TimeoutError(message) from error
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return _Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def close(self) -> None:
        """Close the idle connections."""
        for connections in self._idle.values():
            while connections:
                connections.pop().abort()
        await asyncio.sleep(0)  # the loop closes their sockets
