"""What a connection asks of its gateway, a request that waits for results, and answers as bytes.

Most requests are complete when their head is, and need no waiting. The work of ASGI for such a request (a task, an
event, two messages in each direction) costs more than putting its records. So the connection runs it itself
(`request/request.py`), in the call that receives its last byte. If the request waits for the results of its records,
a callback goes on with it. If it waits for anything else, a task does.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from kpl_core import Deliveries
from kpl_core.producer.delivery import wait_with
from kpl_integrations.asgi.protocol import Header, Send
from kpl_integrations.ingest.admission.acknowledgement import JSON, Answer
from kpl_integrations.ingest.http.answers import Headers
from kpl_integrations.ingest.http.raw_answers import FAILED_FIELDS, FAILED_TEXT
from kpl_integrations.ingest.http.request_head import RecordsHead, Server, records_head
from kpl_integrations.ingest.request.needs import Need, Steps
from kpl_integrations.ingest.request.records import PREFIX, SUFFIX, RecordsRequest
from kpl_integrations.ingest.tenants import Tenant

_PREFIX: Final = PREFIX.encode()
_SUFFIX: Final = SUFFIX.encode()
_LONGEST_TARGET: Final = 512
# A target with one of these needs a parser.
_NOT_PLAIN: Final = (b"%", b"#")
# Answers up to this size say how many records were accepted, or where one was stored. Many requests share them.
_SHORT_BYTES: Final = 256
_CLOSE: Final = (b"connection", b"close")


class EncodedAnswer(NamedTuple):
    """`content` follows the server's own header fields. `closes`: the connection is closed after this answer."""

    status: int
    content: bytes
    closes: bool = False


def encoded(answer: Answer) -> EncodedAnswer:
    """Return an answer as the bytes for the socket."""
    if answer.fields is JSON and len(answer.body) <= _SHORT_BYTES:
        return _short(answer.status, answer.body)
    return _encoded(answer.status, answer.headers(), answer.body)


@lru_cache(maxsize=256)
def _short(status: int, body: bytes) -> EncodedAnswer:
    return _encoded(status, Answer(status, body).headers(), body)


def _encoded(status: int, headers: Sequence[Header], body: bytes) -> EncodedAnswer:
    fields = b"".join([b"%b: %b\r\n" % field for field in headers])
    return EncodedAnswer(status, b"%b\r\n%b" % (fields, body), _CLOSE in headers)


FAILED: Final = _encoded(500, FAILED_FIELDS, FAILED_TEXT)


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


class Requests(Protocol):
    """What a connection calls before it calls the application."""

    most_single_bytes: int
    """The largest body of a request that may wait in a batch; 0: none may."""

    def head_of(self, target: bytes, headers: Headers) -> RecordsHead | None:
        """Return the parsed head of a POST that a connection may run itself, else None."""

    def tenant_of(self, head: RecordsHead) -> Tenant | None:
        """Return the tenant of a request with valid credentials, else None."""

    def begin(self, head: RecordsHead, body: bytes, client: str, server: Server | None) -> RecordsRequest | None:
        """Return a complete request from this address; None: the application has to handle it."""

    def put_together(self, head: RecordsHead, bodies: Sequence[bytes]) -> Answer | list[Steps[Answer]] | None:
        """Put the records of several requests with one each.

        Return the answer to each, or what each of them does next; None: run each alone.
        `head` is the head of one of them. The others have the same tenant, stream and options.
        """

    async def finish(self, steps: Steps[Answer], need: Need, send: Send) -> None:
        """Run a request that waits for `need` to its end, and send its answer."""


def records_head_of(target: bytes, headers: Headers) -> RecordsHead | None:
    """Return the parsed head of a request for records in its plain form, else None: the application handles it."""
    place = _place(target) if len(target) <= _LONGEST_TARGET else None
    if place is None:
        return None
    fields = dict(headers)
    return records_head(*place, fields) if len(fields) == len(headers) else None


@lru_cache(maxsize=1_024)
def _place(target: bytes) -> tuple[str, bytes] | None:
    """Return the stream and the query of a target in its plain form, without percent-encoding."""
    path, _, query = target.partition(b"?")
    if not (path.startswith(_PREFIX) and path.endswith(_SUFFIX) and path.isascii()):
        return None
    if len(path) <= len(_PREFIX) + len(_SUFFIX) or any(part in target for part in _NOT_PLAIN):
        return None
    return path[len(_PREFIX) : -len(_SUFFIX)].decode(), query
