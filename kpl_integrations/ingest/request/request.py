"""One request, from its head to its answer: a machine without sockets, tasks or locks.

`Request.run` is a generator. It yields what the request needs next (`needs.py`), gets it from its driver, and returns
the answer. A request that needs nothing runs to its end in one call. Two drivers run the same machine: our own HTTP
connection (`fast_path/protocol.py`) and ASGI (`routes/request_driver.py`).

The order of its checks is a table, `who` and then `may_it`, in the class of each form of request. Until its records are
put nothing has happened. After that, nothing that the client does can undo it.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeVar, Unpack

from kpl_core import Deliveries, NotSpooled
from kpl_integrations.ingest.admission.admission import PutTerms
from kpl_integrations.ingest.admission.clients import AddressBudget, ClientRoom
from kpl_integrations.ingest.admission.refusals import Refusal, Refused, refused_decoding
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.decoding import SMALL_BYTES, DecodeRefusal, pieces_of
from kpl_integrations.ingest.decoding.json_text import printable
from kpl_integrations.ingest.decoding.steps import hash_in_steps
from kpl_integrations.ingest.http.access_log import LogAnswer
from kpl_integrations.ingest.http.answers import Answer
from kpl_integrations.ingest.http.bodies import require_length, require_size
from kpl_integrations.ingest.http.correlation import (
    Correlation,
    RequestSpan,
    TraceContext,
    request_id_of,
    trace_context,
)
from kpl_integrations.ingest.http.request_head import FieldsByName, Server
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.request.needs import Body, GroupSlices, Slices, Steps, Stored
from kpl_integrations.kinesis_protocol.requests import RequestRefused

# A check of a request. It returns None, or a generator with what it needs before it decides.
Step = Callable[[Any], Steps[None] | None]
T = TypeVar("T")
REJECTED: Final = (Refused, RequestRefused)
"""What the steps of a request raise to end it."""


class Request:
    """What the journey of one request has found out so far; each form of request has its own class.

    `body` is the body if all of it has arrived with the head. `server` is what the gateway's own server offers.
    """

    __slots__ = ("_is_known", "account", "authorization", "body", "client", "correlation", "gateway", "headers",
                 "inflated_bytes", "is_verified", "log", "received_bytes", "repeated", "request_id", "server", "span",
                 "status", "stream", "trace")  # fmt: skip
    account: TenantAccount
    # Whether the request had the tenant's credentials, once it is known.
    is_verified: bool
    who: ClassVar[tuple[Step, ...]]
    may_it: ClassVar[tuple[Step, ...]]
    route: ClassVar[str]

    def __init__(
        self,
        gateway: OpenGateway,
        headers: FieldsByName,
        authorization: str | None,
        client: str,
        body: bytes | None,
        server: Server | None,
    ) -> None:
        self.gateway = gateway
        self.headers = headers
        self.authorization = authorization
        self.client = client
        self.body = body
        self.server = server
        # `status` is that of the answer; 0 while there is none.
        self.received_bytes = self.inflated_bytes = self.status = 0
        # The refusal of a header field that is repeated with another value.
        self.repeated: Refused | None = None
        # Called with the status and `log_fields`, if the request is logged.
        self.log: LogAnswer | None = None
        self._is_known = False
        # The stream that the request names; empty while that is not known.
        self.stream = ""
        # What names this request elsewhere, as received. The id is empty until it is needed.
        self.correlation: Correlation | None = None
        self.request_id = b""
        # Its span, and the place in a trace that its records carry; None without tracing.
        self.span: RequestSpan | None = None
        self.trace: TraceContext | None = None

    def run(self) -> Steps[Answer]:
        """Return the answer, and count it. A driver throws what it fails with into the generator.

        `REJECTED` is answered in the form of the request. After any other exception the request has no answer.
        """
        spans = self.gateway.spans
        is_traced, started_at = spans is not None, 0 if spans is None else spans.now()
        try:
            for step in self.who:
                waiting = step(self)
                if waiting is not None:
                    yield from waiting
            self.account.requests += 1
            if is_traced or self.account.tenant.trace_records:
                self._join_trace(started_at)
            for step in self.may_it:
                waiting = step(self)
                if waiting is not None:
                    yield from waiting
            answer = yield from self.accept(self.body or b"")
        except REJECTED as error:
            answer = self._rejected(error)
        except BaseException as error:
            self._broke(error, started_at)
            raise
        self.status = answer.status
        self.gateway.tally.answers[answer.status] += 1
        if is_traced or self.log is not None or self.request_id or self.correlation is not None:
            return self._answered(answer, started_at)
        return answer

    def _answered(self, answer: Answer, started_at: int) -> Answer:
        """End the span and log the answer. Return it with the id of the request."""
        if self.gateway.spans is not None:
            self._end_span(answer.status, started_at)
        if self.log is not None:
            self.log(answer.status, self.log_fields())
        return Answer(answer.status, answer.body, answer.fields, answer.is_unread, self.identified())

    def identified(self) -> bytes:
        """Return the id of this request: the client's, or one that is made now."""
        if not self.request_id:
            self.request_id = request_id_of(self.correlation)
        return self.request_id

    def log_fields(self) -> dict[str, str]:
        """Return what a log line says of this request, as far as it is known."""
        fields = {"request_id": self.identified().decode()}
        trace = self.trace or trace_context(self.correlation, is_verified=False)
        if trace is not None:
            fields["trace_id"] = trace.trace_id
        if self._is_known:
            fields["tenant"] = self.account.tenant.id
        if self.stream:
            fields["stream"] = printable(self.stream)
        return fields

    def _join_trace(self, started_at: int) -> None:
        """Continue the client's trace, in a span if there are spans."""
        is_verified, spans = self._is_known and self.is_verified, self.gateway.spans
        self.trace = trace_context(self.correlation, is_verified=is_verified)
        if spans is not None:
            self.span = span = spans.start(f"POST {self.route}", started_at=started_at, parent=self.trace)
            self.trace = TraceContext(span.traceparent, span.tracestate)

    def _end_span(self, status: int | None, started_at: int) -> None:
        """End the span. A request that was rejected before its client was known gets it only now."""
        if self.span is None:
            self._join_trace(started_at)
        assert self.span is not None  # noqa: S101 - there are spans
        self.span.end(status, self._span_attributes())

    def _span_attributes(self) -> dict[str, str]:
        fields = self.log_fields()
        named = {"kpl.request_id": "request_id", "kpl.tenant": "tenant", "aws.kinesis.stream_name": "stream"}
        found = {name: fields[field] for name, field in named.items() if field in fields}
        return found | {"http.route": self.route, "http.request.method": "POST", "client.address": self.client}

    def _broke(self, error: BaseException, started_at: int) -> None:
        """End the span of a request without an answer, and say in the log whose request it was."""
        if self.gateway.spans is not None:
            self._end_span(None, started_at)
        if isinstance(error, Exception):
            error.add_note(" ".join([f"{name}={value}" for name, value in self.log_fields().items()]))

    def accept(self, received: bytes) -> Steps[Answer]:
        """Decode the received body, put its records, and return the answer once it is true."""
        raise NotImplementedError

    def rejection(self, error: Exception) -> Answer:
        """Return the answer to this request, which is rejected."""
        raise NotImplementedError

    def charge(self, error: Exception) -> None:
        """Charge the bytes of this rejected request."""
        if self._is_known and isinstance(error, Refused):
            work_bytes = self.received_bytes + self.inflated_bytes
            self.account.count_refused(error, work_bytes, self.now(), self.payer)

    def _rejected(self, error: Exception) -> Answer:
        self.charge(error)
        if isinstance(error, Refused):
            self.gateway.tally.refusals[error.refusal] += 1
        return self.rejection(error)

    def know(self, account: TenantAccount) -> None:
        """Note whose request this is."""
        self.account = account
        directory = self.gateway.directory
        self.is_verified = directory.verifies and account.tenant is not directory.unknown
        self._is_known = True

    @property
    def payer(self) -> AddressBudget | None:
        """What a refused request is charged to; None: the tenant, whose credentials it had.

        Clients without credentials are one tenant, so that one of them could refuse the requests of all others.
        """
        return None if self.is_verified else AddressBudget(self.gateway.addresses, self.client)

    def now(self) -> float:
        """Return the time on the producer's clock."""
        return self.gateway.admission.now()

    def room(self) -> ClientRoom:
        """Return the room for an unfinished body: that of the tenant once it is known, else of the address."""
        return self.gateway.room_of(self.account if self._is_known else None, self.client, self.server)

    def most_bytes(self) -> int:
        """Return how many bytes the body may have."""
        return self.gateway.settings.max_body_bytes

    def receive(self) -> Steps[None]:
        """Get the body."""
        self.body = yield Body(self.most_bytes(), self.gateway.settings.body_seconds, self.room())
        self.received_bytes = len(self.body)

    def decode_large(self, received: bytes, decoder: Callable[[Iterator[bytes]], Generator[None, None, T]]) -> Steps[T]:
        """Return what this function makes, in slices, of the decompressed pieces of a large body."""
        encoding, inflated = self.headers.get(b"content-encoding"), [0]
        pieces = pieces_of(encoding, received, self.gateway.settings.max_inflated_bytes, inflated)
        try:
            decoded: T = yield Slices(decoder(pieces))
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal, inflated[0]) from None
        self.inflated_bytes = inflated[0]
        return decoded

    def put(
        self, stream: str, records: Sequence[Any], *, in_slices: bool, **terms: Unpack[PutTerms]
    ) -> Steps[Deliveries]:
        """Put all records or none; see `Admission.put_records`."""
        if not in_slices:
            return self.gateway.admission.put_records(self.account, stream, records, **terms)
        group = self.gateway.admission.begin_group(self.account, stream, records, **terms)
        yield GroupSlices(group)
        return group.deliveries


