"""One HTTP/1.1 connection: heads and bodies through httptools, requests in their order, and bounds.

The parser tells of heads and bodies as they arrive. A request starts the application (`Http1Cycle`) once its head is
complete; requests behind it wait until it is answered, and their connection is not read meanwhile.

- A head has a bound on its time and its size. Both are checked only if it does not arrive in one small piece, so a
  usual request costs nothing. (`bodies.py` bounds the body.) Heads that HTTP forbids or that the gateway does not
  support are refused (`request_head.py:refused_head`).
- An idle connection is closed. Bytes that belong to no request do not keep it open.
- When connections run out, one may have to make place for a new one (`places.py`).
- While tenants take turns (`read_turns.py`), the CPU time of a request's task is charged to its tenant.
- Trailer fields of a chunked body are bounded too and then ignored: they must not replace fields of the head (RFC 9110,
  section 6.5.1). No connection is upgraded: a request for an upgrade is answered as if it had not asked.
- A client that begins with HTTP/2, or has chosen it in the TLS handshake, gets an `Http2Connection` in place of this.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final

import httptools

from kpl_integrations.asgi.protocol import Scope
from kpl_integrations.ingest.admission.refusals import Refusal
from kpl_integrations.ingest.http.answers import (
    HTTP_2_PREFACE,
    NO_HTTP_2,
    AnswerStarts,
    EncodedAnswer,
    ServerRefusals,
    Tally,
    encoded,
)
from kpl_integrations.ingest.http.connection_flow import ConnectionFlow, ReceiveBuffers
from kpl_integrations.ingest.http.correlation import request_id_in
from kpl_integrations.ingest.http.head_size import HeadSize
from kpl_integrations.ingest.http.places import ConnectionPlaces
from kpl_integrations.ingest.http.read_turns import (
    SLICE_BYTES,
    ConnectionReader,
    PausableConnection,
    ReadTurns,
    is_probe,
)
from kpl_integrations.ingest.http.request_cycle import Http1Cycle, application_for
from kpl_integrations.ingest.http.request_head import connection_scope, head_without, refused_head, target_of
from kpl_integrations.ingest.http.uvicorn_server import ServerPort

_log: Final = logging.getLogger(__name__)
# The ends of a request line: the parser accepts RTSP too. The lines of an access log in a body have a quotation mark
# before the line break.
_LINE_ENDS: Final = (b"/1.1\r\n", b"/1.0\r\n")
# A connection is not read while the application has not taken so many bytes of a body.
_MOST_WAITING_BYTES: Final = 65_536
# How long a connection without a request stays open once the server stops.
_FIRST_REQUEST_SECONDS: Final = 0.5


class HttpConnection(asyncio.BufferedProtocol):
    """One connection. A subclass sets how long and how large a head may be."""

    header_seconds: ClassVar[float] = 10.0
    max_header_bytes: ClassVar[int] = 32_768
    # Each server has its own.
    places: ConnectionPlaces = ConnectionPlaces()
    turns: ReadTurns = ReadTurns()
    # Of one loop: two threads must not write into one buffer.
    buffers: ClassVar[ReceiveBuffers] = ReceiveBuffers()
    answer_starts: ClassVar[AnswerStarts] = AnswerStarts()
    refusals: ServerRefusals = ServerRefusals(Tally())
    # Puts a connection for HTTP/2 in place of this one; None: HTTP/2 is refused.
    become_http_2: ClassVar["Callable[[HttpConnection], PausableConnection] | None"] = None
    transport: asyncio.Transport
    flow: ConnectionFlow
    reader: ConnectionReader

    def __init__(self, **made_with: Any) -> None:  # noqa: ANN401 - what uvicorn gives; see `ServerPort`
        self.server = ServerPort(**made_with)
        self.loop = asyncio.get_running_loop()
        self.parser = self._new_parser()
        self.client: tuple[str, int] | None = None
        # The head of the request that is being received.
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.expects_continue = False
        # The request that was received last, until its connection has answered it and is idle. One may still be
        # answered while others wait behind it, the next one at the right.
        self.cycle: Any = None
        self.waiting: deque[tuple[Http1Cycle, Any, Scope]] = deque()
        self._running: Http1Cycle | None = None
        self._in_head = self._is_new = True
        # The bytes of a new connection until it is known that it does not speak HTTP/2, then the piece being parsed.
        self._first_bytes = self.received = b""
        self.head_size = HeadSize(self.max_header_bytes)
        # A small one if the last large piece had several requests.
        self._buffer = self.buffers.of(is_pipelining=False)
        # Whether the request asks for an upgrade, and whether all that follows is dropped.
        self._asks_upgrade = self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        # The instant of the last answer, and the one timer that checks it for all requests.
        self._answered_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        # While reading is paused: the seconds that were left to the timers of a head and of an idle connection.
        self._seconds_left: tuple[float | None, float | None] = (None, None)

    def _new_parser(self) -> Any:  # noqa: ANN401 - httptools has no types
        parser = httptools.HttpRequestParser(self)
        # The bytes behind a request with "connection: close" are none of its.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # From the transport and the server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as all loops call it
        """Start the timer of the first head."""
        self.server.add(self)
        self.transport = transport
        self.flow = ConnectionFlow(transport)
        self.scope_of_all = connection_scope(transport, self.server.root_path)
        self.client = self.scope_of_all["client"]
        self.reader = ConnectionReader(self, self.turns, self.client[0] if self.client else "")
        self.places.take(self, len(self.server.shared.connections), self.server.most_connections)
        tls = transport.get_extra_info("ssl_object")
        if self.become_http_2 is not None and tls is not None and tls.selected_alpn_protocol() == "h2":
            self.become_http_2()
        else:
            self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason changes nothing
        """Tell the requests, cancel the timers, and break reference cycles, which would be collected late."""
        self.server.shared.connections.discard(self)
        self.verified()
        self.places.half_closed.pop(self.transport, None)
        self.cancel_timers()
        self.reader.close()
        for each in (self._running, self.cycle):
            if each is not None:
                each.client_gone()
        self.flow.resume_writing()
        self.waiting.clear()
        self.cycle = self._running = self.parser = None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - no loop knows better
        """Return where the loop writes what it receives, right before `buffer_updated`."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle so many bytes of the buffer."""
        data = bytes(self._buffer[:nbytes])
        if nbytes > SLICE_BYTES:
            self._buffer = self.buffers.of(is_pipelining=self.may_be_cut(data))
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, at once or when it is the turn of this connection."""
        if self.turns.is_attentive or len(data) > SLICE_BYTES:
            # The turns keep it for longer than this connection lasts.
            self.turns.wake(self.server.answered)
            self.reader.receive(data)
        else:
            self.feed(data)

    def eof_received(self) -> bool:
        """Answer the requests of a client that sends no more, except over TLS. Return True if they need time."""
        is_waiting = self.is_answering() and not self.cycle.more_body
        if not is_waiting or self.transport.get_extra_info("sslcontext") is not None:
            # The client may never read what was written.
            self.flow.close()
            return False
        self.cycle.keep_alive = False
        self.places.half_closed[self.transport] = self
        return True

    def pause_writing(self) -> None:
        """Note that the client does not read, for which it has some time."""
        self.flow.pause_writing()
        self.flow.abort_unless_read()

    def resume_writing(self) -> None:
        """Note that the client reads."""
        self.flow.resume_writing()

    def shutdown(self) -> None:
        """Close the connection, or let it end with its answer. One whose first request is to come has a moment for it.

        The client may have sent that request already.
        """
        if (self._is_new or not self.is_between_requests()) and not self.is_answering():
            self.loop.call_later(_FIRST_REQUEST_SECONDS, self.end)
        else:
            self.end()

    def end(self) -> None:
        """Close the connection, once a pending answer is sent."""
        if self.is_answering():
            self.cycle.keep_alive = False
        else:
            self.flow.close()

    # Bytes

    def may_be_cut(self, data: bytes) -> bool:
        """Return True if these may be many bytes of pipelined requests, or of frames."""
        is_http_2 = self._is_new and data.startswith(HTTP_2_PREFACE)
        return len(data) > SLICE_BYTES and (is_http_2 or sum(map(data.count, _LINE_ENDS)) > 1)

    def may_be_probe(self, data: bytes) -> bool:
        """Return True if this is one request for a probe."""
        return is_probe(data) and self.is_between_requests()

    def feed(self, data: bytes) -> None:
        """Feed the parser, then check the bounds of an unfinished head."""
        if self._is_refused:
            return
        self.head_size.begin_piece(len(data))
        if self._is_new:
            self._first_bytes += data
            data = self._first_bytes
            if self._awaits_or_speaks_http_2(data):
                return
        self.received = data
        while data:
            data = self._parse(data)
        if self.transport.is_closing():
            return
        if self.head_size.end_piece(len(self.received), is_within=self._in_head):
            self._refuse(Refusal.LARGE_HEAD)
        elif self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser. Return what another one has to get, because a request for an upgrade has ended this one."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_upgrade:
                # A server may ignore this (RFC 9110, section 7.8). The parser treats such a request as one without a
                # body, and its body as data that is not HTTP. Java's HTTP client sends one at first.
                head = head_without(b"upgrade", self.parser, self.url, self.headers)
                self._asks_upgrade = False
                self.parser = self._new_parser()
                return head + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self.refuse_invalid(error)
        return b""

    def refuse_invalid(self, error: Exception) -> None:
        """Refuse what is not HTTP, unless it is refused already."""
        _log.debug("invalid HTTP of %s: %s", self.client, error)
        self._refuse(Refusal.BAD_HTTP)

    def _awaits_or_speaks_http_2(self, data: bytes) -> bool:
        """Return True if these first bytes are those of HTTP/2, or may become them."""
        if len(data) < len(HTTP_2_PREFACE) and HTTP_2_PREFACE.startswith(data):
            return True
        self._is_new, self._first_bytes = False, b""
        if not data.startswith(HTTP_2_PREFACE):
            return False
        if self.become_http_2 is None:
            _log.warning("a client speaks HTTP/2, which is off (KPL_INGEST_HTTP2); client=%s", self.client)
            self.transport.write(NO_HTTP_2)
            self.flow.close()
        else:
            self.become_http_2().feed(data)
        return True

    # From the parser

    def on_message_begin(self) -> None:
        """Start a head."""
        self._in_head = True
        self.head_size.begin()
        self.url, self.headers, self.expects_continue = b"", [], False

    def on_url(self, url: bytes) -> None:
        """Add a part of the target."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a field of a head, and ignore trailer fields."""
        if self._in_head:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expects_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """End the head, and start the request."""
        if self.ends_head():
            self.call_application()

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        self.head_size.body_within = True
        if not (self._asks_upgrade or self.transport.is_closing()):
            self.add_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless it asks for an upgrade: then it has not started."""
        self.head_size.ends_within = True
        if not (self._asks_upgrade or self.transport.is_closing()):
            self.cycle.end_body()

    def ends_head(self) -> bool:
        """End the head. Return False if its request must not start; an exception stops the parser."""
        if self.transport.is_closing():
            # The client could not receive the answer and would send the request again.
            return False
        if self.head_size.is_too_large(self.url, self.headers):
            self._refuse(Refusal.LARGE_HEAD)
            return False
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        refusal = refused_head(self.parser.get_http_version(), self.headers)
        if refusal is not None:
            self._refuse(refusal)
            raise ValueError(refusal)
        self._asks_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        return not self._asks_upgrade

    # Requests

    def call_application(self) -> None:
        """Start the request whose head is complete, or let it wait until those before it are answered.

        Raises:
            ValueError: its target is not a URL.
        """
        scope = self._scope()
        cycle = Http1Cycle(
            self,
            is_head=scope["method"] == "HEAD",
            keep_alive=self.parser.should_keep_alive(),
            expects_continue=self.expects_continue,
            version=scope["http_version"],
        )
        application = application_for(self, cycle, scope)
        if self.is_answering():
            self.flow.pause_reading()
            self.waiting.appendleft((cycle, application, scope))
        else:
            self._run(cycle, application, scope)
        self.cycle = cycle

    def add_body(self, piece: bytes) -> None:
        """Add a piece to the body of the request that is being received. Read no more if many bytes wait."""
        self.cycle.add_body(piece, len(piece))
        if self.cycle.waiting_bytes > _MOST_WAITING_BYTES:
            self.flow.pause_reading()

    def _scope(self) -> Scope:
        return {
            **self.scope_of_all,
            "state": self.server.app_state.copy(),
            **target_of(self.url, self.server.root_path),
            "http_version": self.parser.get_http_version(),
            "method": self.parser.get_method().decode("ascii"),
            "headers": self.headers,
        }

    def _run(self, cycle: Http1Cycle, application: Any, scope: Scope) -> None:  # noqa: ANN401 - an ASGI application
        self._running = cycle
        _ = self.server.start(cycle.run(application, scope, self.refusals))

    def answered(self) -> None:
        """Note an answer of the application, and start the next request."""
        self._running = None
        self.server.shared.total_requests += 1
        if not self.transport.is_closing():
            self.become_idle()
            self.begin_next()

    def begin_next(self) -> None:
        """Start the request that waits behind an answer, if one does."""
        if self.waiting:
            self._run(*self.waiting.pop())
        self.read_on()

    def read_on(self) -> None:
        """Read again, unless requests wait: each answer would let in more of them."""
        if not self.waiting:
            self.flow.resume_reading()
            self.reader.go_on()

    def takes_more(self) -> bool:
        """Return False if a request waits for the answer to another."""
        return not self.waiting

    def start_of(self, status: int) -> bytes:
        """Return the first bytes of an answer."""
        return self.answer_starts.of(status, self.server.shared.default_headers)

    def is_answering(self) -> bool:
        """Return True if an answer is pending. A client would take bytes written before it for the answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def is_sending_body(self) -> bool:
        """Return True if the client has not sent all of a request's body."""
        return self.cycle is not None and self.cycle.more_body

    def is_between_requests(self) -> bool:
        """Return True if no request is being received or answered."""
        return not (self._in_head and self.head_size.most_bytes) and not self.is_answering()

    # Bounds

    def verified(self) -> None:
        """Keep this connection: it has shown valid credentials."""
        self.places.keep(self)

    def become_idle(self) -> None:
        """Note an answer: the connection is closed if no request follows within some time."""
        self._answered_at = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.server.keep_alive_seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self.transport.is_closing() or self._in_head or self.flow.is_held or self.is_answering():
            # A request is in progress and has its own bounds. Its answer sets the timer again.
            return
        rest = self._answered_at + self.server.keep_alive_seconds - self.loop.time()
        if rest > 0.0:
            self._idle_timer = self.loop.call_later(rest, self._close_if_idle)
        else:
            self.flow.close()

    def stop_timers(self) -> None:
        """Stop the timers of a head and of an idle connection, and keep the time that is left to them."""
        now = self.loop.time()
        head = None if self._head_timer is None else max(0.0, self._head_timer.when() - now)
        idle = None if self._idle_timer is None else self._answered_at + self.server.keep_alive_seconds - now
        self._seconds_left = head, idle
        self.cancel_timers()

    def restart_timers(self) -> None:
        """Continue these timers."""
        head, idle = self._seconds_left
        if head is not None:
            self._head_timer = self.loop.call_later(head, self._too_slow)
        if idle is not None and self._idle_timer is None:
            self._answered_at = self.loop.time() + idle - self.server.keep_alive_seconds
            self._idle_timer = self.loop.call_later(max(0.0, idle), self._close_if_idle)

    def cancel_timers(self) -> None:
        """Stop them permanently."""
        for timer in (self._head_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._idle_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self._in_head or self.transport.is_closing():
            return
        if self.is_answering():
            self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)
        else:
            self._refuse(Refusal.SLOW_HEAD)

    def refuse_busy(self) -> None:
        """Answer 503 to bytes that are not parsed, and close the connection."""
        self.url, self.headers = b"", []
        self._refuse(Refusal.BUSY)

    def _refuse(self, refusal: Refusal) -> None:
        """Send the answer of the table, unless another is pending, and close the connection."""
        self.cancel_timers()
        if self.transport.is_closing():
            return
        if self.is_answering() and not self.cycle.more_body:
            # It was accepted: its answer ends the connection. Unread bytes would reset it before the client has that.
            self.cycle.keep_alive = False
            self._is_refused = True
        elif self.is_answering():
            self.flow.close()
        else:
            request_id = request_id_in(self.headers)
            # Without a part of the target the method is not known. HEAD gets no body (RFC 9110, section 9.3.2).
            has_body = not self.url or self.parser.get_method() != b"HEAD"
            self.send_encoded(encoded(self.refusals.answer(refusal, request_id), has_body=has_body), request_id)

    def send_encoded(self, answer: EncodedAnswer, request_id: bytes, *, keep_alive: bool = True) -> None:
        """Send an answer to the request with this id, unless the client has gone."""
        if self.transport.is_closing():
            return
        shared = self.server.shared
        start = self.answer_starts.of(answer.status, shared.default_headers)
        self.transport.write(b"%bx-request-id: %b\r\n%b" % (start, request_id, answer.content))
        shared.total_requests += 1
        if answer.closes or not keep_alive:
            self.flow.close()
        else:
            self.become_idle()
