"""A connection with a fast path for requests that need no waiting.

Most requests are complete when their head is, and need no waiting. The work of ASGI for such a request (a task, an
event, two messages in each direction) costs more than putting its records. So the connection runs it itself
(`request/request.py`), in the call that receives its last byte. If the request waits for the results of its records,
a callback goes on with it. If it waits for anything else, a task does.

A POST that arrives in one piece is held until its end and run here. If it is declined or incomplete, the application
gets it as usual. A task is made only then, or once the request has to wait for something else than its results.

Most requests of a connection repeat the head of the one before. Those are not even parsed (see `HeadCache`). If they
have one record, those of many connections are put together (see `RequestBatch`).
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Final

from kpl_core import Deliveries
from kpl_core.producer.delivery import wait_with
from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.fast_path.batch import BatchedRequest, RequestBatch, Requests
from kpl_integrations.ingest.fast_path.head_cache import HeadCache
from kpl_integrations.ingest.http.answers import FAILED, Answer, AnswerStarts, EncodedAnswer, encoded
from kpl_integrations.ingest.http.connection import HttpConnection
from kpl_integrations.ingest.http.connection_flow import ReceiveBuffers
from kpl_integrations.ingest.http.correlation import new_request_id, request_id_of
from kpl_integrations.ingest.http.cpu_charges import ChargedRequest
from kpl_integrations.ingest.http.places import ConnectionPlaces
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES
from kpl_integrations.ingest.http.request_cycle import Http1Cycle, claim_connection
from kpl_integrations.ingest.http.request_head import RecordsHead, Server
from kpl_integrations.ingest.http2.connection import become_http_2
from kpl_integrations.ingest.request.needs import Need, Results, Steps
from kpl_integrations.ingest.request.records import RecordsRequest
from kpl_integrations.ingest.settings import IngestSettings

_log: Final = logging.getLogger(__name__)


class PendingRequest:
    """A request that waits until all deliveries of its records have results.

    A connection has it in place of an `Http1Cycle`, so that requests behind it wait and a shutdown lets it finish.
    It is also a waiter of an outcome.
    """

    __slots__ = ("_deliveries", "_finished", "_open", "_soon", "keep_alive", "response_complete", "steps")
    # The body is complete.
    more_body = False

    def __init__(self, steps: Steps[Answer], deliveries: Deliveries) -> None:
        self.steps = steps
        self.response_complete = False
        self.keep_alive = True
        self._deliveries = deliveries
        self._open = deliveries.open_outcomes()

    def begin(self, soon: Callable[[Callable[[], None]], object], finished: "Callable[[PendingRequest], None]") -> None:
        """Call `finished` when all results are known; `soon` calls a function outside of the pipeline's work."""
        self._soon = soon
        self._finished = finished
        self._look()

    def client_gone(self) -> None:
        """Do nothing: the records are put."""

    def set(self) -> None:
        """Look again soon, because an outcome is settled or its records moved."""
        self._soon(self._look)

    def _look(self) -> None:
        while self._open and self._open[-1].settled and self._open[-1].moved is None:
            self._open.pop()
        if self._open and self._open[-1].moved is not None:
            # Some of its records wait for other outcomes now.
            self._open = self._deliveries.open_outcomes()
        if self._open:
            wait_with(self._open[-1], self)
            return
        self.response_complete = True
        self._finished(self)


