"""POST requests over HTTP/1.1 connections that are kept open, for asyncio: what the producer needs, and no more.

A request has a body of known length, is sent once, and follows no redirect. Its body is written in pieces, with a wait
for the socket after each, so that the event loop is never busy with megabytes and the socket copies none.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from http import HTTPStatus
from typing import Final
from urllib.parse import SplitResult, unquote

from aiohappyeyeballs import start_connection

from kpl_core.options.kinesis_limits import KIB
from kpl_core.transport.http_answers import (
    FIRST_FINAL_STATUS,
    HttpAnswer,
    allowed_size,
    check_trailers,
    chunk_size,
    parsed_head,
)

PIECE_BYTES: Final = 256 * KIB
# An idle connection is not used after this time, because the server may be about to close it.
IDLE_SECONDS: Final = 12.0
_NEXT_ADDRESS_SECONDS: Final = 0.25  # RFC 8305
_MAX_HEAD_BYTES: Final = 64 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_log: Final = logging.getLogger("kpl_core")


class _Reader(asyncio.StreamReader):
    """Notes what makes its connection unusable for the next request.

    Data that arrives between exchanges answers no request, for example if a server sends an answer twice. Before the
    first exchange it is an answer: a server that is busy may refuse a connection before it has read a request.
    """

    in_exchange = True
    is_spent = False

    def feed_data(self, data: bytes) -> None:  # type: ignore[override] # a transport feeds bytes
        if self.in_exchange:
            super().feed_data(data)
        else:
            self.is_spent = True

    def feed_eof(self) -> None:
        self.is_spent = True
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        # A server that refuses a large body answers and resets the connection. Its answer is still to be read.
        if self.has_data():
            self.feed_eof()
        else:
            super().set_exception(exc)

    def time_out(self) -> None:
        """End the exchange. It costs a fifth of `asyncio.timeout`, and every wait of an exchange is one to read."""
        self.is_spent = True
        super().set_exception(TimeoutError())

    def has_data(self) -> bool:
        """Return True if there is unread data."""
        return bool(self._buffer)  # type: ignore[attr-defined] # typeshed does not name it


class _Connection:
    """An open connection, with one exchange at a time."""

    def __init__(self, sock: socket.socket, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self.sock = sock
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    def is_usable(self, now: float) -> bool:
        """Return True if the next request can use it."""
        if self.reader.is_spent or self.writer.is_closing() or now >= self.idle_since + IDLE_SECONDS:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # the end, or data that the loop has not read yet

    def abort(self) -> None:
        """Close it without a wait for the server."""
        self.writer.transport.abort()

    async def exchange(self, head: bytes, body: bytes) -> tuple[HttpAnswer, bool]:
        """Return the answer, and whether the connection may be used again.

        A server may answer before it has read the whole body. The rest of the body is then not sent.
        """
        self.reader.in_exchange = True
        view = memoryview(body)
        self.writer.write(b"".join((head, view[:PIECE_BYTES])))
        writing = asyncio.create_task(self._write_rest(view)) if len(body) > PIECE_BYTES else None
        is_sent = False
        try:
            answer, keeps = await self._answer()
            is_sent = (writing is None or writing.done()) and not self.writer.transport.get_write_buffer_size()
        except asyncio.IncompleteReadError as error:
            message = "the server closed the connection before its answer was complete"
            raise ConnectionError(message) from error
        except asyncio.LimitOverrunError as error:
            message = f"the answer's head has more than {_MAX_HEAD_BYTES} bytes"
            raise ValueError(message) from error
        finally:
            self.reader.in_exchange = False
            if writing is not None:
                writing.cancel()
                await asyncio.wait([writing])
        return answer, keeps and is_sent and not self.reader.has_data()

    async def _write_rest(self, view: memoryview) -> None:
        with contextlib.suppress(OSError):  # the reader reports it
            for start in range(PIECE_BYTES, len(view), PIECE_BYTES):
                await self.writer.drain()
                self.writer.write(view[start : start + PIECE_BYTES])

    async def _answer(self) -> tuple[HttpAnswer, bool]:
        reader = self.reader
        while (head := parsed_head(await reader.readuntil(b"\r\n\r\n"))).status < FIRST_FINAL_STATUS:
            pass  # interim answers, such as 100, precede the final one
        if head.length is not None:
            body = await reader.readexactly(head.length)
        else:
            body = await (self._chunks() if head.chunked else self._rest())
        return HttpAnswer(head.status, head.headers, body), head.keeps

    async def _chunks(self) -> bytes:
        body = bytearray()
        while size := chunk_size(await self.reader.readuntil(b"\r\n")):
            allowed_size(len(body) + size)
            body += await self.reader.readexactly(size)
            if await self.reader.readexactly(2) != b"\r\n":
                message = f"a chunk of the answer has more than its {size} bytes"
                raise ValueError(message)
        trailers = bytearray()
        while not trailers.endswith(b"\r\n\r\n") and trailers != b"\r\n":
            trailers += await self.reader.readuntil(b"\r\n")
            if len(trailers) > _MAX_HEAD_BYTES:
                message = f"the answer's trailers have more than {_MAX_HEAD_BYTES} bytes"
                raise ValueError(message)
        check_trailers(bytes(trailers))
        return bytes(body)

    async def _rest(self) -> bytes:
        body = bytearray()
        while piece := await self.reader.read(_MAX_HEAD_BYTES):
            body += piece
            allowed_size(len(body))
        return bytes(body)


class _Steps:
    """Logs the steps of a connection or a request at the level DEBUG: no head, no body, no password."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: str) -> None:
        self.loop = loop
        self._target = target
        self._at = loop.time()

    def note(self, step: str, *values: object) -> None:
        """Log a step and the milliseconds since the step before."""
        if _log.isEnabledFor(logging.DEBUG):
            now = self.loop.time()
            _log.debug(f"%s: {step} in %.1f ms", self._target, *values, (now - self._at) * 1_000.0)
            self._at = now


