"""uvicorn's HTTP protocol with bounds on the time and size of a request's head.

uvicorn has no such bounds. A client that sends its header fields one byte at a time would keep its connection
without a limit, and a client that never stops sending them would fill the memory. Both are checked only if a head
does not arrive in one small piece, so a usual request costs nothing. (`bodies.py` bounds the body.)

Heads that HTTP forbids or that the gateway does not support are refused (`request_head.py:refused_head`).

When connections run out, the oldest one that has not shown valid credentials and whose request is not complete is
closed for a new one. So clients with credentials get in, and keep the connections that they have. A gateway that
verifies no credentials closes none.

While tenants take turns (`read_turns.py`), the CPU time of a request's task is charged to its tenant (`TimedRequest`).

Trailer fields of a chunked body are bounded too and then ignored: they must not replace fields of the head
(RFC 9110, section 6.5.1). No connection is upgraded: a request for an upgrade is answered as if it had not asked.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES, CombinedFlow, ConnectionReader, ReadTurns
from kpl_integrations.ingest.http.request_head import VERIFIED, refused_head
from kpl_integrations.ingest.tenants import Tenant

_log: Final = logging.getLogger(__name__)
# At most this share of the connections is reserved, and at most so many.
_RESERVED_SHARE: Final = 10
_MOST_RESERVED: Final = 100
_MOST_LOOKED_AT: Final = 64
# The ends of a request line: the parser accepts RTSP too. The lines of an access log in a body have a quotation mark
# before the line break.
_LINE_ENDS: Final = (b"/1.1\r\n", b"/1.0\r\n")


def reserved_connections(limit: int) -> int:
    """Return how many of `limit` connections are reserved for clients with valid credentials."""
    return min(_MOST_RESERVED, max(1, limit // _RESERVED_SHARE))


def _refusal(status: HTTPStatus) -> bytes:
    fields = "content-type: text/plain\r\ncontent-length: 0\r\nconnection: close"
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{fields}\r\n\r\n".encode()


# The first bytes of a client that speaks HTTP/2 without asking (RFC 9113, section 3.4). It understands only frames:
# empty SETTINGS, then GOAWAY (section 6.8) with HTTP_1_1_REQUIRED and a text for its log.
_HTTP_2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"
_HTTP_1_1_REQUIRED: Final = 0xD
_USE_HTTP_1: Final = (
    b"this gateway speaks HTTP/1.1; configure the client for it (AWS SDK for JavaScript: NodeHttpHandler)"
)


def _frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload


_NO_HTTP_2: Final = _frame(4, b"") + _frame(7, bytes(4) + _HTTP_1_1_REQUIRED.to_bytes(4, "big") + _USE_HTTP_1)
# How long a connection without a request stays open once the server stops.
_FIRST_REQUEST_SECONDS: Final = 0.5
_TOO_LARGE: Final = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
_TOO_SLOW: Final = _refusal(HTTPStatus.REQUEST_TIMEOUT)
_BUSY: Final = _refusal(HTTPStatus.SERVICE_UNAVAILABLE)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A subclass sets how long and how large a head may be."""

    header_seconds: ClassVar[float] = 10.0
    max_header_bytes: ClassVar[int] = 32_768
    # Whether connections are reserved for clients with valid credentials.
    reserves: ClassVar[bool] = True
    # The open connections without valid credentials, the oldest first; each server has its own.
    unverified: ClassVar[dict["BoundedProtocol", None]] = {}
    turns: ClassVar[ReadTurns] = ReadTurns()
    flow: CombinedFlow

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        # Counts the server's answers. The turns keep it for longer than this connection lasts.
        self._answered: Callable[[], int] = partial(getattr, self.server_state, "total_requests")
        self._in_head = self._is_new = True
        self._head_bytes = 0
        # The same, but with all of the piece in which it began, and the size of the current piece. A socket delivers
        # up to 256 KiB at once.
        self._most_head_bytes = self._piece_bytes = 0
        # Whether the current piece contains the end of a request. Then the size of the next head's part in it is
        # unknown and not counted.
        self._ends_within = False
        # Whether it contains the start of a request.
        self._begins_within = False
        # Whether it contains a part of a body.
        self._body_within = False
        # Whether the request asks for an upgrade, and the position in its piece at which the parser then stopped.
        self._asks_upgrade = False
        self._stopped_at: int | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        # While reading is paused: the seconds that were left to the timers of a head and of an idle connection.
        self._seconds_left: tuple[float | None, float | None] = (None, None)

    @classmethod
    def with_bounds(
        cls, *, header_seconds: float, max_header_bytes: int, reserves: bool = True, turns: ReadTurns | None = None
    ) -> "type[BoundedProtocol]":
        """Return a subclass with these bounds, because uvicorn creates the protocol itself."""
        bounds = {
            "turns": turns or ReadTurns(),
            "header_seconds": header_seconds,
            "max_header_bytes": max_header_bytes,
            "reserves": reserves,
            "unverified": {},
        }
        return type(cls.__name__, (cls,), bounds)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Start the timer of the first head."""
        super().connection_made(transport)
        self.flow = CombinedFlow(transport)
        self.reader = ConnectionReader(self, self.turns, self.client[0] if self.client else "")
        limit = self.limit_concurrency if self.reserves else None
        self.unverified[self] = None
        if limit is not None and len(self.connections) > limit - reserved_connections(limit):
            self._evict()
        self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and break reference cycles: requests that will never begin would be collected late."""
        self.verified()
        self._stop_waiting()
        self.reader.close()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self.cycle = self.scope = None  # type: ignore[assignment] # as in a new connection

    def shutdown(self) -> None:
        """Close the connection, or let it end with its answer. One whose first request is to come has a moment for it.

        The client may have sent that request already.
        """
        if (self._is_new or not self.is_between_requests()) and not self.is_answering():
            self.loop.call_later(_FIRST_REQUEST_SECONDS, super().shutdown)
        else:
            super().shutdown()

    def verified(self) -> None:
        """Keep this connection: it has shown valid credentials."""
        self.unverified.pop(self, None)

    def _evict(self) -> None:
        """Close the oldest of the other connections without credentials: an idle one, else one that sends a body."""
        others = [each for each in islice(self.unverified, _MOST_LOOKED_AT) if each is not self]
        idle = (each for each in others if not each.is_answering())
        evicted = next(idle, None) or next((each for each in others if each.cycle.more_body), None)
        if evicted is not None:
            evicted.verified()
            evicted.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, at once or when it is the turn of this connection."""
        if self.turns.is_attentive or len(data) > SLICE_BYTES:
            self.turns.wake(self._answered)
            self.reader.receive(data)
        else:
            self.feed(data)

    def may_be_cut(self, data: bytes) -> bool:
        """Return True if these may be many bytes of pipelined requests."""
        return len(data) > SLICE_BYTES and sum(map(data.count, _LINE_ENDS)) > 1

    def feed(self, data: bytes) -> None:
        """Feed the parser, then check the bounds of an unfinished head."""
        self._ends_within = self._begins_within = self._body_within = False
        self._piece_bytes = len(data)
        if self._is_new and self._refuses_http_2(data):
            return
        idle = self.timeout_keep_alive_task
        super().data_received(data)
        while self._stopped_at is not None:
            data = self._without_upgrade(data[self._stopped_at :])
            super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_head:
            # Neither head nor body: trailer fields, or bytes between chunks.
            is_beside = not (self._body_within or self._begins_within or self._ends_within)
            self._head_bytes = self._head_bytes + len(data) if is_beside else 0
            if self._head_bytes > self.max_header_bytes:
                self._refuse(_TOO_LARGE)
                return
            if idle is not None and not self._begins_within:
                self._stay_idle(idle.when())
            return
        self._most_head_bytes += len(data)
        if not self._ends_within:
            self._head_bytes += len(data)
        if self._head_bytes > self.max_header_bytes:
            self._refuse(_TOO_LARGE)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)

    def _refuses_http_2(self, data: bytes) -> bool:
        """Refuse a new connection whose first bytes are those of HTTP/2."""
        self._is_new = False
        if not data.startswith(_HTTP_2_PREFACE):
            return False
        _log.warning("a client speaks HTTP/2, which this gateway does not: client=%s", self.client)
        self._refuse(_NO_HTTP_2)
        return True

    def on_message_begin(self) -> None:
        """Start a head."""
        self._begin_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a field of a head, and ignore trailer fields."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head."""
        if self._refuses_head():
            return
        self._end_head()
        self._require_head()
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._asks_upgrade = True
        else:
            claim: Any = self.reader.claim
            application = self.app
            if self.turns.is_active:
                self.app = timed = TimedRequest(self.reader, application)
                claim = timed.claim
            self.scope["extensions"] = {
                VERIFIED: {"mark": self.verified, "claim": claim, "watch_body": self.reader.watch_body}
            }
            super().on_headers_complete()
            self.app = application

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        self._body_within = True
        if self.transport.is_closing():
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless it asks for an upgrade: then it has not started."""
        self._ends_within = True
        if not (self._asks_upgrade or self.transport.is_closing()):
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Remember where the parser stopped. uvicorn calls this while it handles HttpParserUpgrade."""
        stopped = sys.exc_info()[1]
        if self._asks_upgrade and stopped is not None:
            self._stopped_at = stopped.args[0]

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return the bytes of the same request without its upgrade field, for a new parser.

        The parser treats such a request as one without a body, and its body as data that is not HTTP. A server may
        ignore the request for an upgrade (RFC 9110, section 7.8). Java's HTTP client sends one with its first request.
        """
        version = self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))
        self._asks_upgrade, self._stopped_at = False, None
        self.parser = type(self.parser)(self)
        return head + rest

    def _stay_idle(self, until: float) -> None:
        """Restart the keep-alive timer: the received bytes belong to no request that is still to be answered.

        They are the rest of an unread body, or empty lines. uvicorn stops its timer for all bytes and starts it again
        only with the next answer.
        """
        if self.timeout_keep_alive_task is None and not self.is_answering():
            self.timeout_keep_alive_task = self.loop.call_at(until, self.timeout_keep_alive_handler)

    def is_answering(self) -> bool:
        """Return True if an answer is pending. A client would take bytes written before it for the answer."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def is_between_requests(self) -> bool:
        """Return True if no request is being received or answered."""
        return not (self._in_head and self._most_head_bytes) and not self.is_answering()

    def stop_timers(self) -> None:
        """Stop the timers of a head and of an idle connection, and keep the time that is left to them."""
        now = self.loop.time()
        timers = self._head_timer, self.timeout_keep_alive_task
        left = [None if each is None else max(0.0, each.when() - now) for each in timers]
        self._seconds_left = left[0], left[1]
        self._stop_waiting()
        self._unset_keepalive_if_required()

    def restart_timers(self) -> None:
        """Continue these timers."""
        head, idle = self._seconds_left
        if head is not None:
            self._head_timer = self.loop.call_later(head, self._too_slow)
        if idle is not None:
            self.timeout_keep_alive_task = self.loop.call_later(idle, self.timeout_keep_alive_handler)

    def refuse_busy(self) -> None:
        """Answer 503 and close the connection."""
        self._refuse(_BUSY)

    def _begin_head(self) -> None:
        self._in_head = self._begins_within = True
        self._head_bytes = self._most_head_bytes = 0

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._stop_waiting()

    def _refuses_head(self) -> bool:
        """Refuse a complete head that is too large. It is measured only if its pieces are large enough."""
        if self._most_head_bytes + self._piece_bytes <= self.max_header_bytes:
            return False
        # Each field ends with ": " and a line break.
        if len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers]) <= self.max_header_bytes:
            return False
        self._refuse(_TOO_LARGE)
        return True

    def _stop_waiting(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _require_head(self) -> None:
        """Refuse a head, and stop the parser by an exception."""
        status = refused_head(self.parser.get_http_version(), self.headers)
        if status is not None:
            self._refuse(_refusal(HTTPStatus(status)))
            raise ValueError(status)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, unless it is refused already."""
        if self.is_answering() or self.transport.is_closing():
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self._in_head or self.transport.is_closing():
            return
        if self.is_answering():
            self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)
        else:
            self._refuse(_TOO_SLOW)

    def _refuse(self, answer: bytes) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if not self.is_answering():
            self.transport.write(answer)
        self.transport.close()


class TimedRequest:
    """An ASGI application for one request. It charges the CPU time of the request's task to its tenant."""

    def __init__(self, reader: ConnectionReader, application: Any) -> None:  # noqa: ANN401 - an ASGI application
        self._reader = reader
        self._application = application
        self._is_refused = reader.is_refusing
        self._flow, self._weight = reader.flow, reader.weight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        await _TimedSteps(self._application(scope, receive, send), self._charge)

    def claim(self, tenant: Tenant | None) -> bool:
        """Note the tenant. Return False if the request is to be refused."""
        self._reader.claim(tenant)
        self._flow, self._weight = self._reader.flow, self._reader.weight
        return not (self._is_refused or self._reader.refuses())

    def _charge(self, started: float) -> None:
        turns = self._reader.turns
        turns.charge(self._flow, self._weight, time.thread_time() - started)


class _TimedSteps:
    """A coroutine whose steps, from one wait to the next, are timed."""

    __slots__ = ("_charge", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, None], charge: Callable[[float], None]) -> None:
        self._coroutine = coroutine
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            started = time.thread_time()
            try:
                waits_for = step(value)
            except StopIteration:
                return
            finally:
                self._charge(started)
            try:
                value = yield waits_for
                step = self._coroutine.send
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - every exception belongs to the coroutine
                value, step = error, self._coroutine.throw
