"""A connection with a fast path for requests that need no waiting (see `sync_answer.py`).

A POST that arrives in one piece is held until its end and passed to `answerer`. If it is declined or incomplete, the
application gets it as usual. The objects of a request (a scope, a cycle, a task) are made only then.

Most requests of a connection repeat the head of the one before. Those are not even parsed (see `HeadCache`). If they
have one record, those of many connections are put together (see `RequestBatch`).
"""

import logging
import time
from http import HTTPStatus
from typing import Any, ClassVar, Final

from kpl_integrations.ingest.fast_path.batch import BatchedRequest, RequestBatch
from kpl_integrations.ingest.fast_path.head_cache import HeadCache
from kpl_integrations.ingest.fast_path.sync_answer import FAILED, PendingAnswer, SyncAnswer, SyncAnswerer
from kpl_integrations.ingest.http.connection import HttpConnection
from kpl_integrations.ingest.http.raw_answers import AnswerStarts
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES
from kpl_integrations.ingest.http.request_head import RecordsHead
from kpl_integrations.ingest.settings import IngestSettings

_log: Final = logging.getLogger(__name__)
_ENCODING: Final = b"content-encoding"


class GatewayConnection(HttpConnection):
    """One connection. `for_gateway` returns a subclass with what is the same for all connections of a gateway."""

    answerer: ClassVar[SyncAnswerer]
    batch: ClassVar[RequestBatch]

    def __init__(self, **made_with: Any) -> None:  # noqa: ANN401 - what uvicorn gives
        super().__init__(**made_with)
        # The pieces of the body of a held request; None: no request is held.
        self._held: list[bytes] | None = None
        # The last head, if its request took the fast path and no other bytes came since.
        self._cached: HeadCache | None = None
        # Whether requests with the last head may wait in the batch, and whether one does.
        self._may_batch = self._is_batched = False
        # The piece that is being parsed.
        self._received = b""

    @classmethod
    def for_gateway(cls, gateway: Any, settings: IngestSettings) -> "type[GatewayConnection]":  # noqa: ANN401
        """Return a subclass for the connections of a gateway, because the server makes them itself."""
        members = {
            "answerer": gateway,
            "batch": RequestBatch(gateway),
            "turns": gateway.read_turns,
            "header_seconds": settings.header_seconds,
            "max_header_bytes": settings.max_header_bytes,
            "reserves": gateway.directory.verifies,
            "unverified": {},
            "answer_starts": AnswerStarts(),
        }
        return type(cls.__name__, (cls,), members)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what is held."""
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
        except Exception as error:  # noqa: BLE001 - the parser converts every exception of its callbacks too
            self.refuse_invalid(error)

    def _answer_cached(self, cached: HeadCache, data: bytes) -> bool:
        """Answer a request with the cached head. Return False if the head differs or the request may have to wait."""
        if self.transport.is_closing() or not self._has_room():
            return False
        body = cached.body_of(data)
        if body is None:
            return False
        if cached.head.authorization != self.reader.authorization and self._claim(cached.head):
            cached.keep_credentials()
        if self._may_batch and not self.turns.is_active and self.batch.takes(body):
            self._is_batched = True
            self.batch.add((self, cached.head, body, data))
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
        except Exception:  # noqa: BLE001 - it is logged, and the connection ends
            # The other connections of the batch get their answers.
            _log.exception("Exception in the fast path")
            self.transport.abort()

    def _flush(self) -> None:
        """Answer the request in the batch before anything else happens to this connection."""
        if self._is_batched:
            self.batch.flush()

    def is_answering(self) -> bool:
        """Return True if a request is in the batch or being answered."""
        return self._is_batched or super().is_answering()

    def eof_received(self) -> None:
        """Answer the request in the batch while the transport can still send."""
        self._flush()
        super().eof_received()

    def end(self) -> None:
        """Answer the request in the batch, then close the connection or let it end."""
        self._flush()
        super().end()

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

    def on_headers_complete(self) -> None:
        """Hold a request, or pass it to the application."""
        if not self.ends_head():
            return
        if self._may_hold():
            self._held = []
        else:
            self.call_application()

    def _may_hold(self) -> bool:
        """Return True if the answer depends only on the target, the header fields and the body of the request."""
        parser = self.parser
        return (
            parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and parser.get_http_version() == "1.1"
            and not self.expects_continue
            and not self.waiting
            and self._has_room()
        )

    def _has_room(self) -> bool:
        """Return True if no answer is pending, the write buffer is not full and the concurrency limit not reached."""
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        return is_answered and not (self._is_batched or self.flow.write_paused or self.server.is_full())

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        if self._held is not None:
            self._body_within = True
            self._held.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, and answer it if that needs no waiting."""
        held = self._held
        if held is None:
            super().on_message_complete()
            return
        is_first_and_whole = self._begins_within and not self._ends_within
        self._ends_within = True
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
        tenant = self.answerer.tenant_of(head)
        self.reader.claim(tenant)
        self.reader.authorization = head.authorization
        if tenant is not None:
            self.verified()
        return tenant is not None

    def _fair_answer_to(self, head: RecordsHead, body: bytes) -> SyncAnswer | PendingAnswer | None:
        """Answer a request. Refuse it if it cannot wait for its tenant's turn."""
        client = self.client[0] if self.client else ""
        if self.turns.is_attentive and self.reader.refuses():
            return self.answerer.sync_refusal(head, body, client)
        try:
            return self.answerer.sync_answer(head, body, client)
        except Exception:  # noqa: BLE001 - it is logged, and answered 500
            _log.exception("Exception in the fast path")
            return FAILED

    def _send(self, answer: SyncAnswer | PendingAnswer) -> None:
        if isinstance(answer, PendingAnswer):
            # Until it is complete, requests behind it wait, and a shutdown lets it finish.
            self.cycle = answer
            answer.begin(self.loop.call_soon, self._finish)
        else:
            self._write(answer)
            if not answer.closes:
                self.become_idle()

    def _finish(self, pending: PendingAnswer) -> None:
        """Send an answer whose results are known, and let the next request start."""
        started = time.thread_time() if self.turns.is_active else None
        if self.cycle is pending:
            # An idle connection must not hold the records of its last request.
            self.cycle = None
        try:
            answer = pending.answer()
        except Exception:  # noqa: BLE001 - it is logged, and answered 500
            _log.exception("Exception in the fast path")
            answer = FAILED
        if self.transport.is_closing():
            return
        self._write(answer)
        if not pending.keep_alive:
            self.transport.close()
        self.begin_next()
        if started is not None:
            self.turns.charge(self.reader.flow, self.reader.weight, time.thread_time() - started)

    def _write(self, answer: SyncAnswer) -> None:
        shared = self.server.shared
        self.transport.write(self.answer_starts.of(answer.status, shared.default_headers) + answer.content)
        shared.total_requests += 1
        if answer.closes:
            self.transport.close()

    def _release(self) -> None:
        """Pass the received part of a held request to the application."""
        held, self._held = self._held or [], None
        if self.transport.is_closing():
            # The rest of the request was not valid HTTP.
            return
        self.call_application()
        for piece in held:
            self.cycle.add_body(piece)
