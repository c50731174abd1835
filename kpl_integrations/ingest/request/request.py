"""One request, from its head to its answer: a machine without sockets, tasks or locks.

`Request.run` is a generator. It yields what the request needs next (`needs.py`), gets it from its driver, and returns
the answer. A request that needs nothing runs to its end in one call. Two drivers run the same machine: our own HTTP
connection (`fast_path/protocol.py`) and ASGI (`routes/request_driver.py`).

The order of its checks is a table, `who` and then `may_it`, in the class of each form of request. Until its records are
put nothing has happened. After that, nothing that the client does can undo it.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Final

from kpl_core import Deliveries, NotSpooled
from kpl_integrations.ingest.admission.acknowledgement import Answer
from kpl_integrations.ingest.admission.clients import AddressBudget, ClientRoom
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.http.bodies import require_length, require_size
from kpl_integrations.ingest.http.request_head import FieldsByName, Server
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.request.needs import Body, Steps, Stored
from kpl_integrations.kinesis_protocol.requests import RequestRefused

# A check of a request. It returns None, or a generator with what it needs before it decides.
Step = Callable[[Any], Steps[None] | None]
REJECTED: Final = (Refused, RequestRefused)
"""What the steps of a request raise to end it."""


class Request:
    """What the journey of one request has found out so far; each form of request has its own class.

    `body` is the body if all of it has arrived with the head. `server` is what the gateway's own server offers.
    """

    __slots__ = ("_is_known", "account", "authorization", "body", "client", "gateway", "headers", "inflated_bytes",
                 "log", "payer", "received_bytes", "repeated", "server", "status")  # fmt: skip
    account: TenantAccount
    # What a refused request is charged to; None: the tenant, whose credentials it had.
    payer: AddressBudget | None
    who: ClassVar[tuple[Step, ...]]
    may_it: ClassVar[tuple[Step, ...]]

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
        # Called with the status, if the request is logged.
        self.log: Callable[[int], None] | None = None
        self._is_known = False

    def run(self) -> Steps[Answer]:
        """Return the answer, and count it. A driver throws what it fails with into the generator.

        `REJECTED` is answered in the form of the request. After any other exception the request has no answer.
        """
        try:
            for step in self.who:
                waiting = step(self)
                if waiting is not None:
                    yield from waiting
            self.account.requests += 1
            for step in self.may_it:
                waiting = step(self)
                if waiting is not None:
                    yield from waiting
            answer = yield from self.accept(self.body or b"")
        except REJECTED as error:
            answer = self._rejected(error)
        self.status = answer.status
        self.gateway.tally.answers[answer.status] += 1
        if self.log is not None:
            self.log(answer.status)
        return answer

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
        is_verified = directory.verifies and account.tenant is not directory.unknown
        # Clients without credentials are one tenant, so that one of them could refuse the requests of all others.
        self.payer = None if is_verified else AddressBudget(self.gateway.addresses, self.client)
        self._is_known = True

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
    """The gateway is not closed."""
    request.gateway.admission.require_open()


def repeated_fields(request: Request) -> None:
    """No header field has two values that contradict each other."""
    if request.repeated is not None:
        raise request.repeated


def credentials(request: Request) -> None:
    """The credentials are those of a tenant."""
    request.know(request.gateway.account_shown(request.authorization))


def cpu_share(request: Request) -> None:
    """The tenant has not used more than its share of CPU time while the gateway is late."""
    if request.server is not None:
        request.gateway.require_cpu_share(request.account, request.server)


def refused_bytes(request: Request) -> None:
    """Its client has not sent too many bytes in requests that were refused."""
    account, payer = request.account, request.payer
    if payer is None:
        if account.refused_bytes is not None:
            account.require_readable(account.refused_bytes, request.now())
    elif request.gateway.addresses.by_address:
        # No address has a budget until a request was refused.
        account.require_readable(payer, request.now())


def length(request: Request) -> None:
    """The announced length is within the limit."""
    if request.body is None:
        headers = request.headers
        require_length(headers.get(b"content-length"), request.most_bytes(), expect=headers.get(b"expect"))


def body(request: Request) -> Steps[None] | None:
    """The body is complete, in time, and within the limit."""
    if request.body is None:
        return request.receive()
    request.received_bytes = size = len(request.body)
    if size > request.most_bytes():
        require_size(size, request.most_bytes())
    return None