class GatewayConnection(HttpConnection):
    """One connection. `for_gateway` returns a subclass with what is the same for all connections of a gateway."""

    requests: ClassVar[Requests]
    batch: ClassVar[RequestBatch]

    def __init__(self, **made_with: Any) -> None:  # noqa: ANN401 - what uvicorn gives
        super().__init__(**made_with)
        # The pieces of the body of a held request; None: no request is held.
        self._held: list[bytes] | None = None
        # The last head, if its request took the fast path and no other bytes came since.
        self._cached: HeadCache | None = None
        # Whether requests with the last head may wait in the batch, and whether one does.
        self._may_batch = self._is_batched = False

    @classmethod
    def for_gateway(cls, gateway: Any, settings: IngestSettings) -> "type[GatewayConnection]":  # noqa: ANN401
        """Return a subclass for the connections of a gateway, because the server makes them itself."""
        members = {
            "requests": gateway,
            "batch": RequestBatch(gateway, gateway.read_turns),
            "turns": gateway.read_turns,
            "buffers": ReceiveBuffers(),
            "header_seconds": settings.header_seconds,
            "max_header_bytes": settings.max_header_bytes,
            "places": ConnectionPlaces(reserves=gateway.directory.verifies),
            "become_http_2": become_http_2 if settings.http2 else None,
            "answer_starts": AnswerStarts(),
            "refusals": gateway.server_refusals,
        }
        return type(cls.__name__, (cls,), members)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what is held."""
        self._held = self._cached = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer a request with the cached head. Otherwise handle the bytes as usual."""
        if self._is_batched:
            self.batch.flush()
        if self._cached is None or self.turns.is_attentive or not self._answer_cached(self._cached, data):
            super().data_received(data)

    def may_be_cut(self, data: bytes) -> bool:
        """Return True if these may be many bytes of pipelined requests, and not one request with the cached head."""
        if len(data) <= SLICE_BYTES or (self._cached is not None and self._cached.is_whole(data)):
            return False
        return super().may_be_cut(data)

    def feed(self, data: bytes) -> None:
        """Answer requests whose head is the cached one. Give all other bytes to the parser."""
        self._flush()
        if self._cached is not None:
            if self.turns.is_attentive and self._answer_cached(self._cached, data):
                return
            data = self._answer_pipelined(self._cached, data)
            if not data:
                return
            self._cached = None
        super().feed(data)
        self.received = b""
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
        if cached.head.authorization != self.reader.authorization and self._note(cached.head):
            cached.keep_credentials()
        if self._may_batch and (not self.turns.is_attentive or self.reader.may_wait) and self.batch.takes(body):
            self._is_batched = True
            self.batch.add((self, cached.head, body, data))
            return True
        return self._start(cached.head, body) is not None

    def answer_batched(self, request: BatchedRequest, answer: EncodedAnswer | Steps[Answer] | None) -> None:
        """Answer a request of the batch; see `BatchedConnection`. If the client has gone, its record is put anyway."""
        self._is_batched = False
        _, head, body, received = request
        try:
            if isinstance(answer, EncodedAnswer):
                self.send_encoded(answer, request_id_of(head.correlation) if head.correlation else new_request_id())
            elif answer is not None:
                self._go_on(answer)
            elif self._start(head, body) is None and not self.transport.is_closing():
                super().data_received(received)
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

    def eof_received(self) -> bool:
        """Answer the request in the batch while the transport can still send."""
        self._flush()
        return super().eof_received()

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
                self._note(cached.head)
            if self._start(cached.head, data[slice(*span)]) is None:
                break
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
        is_full = self.server.is_full(self.places.http_2_requests)
        return is_answered and not (self._is_batched or self.flow.write_paused or is_full)

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        if self._held is not None:
            self.head_size.body_within = True
            self._held.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, and answer it if that needs no waiting."""
        held = self._held
        if held is None:
            super().on_message_complete()
            return
        is_first_and_whole = self.head_size.begins_within and not self.head_size.ends_within
        self.head_size.ends_within = True
        body = held[0] if len(held) == 1 else b"".join(held)
        head = self.requests.head_of(self.url, self.headers)
        if head is not None and (
            head.authorization != self.reader.authorization or self.transport in self.places.unverified
        ):
            self._note(head)
        request = None if head is None else self._start(head, body)
        if head is None or request is None:
            self._release()
            super().on_message_complete()
            return
        self._held = None
        if self.transport.is_closing() or not is_first_and_whole:
            return
        if request.status < HTTPStatus.BAD_REQUEST:
            cached = HeadCache.of(self.received, len(body), head)
            if cached is not None:
                self._cached = cached
                self._may_batch = request.may_be_put_together()

    def _note(self, head: RecordsHead) -> bool:
        """Note the tenant of a request whose credentials differ from the last one's. Return True if they are valid."""
        tenant = self.turns.tenant_of(head.authorization)
        claim_connection(self, tenant)
        self.reader.authorization = head.authorization
        return tenant is not None

    def _start(self, head: RecordsHead, body: bytes) -> RecordsRequest | None:
        """Run and return a request. None: nothing has happened, and the application has to handle it."""
        client = self.client[0] if self.client else ""
        server = None
        if self.turns.is_attentive:
            server = Server(self._has_cpu_share, self.verified, self.reader.watch_body, lambda: body)
        try:
            request = self.requests.begin(head, body, client, server)
        except Exception:  # noqa: BLE001 - it is logged, and answered 500
            self._fail()
            return None
        if request is not None:
            self._go_on(request.run(), request=request)
        return request

    def _has_cpu_share(self, _tenant: object) -> bool:
        """Return False if the request, whose tenant is noted, is to be refused."""
        return not self.reader.refuses()

    def _go_on(self, steps: Steps[Answer], *, keep_alive: bool = True, request: RecordsRequest | None = None) -> bool:
        """Run a request to its end, or until it has to wait. Return True if it is answered."""
        try:
            need = next(steps)
        except StopIteration as end:
            self.send_encoded(encoded(end.value), end.value.request_id or new_request_id(), keep_alive=keep_alive)
            return True
        except Exception:  # noqa: BLE001 - it is logged, and answered 500
            self._fail(request)
            return True
        if isinstance(need, Results):
            # Until it is complete, requests behind it wait, and a shutdown lets it finish.
            self.cycle = pending = PendingRequest(steps, need.deliveries)
            pending.begin(self.loop.call_soon, self._finish)
        else:
            self._hand_over(steps, need, keep_alive=keep_alive)
        return False

    def _hand_over(self, steps: Steps[Answer], need: Need, *, keep_alive: bool) -> None:
        """Let a task go on with a request."""
        cycle = Http1Cycle(self, is_head=False, keep_alive=keep_alive, expects_continue=False)
        cycle.end_body()
        if self.transport.is_closing():
            cycle.client_gone()
        if self.cycle is None or self.cycle.response_complete:
            # Otherwise it is that of a request behind this one.
            self.cycle = cycle
        application: Any = partial(self._finishing, steps, need)
        if self.turns.is_active:
            application = ChargedRequest(self.turns.charges, self.reader, application, partial(claim_connection, self))
        self._run(cycle, application, {})

    async def _finishing(self, steps: Steps[Answer], need: Need, _scope: Scope, _receive: Receive, send: Send) -> None:
        await self.requests.finish(steps, need, send)

    def _finish(self, pending: PendingRequest) -> None:
        """Go on with a request whose results are known. The next one starts after its answer."""
        started = time.thread_time() if self.turns.is_active else None
        if self.cycle is pending:
            # An idle connection must not hold the records of its last request.
            self.cycle = None
        if self._go_on(pending.steps, keep_alive=pending.keep_alive) and not self.transport.is_closing():
            self.begin_next()
        if started is not None:
            self.turns.charges.add(self.reader.flow, self.reader.weight, time.thread_time() - started)

    def _fail(self, request: RecordsRequest | None = None) -> None:
        """Log the current exception, and answer 500 with the id that the log line has."""
        request_id = new_request_id() if request is None else request.identified()
        _log.exception("Exception in the fast path; answered with request_id=%s", request_id.decode())
        self.send_encoded(FAILED, request_id)

    def _release(self) -> None:
        """Pass the received part of a held request to the application."""
        held, self._held = self._held or [], None
        if self.transport.is_closing():
            # The rest of the request was not valid HTTP.
            return
        self.call_application()
        for piece in held:
            self.add_body(piece)