def add_to_hash(hashed: "hashlib.blake2b | hashlib._Hash", received: bytes) -> Steps[None]:
    """Add a body to a hash, in slices if it is large."""
    if len(received) > SMALL_BYTES:
        yield Slices(hash_in_steps(hashed, received))
    else:
        hashed.update(received)


def require_spool(gateway: OpenGateway) -> None:
    """Raise `Refused` if this gateway has no spool, for ack=spooled."""
    if gateway.settings.spool is None:
        detail = "ack=spooled needs a spool, and this gateway has none; ask for queued or delivered"
        raise Refused(Refusal.BAD_PARAMETER, detail, extensions={"field": "ack"})


def stored(deliveries: Deliveries) -> Steps[None]:
    """Wait for the spool's commit.

    Raises:
        Refused: the spool did not store all records.
    """
    try:
        yield Stored(deliveries)
    except NotSpooled as error:
        detail = f"the spool did not store all records of the request: {error}; it delivers those that it stored"
        raise Refused(Refusal.NOT_SPOOLED, detail) from error


# The steps that forms of requests share. Each refuses the request, or returns.


def open_gateway(request: Request) -> None:
    """Check that the gateway is not closed."""
    request.gateway.admission.require_open()


def repeated_fields(request: Request) -> None:
    """Check that no header field has two values that contradict each other."""
    if request.repeated is not None:
        raise request.repeated


def credentials(request: Request) -> None:
    """Check that the credentials are those of a tenant."""
    request.know(request.gateway.account_shown(request.authorization))


def cpu_share(request: Request) -> None:
    """Check that the tenant has not used more than its share of CPU time while the gateway is late."""
    if request.server is not None:
        request.gateway.require_cpu_share(request.account, request.server)


def refused_bytes(request: Request) -> None:
    """Check that the client has not sent too many bytes in requests that were refused."""
    account = request.account
    if request.is_verified:
        if account.refused_bytes is not None:
            account.require_readable(account.refused_bytes, request.now())
    elif request.gateway.addresses.by_address:
        # No address has a budget until a request was refused.
        account.require_readable(AddressBudget(request.gateway.addresses, request.client), request.now())


def length(request: Request) -> None:
    """Check that the announced length is within the limit."""
    if request.body is None:
        headers = request.headers
        require_length(headers.get(b"content-length"), request.most_bytes(), expect=headers.get(b"expect"))


def body(request: Request) -> Steps[None] | None:
    """Check that the body is complete, in time, and within the limit."""
    if request.body is None:
        return request.receive()
    request.received_bytes = size = len(request.body)
    if size > request.most_bytes():
        require_size(size, request.most_bytes())
    return None
