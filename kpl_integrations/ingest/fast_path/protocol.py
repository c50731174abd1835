"""uvicorn's HTTP protocol with a fast path for requests that need no waiting (see `sync_answer.py`).

A POST that arrives in one piece is held until its end and passed to `answerer`. If it is declined or incomplete, the
application gets it as usual. uvicorn's objects for each request (a scope, a cycle, a task, a timer) are created only
then.

Most requests of a connection repeat the head of the one before. Those are not even parsed (see `HeadCache`). If they
have one record, those of many connections are put together (see `RequestBatch`).
"""

import asyncio
import time
from http import HTTPStatus
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kpl_integrations.ingest.fast_path.batch import BatchedRequest, RequestBatch
from kpl_integrations.ingest.fast_path.head_cache import HeadCache
from kpl_integrations.ingest.fast_path.sync_answer import FAILED, PendingAnswer, SyncAnswer, SyncAnswerer
from kpl_integrations.ingest.http.connection_bounds import BoundedProtocol
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES
from kpl_integrations.ingest.http.request_head import RecordsHead

_ENCODING: Final = b"content-encoding"
_INVALID: Final = "Invalid HTTP request received."


class AnswerStarts:
    """The status line and the server's own header fields of answers. uvicorn replaces the fields once a second."""

    __slots__ = ("_by_status", "_fields")

    def __init__(self) -> None:
        self._fields: list[tuple[bytes, bytes]] = []
        self._by_status: dict[int, bytes] = {}

    def of(self, status: int, fields: list[tuple[bytes, bytes]]) -> bytes:
        """Return the start of an answer."""
        if fields is not self._fields:
            self._fields = fields
            self._by_status = {}
        start = self._by_status.get(status)
        if start is None:
            lines = [b"%b: %b\r\n" % field for field in fields]
            start = self._by_status[status] = b"".join((STATUS_LINE[status], *lines))
        return start