class HttpConnections:
    """At most `max_connections` at a time.

    Each is made within `connect_seconds`, with TLS for https, and through a tunnel of the URL's `proxy`, if there is
    one. An exchange takes at most `exchange_seconds`.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        connect_seconds: float,
        exchange_seconds: float,
        tls: ssl.SSLContext | None,
        proxy: Callable[[SplitResult], SplitResult | None] = lambda _: None,
    ) -> None:
        self._places = asyncio.Semaphore(max_connections)
        self._connect_seconds = connect_seconds
        self._exchange_seconds = exchange_seconds
        self._tls = tls
        self._proxy = proxy
        # By scheme and host. The one that was used last is at the end, and is the next one to be used.
        self._idle: dict[tuple[str, str], list[_Connection]] = {}
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def post(self, url: SplitResult, head: bytes, body: bytes) -> HttpAnswer:
        """Send a request, whose `head` is complete, and return its answer.

        Raises:
            OSError: there is no connection, it broke, or (TimeoutError) there was no answer in time.
            ValueError: the answer is not one of HTTP/1.1.
        """
        loop = asyncio.get_running_loop()
        async with self._places:
            idle = self._idle.setdefault((url.scheme, url.netloc), [])
            connection, is_reusable = _take_usable(idle, loop.time()) or await self._connect(url), False
            steps = _Steps(loop, _authority(*_host_and_port(url)))
            timer = loop.call_later(self._exchange_seconds, connection.reader.time_out)
            try:
                answer, is_reusable = await connection.exchange(head, body)
                steps.note("POST of %d bytes, answer %d of %d bytes", len(body), answer.status, len(answer.body))
            except Exception as error:
                steps.note("POST of %d bytes failed with %r", len(body), error)
                raise
            finally:
                timer.cancel()
                if is_reusable and not self._is_closed:
                    connection.idle_since = loop.time()
                    idle.append(connection)
                    if self._idle_timer is None:
                        self._idle_timer = loop.call_later(IDLE_SECONDS, self._abort_idle, loop)
                else:
                    connection.abort()
        return answer

    def _abort_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the unusable connections, and call this again when the oldest of the others is to be closed."""
        now = loop.time()
        for idle in self._idle.values():
            for connection in [each for each in idle if not each.is_usable(now)]:
                idle.remove(connection)
                connection.abort()
        since = [idle[0].idle_since for idle in self._idle.values() if idle]
        self._idle_timer = loop.call_at(min(since) + IDLE_SECONDS, self._abort_idle, loop) if since else None

    async def _connect(self, url: SplitResult) -> _Connection:
        loop = asyncio.get_running_loop()
        is_tls = url.scheme == "https"
        proxy = self._proxy(url)
        host, port = _host_and_port(url)
        way = _authority(host, port)
        steps = _Steps(loop, way)
        if proxy is not None:
            way += f" through the proxy {_authority(*_host_and_port(proxy))}"
        reader = _Reader(limit=_MAX_HEAD_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(self._connect_seconds):
                if proxy is None:
                    sock = await self._socket(steps, host, port)
                else:
                    sock = await self._through(steps, proxy, host, port)
                transport, _ = await loop.create_connection(
                    lambda: protocol,
                    sock=sock,
                    ssl=self._tls if is_tls else None,
                    server_hostname=host if is_tls else None,
                )
                if is_tls:
                    steps.note("%s", transport.get_extra_info("ssl_object").version())
        except TimeoutError as error:
            message = f"no connection to {way} within {self._connect_seconds:g} s"
            raise TimeoutError(message) from error
        except (ConnectionError, ssl.SSLError) as error:
            if not str(error):
                # asyncio says no more if the other end closes the connection during the TLS handshake.
                message = f"{way} closed the connection during the TLS handshake"
            elif proxy is not None and error.errno is not None:
                # The words of the system and of OpenSSL, such as for a reset or for a certificate that the proxy has
                # made, name neither of them.
                message = f"no connection to {way}: {error}"
            else:
                raise
            raise ConnectionError(message) from error
        return _Connection(sock, reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def _socket(self, steps: "_Steps", host: str, port: int) -> socket.socket:
        addresses = await steps.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not addresses:
            message = f"the name {host!r} has no address"
            raise OSError(message)
        steps.note("name resolved, addresses: %d", len(addresses))
        # Every address is tried before the timeout, even if none of those before it answers.
        delay = min(_NEXT_ADDRESS_SECONDS, self._connect_seconds / len(addresses))
        sock = await start_connection(addresses, happy_eyeballs_delay=delay)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        steps.note("connected to %s", sock.getpeername()[0])
        return sock

    async def _through(self, steps: "_Steps", proxy: SplitResult, host: str, port: int) -> socket.socket:
        """Return a socket that a proxy has connected to a host; raises as `_tunnel`."""
        try:
            sock = await self._socket(steps, *_host_and_port(proxy))
        except OSError as error:
            message = f"the proxy {_authority(*_host_and_port(proxy))} cannot be reached: {error}"
            raise ConnectionError(message) from error
        await _tunnel(steps.loop, sock, proxy, (host, port))
        steps.note("a tunnel of the proxy")
        return sock

    async def close(self) -> None:
        """Close the idle connections now, and the others after their exchange."""
        self._is_closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for connections in self._idle.values():
            while connections:
                connections.pop().abort()
        await asyncio.sleep(0)  # the loop closes their sockets


def _host_and_port(url: SplitResult) -> tuple[str, int]:
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


async def _tunnel(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, proxy: SplitResult, target: tuple[str, int]
) -> None:
    """Let an HTTP proxy connect a socket to the target (RFC 9110, section 9.3.6).

    Raises:
        OSError: it refuses, closes the connection, or does not speak HTTP/1.1. The message names the proxy without its
            password.
    """
    name, authority = _authority(*_host_and_port(proxy)), _authority(*target)
    head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n"
    secret = b""
    if proxy.username is not None:
        secret = b64encode(f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode())
        head += f"Proxy-Authorization: Basic {secret.decode()}\r\n"
    try:
        await loop.sock_sendall(sock, f"{head}\r\n".encode())
        answer = b""
        while _END_OF_HEAD not in answer:
            piece = await loop.sock_recv(sock, _MAX_HEAD_BYTES)
            answer += piece
            if not piece or len(answer) > _MAX_HEAD_BYTES:
                break
        # An error quotes the answer, which may repeat the request.
        _require_tunnel(answer.replace(secret, b"***") if secret else answer, name, authority)
    except BaseException:
        sock.close()
        raise


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _require_tunnel(answer: bytes, proxy: str, target: str) -> None:
    head, is_complete, rest = answer.partition(_END_OF_HEAD)
    if not is_complete:
        message = f"the proxy {proxy} closed the connection, or sent too much, instead of an answer to CONNECT"
        raise ConnectionError(message)
    try:
        status = parsed_head(head + _END_OF_HEAD).status
    except ValueError as error:
        message = f"the proxy {proxy} gave no answer to CONNECT: {error}"
        raise ConnectionError(message) from error
    if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        is_unknown = status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED
        advice = "check user and password in HTTPS_PROXY" if is_unknown else "let it connect there, or set NO_PROXY"
        message = f"the proxy {proxy} refuses to connect to {target} with status {status}; {advice}"
        raise ConnectionError(message)
    if rest:
        # The target says nothing before the client does.
        message = f"the proxy {proxy} sent {len(rest)} bytes after its answer to CONNECT"
        raise ConnectionError(message)


def _take_usable(idle: list[_Connection], now: float) -> _Connection | None:
    while idle:
        connection = idle.pop()
        if connection.is_usable(now):
            return connection
        connection.abort()
    return None