class FastPathProtocol(BoundedProtocol):
    """One connection. A subclass sets `answerer`, and `batch` if its requests may be answered together."""

    answerer: ClassVar[SyncAnswerer | None] = None
    batch: ClassVar[RequestBatch | None] = None
    answer_starts: ClassVar[AnswerStarts] = AnswerStarts()

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        # The pieces of the body of a held request; None: no request is held.
        self._held: list[bytes] | None = None
        # The last head, if its request took the fast path and no other bytes came since.
        self._cached: HeadCache | None = None
        # Whether requests with the last head may wait in the batch, and whether one does.
        self._may_batch = self._is_batched = False
        # The piece that is being parsed.
        self._received = b""
        # The time of the last answer of the fast path, and the one timer that checks it.
        self._answered_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    @classmethod
    def for_gateway(cls, answerer: SyncAnswerer) -> "type[FastPathProtocol]":
        """Return a subclass that passes requests to `answerer`."""
        members = {"answerer": answerer, "batch": RequestBatch(answerer), "answer_starts": AnswerStarts()}
        return type(cls.__name__, (cls,), members)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the idle timer."""
        timer, self._idle_timer = self._idle_timer, None
        if timer is not None:
            timer.cancel()
        self._held = self._cached = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer a request with the cached head. Otherwise handle the bytes as usual."""
        self._flush()
        if self._cached is None or self.turns.is_attentive or not self._answer_cached(self._cached, data):
            super().data_received(data)

    def may_be_cut(self, data: bytes) -> bool:
        """Return True if these may be many bytes of pipelined requests, and not one request with the cached head."""
        if len(data) <= SLICE_BYTES or (self._cached is not None and self._cached.is_whole(data)):
            return False
        return super().may_be_cut(data)

    def feed(self, data: bytes) -> None:
        """Answer requests with the cached head. Otherwise feed the parser, and release an incomplete request."""
        if self._cached is not None:
            if self.turns.is_attentive and self._answer_cached(self._cached, data):
                return
            data = self._answer_pipelined(self._cached, data)
            if not data:
                return
            self._cached = None
        self._received = data
        super().feed(data)
        self._received = b""
        if self._held is None:
            return
        try:
            self._release()
        except Exception:  # noqa: BLE001 - the parser converts every exception of its callbacks too
            # As uvicorn does if the parser raises.
            self.logger.warning(_INVALID)
            self.send_400_response(_INVALID)

    def _answer_cached(self, cached: HeadCache, data: bytes) -> bool:
        """Answer a request with the cached head. Return False if the head differs or the request may have to wait."""
        if self.transport.is_closing() or not self._has_room():
            return False
        body = cached.body_of(data)
        if body is None:
            return False
        if cached.head.authorization != self.reader.authorization and self._claim(cached.head):
            cached.keep_credentials()
        batch = self.batch
        if self._may_batch and batch is not None and not self.turns.is_active and batch.takes(body):
            self._is_batched = True
            batch.add((self, cached.head, body, data))
            return True
        answer = self._fair_answer_to(cached.head, body)
        if answer is None:
            return False
        self._send(answer)
        return True

    def answer_batched(self, request: BatchedRequest, answer: SyncAnswer | PendingAnswer | None) -> None:
        """Answer a request of the batch; see `BatchedConnection`. If the client has gone, its record is put anyway."""
        self._is_batched = False
        _, head, body, received = request
        try:
            if answer is None:
                answer = self._fair_answer_to(head, body)
            if self.transport.is_closing():
                return
            if answer is None:
                super().data_received(received)
            else:
                self._send(answer)
        except Exception:
            # The other connections of the batch get their answers.
            self.logger.exception("Exception in the fast path")
            self.transport.abort()

    def _flush(self) -> None:
        """Answer the request in the batch before anything else happens to this connection."""
        if self._is_batched and self.batch is not None:
            self.batch.flush()

    def is_answering(self) -> bool:
        """Return True if a request is in the batch or being answered."""
        return self._is_batched or super().is_answering()

    def eof_received(self) -> None:
        """Answer the request in the batch while the transport can still send."""
        self._flush()
        super().eof_received()

    def shutdown(self) -> None:
        """Answer the request in the batch, then close the connection or let it end."""
        self._flush()
        super().shutdown()

    def _answer_pipelined(self, cached: HeadCache, data: bytes) -> bytes:
        """Answer the first requests of several with the cached head. Return the bytes of the others."""
        begin = 0
        while not self.transport.is_closing() and self._has_room():
            span = cached.span_of(data, begin)
            if span is None:
                break
            if cached.head.authorization != self.reader.authorization:
                self._claim(cached.head)
            answer = self._fair_answer_to(cached.head, data[slice(*span)])
            if answer is None:
                break
            self._send(answer)
            begin = span[1]
        return data[begin:]

    def on_message_begin(self) -> None:
        """Start a request. Its scope is created when the application needs it."""
        if self.answerer is None:
            super().on_message_begin()
            return
        self._begin_head()
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        """Hold a request, or pass it to the application."""
        if self.transport.is_closing():
            # The client could not receive the answer and would send the request again.
            return
        if self._refuses_head():
            return
        if self.answerer is None or self.parser.should_upgrade():
            super().on_headers_complete()
        elif self._may_hold():
            self._end_head()
            self._require_head()
            self._held = []
        else:
            self._call_application()

    def _may_hold(self) -> bool:
        """Return True if the answer depends only on the target, the header fields and the body of the request."""
        parser = self.parser
        return (
            parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and parser.get_http_version() == "1.1"
            and not self.expect_100_continue
            and not self.pipeline
            and self._has_room()
        )

    def _has_room(self) -> bool:
        """Return True if no answer is pending, the write buffer is not full and the concurrency limit not reached."""
        limit = self.limit_concurrency
        cycle: Any = self.cycle
        return (
            (cycle is None or cycle.response_complete)
            and not self.flow.write_paused
            and (limit is None or (len(self.connections) < limit and len(self.tasks) < limit))
        )

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        self._body_within = True
        if self._held is not None:
            self._held.append(body)
        elif not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, and answer it if that needs no waiting."""
        is_first_and_whole = self._begins_within and not self._ends_within
        self._ends_within = True
        held = self._held
        if held is None:
            if not self.transport.is_closing():
                super().on_message_complete()
            return
        assert self.answerer is not None  # noqa: S101 - otherwise no request is held
        body = held[0] if len(held) == 1 else b"".join(held)
        head = self.answerer.sync_head(self.url, self.headers)
        if head is not None and (head.authorization != self.reader.authorization or self in self.unverified):
            self._claim(head)
        answer = None if head is None else self._fair_answer_to(head, body)
        if head is None or answer is None:
            self._release()
            super().on_message_complete()
            return
        self._held = None
        is_accepted = isinstance(answer, PendingAnswer) or answer.status < HTTPStatus.BAD_REQUEST
        if is_accepted and is_first_and_whole and (cached := HeadCache.of(self._received, len(body), head)) is not None:
            self._cached = cached
            is_queued = isinstance(answer, SyncAnswer) and answer.status == HTTPStatus.ACCEPTED
            self._may_batch = is_queued and head.plain_type is not None and _ENCODING not in head.headers
        self._send(answer)

    def _claim(self, head: RecordsHead) -> bool:
        """Note the tenant of a request whose credentials differ from the last one's. Return True if they are valid."""
        assert self.answerer is not None  # noqa: S101 - otherwise no request is held
        tenant = self.answerer.tenant_of(head)
        self.reader.claim(tenant)
        self.reader.authorization = head.authorization
        if tenant is not None:
            self.verified()
        return tenant is not None

    def _fair_answer_to(self, head: RecordsHead, body: bytes) -> SyncAnswer | PendingAnswer | None:
        """Answer a request. Refuse it if it cannot wait for its tenant's turn."""
        assert self.answerer is not None  # noqa: S101 - otherwise no request is held
        if self.turns.is_attentive and self.reader.refuses():
            return self.answerer.sync_refusal(head, body, self.client[0] if self.client else "")
        return self._answer_to(head, body)

    def _answer_to(self, head: RecordsHead, body: bytes) -> SyncAnswer | PendingAnswer | None:
        assert self.answerer is not None  # noqa: S101 - otherwise no request is held
        try:
            return self.answerer.sync_answer(head, body, self.client[0] if self.client else "")
        except Exception:
            self.logger.exception("Exception in the fast path")
            return FAILED

    def _send(self, answer: SyncAnswer | PendingAnswer) -> None:
        if isinstance(answer, PendingAnswer):
            # Until it is complete, uvicorn holds the requests behind it.
            self.cycle = answer  # type: ignore[assignment] # it has the attributes of a cycle that the protocol reads
            answer.begin(self.loop.call_soon, self._finish)
        else:
            self._write(answer)

    def _finish(self, pending: PendingAnswer) -> None:
        """Send an answer whose results are known, and let the next request start."""
        started = time.thread_time() if self.turns.is_active else None
        if self.cycle is pending:  # type: ignore[comparison-overlap] # see `_send`
            # An idle connection must not hold the records of its last request.
            self.cycle = None  # type: ignore[assignment] # as in a new connection
        try:
            answer = pending.answer()
        except Exception:
            self.logger.exception("Exception in the fast path")
            answer = FAILED
        if self.transport.is_closing():
            return
        self._write(answer)
        if not pending.keep_alive:
            self.transport.close()
        elif self.pipeline:
            self.server_state.total_requests -= 1
            self.on_response_complete()
        if started is not None:
            self.turns.charge(self.reader.flow, self.reader.weight, time.thread_time() - started)

    def _write(self, answer: SyncAnswer) -> None:
        state = self.server_state
        self.transport.write(self.answer_starts.of(answer.status, state.default_headers) + answer.content)
        state.total_requests += 1
        if answer.closes:
            self.transport.close()
            return
        self._answered_at = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _close_if_idle(self) -> None:
        """Close an idle connection. One timer serves all requests of the connection."""
        self._idle_timer = None
        is_busy = self._in_head or self.flow.is_held or self.is_answering()
        if self.transport.is_closing() or is_busy:
            # A request is in progress and has its own timer. The next answer of the fast path sets this one again.
            return
        if self.timeout_keep_alive_task is not None:
            # uvicorn's own timer runs, which started with a later answer.
            return
        rest = self._answered_at + self.timeout_keep_alive - self.loop.time()
        if rest > 0.0:
            self._idle_timer = self.loop.call_later(rest, self._close_if_idle)
        else:
            self.timeout_keep_alive_handler()

    def _release(self) -> None:
        """Pass the received part of a held request to the application."""
        held, self._held = self._held or [], None
        if self.transport.is_closing():
            # The rest of the request was not valid HTTP.
            return
        self._call_application()
        for piece in held:
            super().on_body(piece)

    def _call_application(self) -> None:
        """Make up for the skipped start of the request, and call the application."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()
