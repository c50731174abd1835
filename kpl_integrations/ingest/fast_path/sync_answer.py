"""Answer a complete request in the call that receives its last byte, without a task or ASGI messages.

Most requests are complete when their header fields are, and need no waiting. The work of ASGI for such a request (a
task, an event, two messages in each direction) costs more than putting its records. So the server's protocol tries
this first. A request that waits for the results of its records is answered by a callback (`PendingAnswer`). One that
may have to wait for anything else goes through ASGI, and both ways end in the same route.

The head and the body are handled separately, because most requests of a connection have the same head.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple, Protocol

from kpl_core import Deliveries
from kpl_core.producer.delivery import wait_with
from kpl_integrations.ingest.admission.acknowledgement import Acknowledged
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, Refused, over_cpu_share
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.http.answers import Headers, Tally, json_headers, problem_of, quota_headers
from kpl_integrations.ingest.http.raw_answers import FAILED_CONTENT
from kpl_integrations.ingest.http.request_head import RecordsHead, records_head
from kpl_integrations.ingest.routes.records import PREFIX, SUFFIX, PutRequest, RecordsRoute
from kpl_integrations.ingest.tenants import Tenant

_PREFIX: Final = PREFIX.encode()
_SUFFIX: Final = SUFFIX.encode()
_LONGEST_TARGET: Final = 512
# A target with one of these needs a parser.
_NOT_PLAIN: Final = (b"%", b"#")
# Answers up to this size say how many records were accepted, or where one was stored. Many requests share them.
_SHORT_BYTES: Final = 256
_CLOSE: Final = (b"connection", b"close")
# Requests above a share of CPU time are asked to come back within so many seconds.
_MOST_RETRY_SECONDS: Final = 3
# A longer record costs more to copy than a batch saves.
_MOST_SINGLE_BYTES: Final = 4_096


class SyncAnswer(NamedTuple):
    """`content` follows the server's own header fields. `closes`: the connection is closed after this answer."""

    status: int
    content: bytes
    closes: bool = False


class PendingAnswer:
    """An answer that waits until all deliveries of its request have results.

    A connection has it in place of a `RequestCycle`, so that requests behind it wait and a shutdown lets it finish.
    It is also a waiter of an outcome.
    """

    __slots__ = ("_deliveries", "_finished", "_make", "_open", "_soon", "keep_alive", "log", "response_complete")
    # The body is complete.
    more_body = False

    def __init__(self, deliveries: Deliveries, make: Callable[[], SyncAnswer]) -> None:
        self._make = make
        # Called with the status, if the request is logged.
        self.log: Callable[[int], None] | None = None
        self.response_complete = False
        self.keep_alive = True
        self._deliveries = deliveries
        self._open = deliveries.open_outcomes()

    def begin(self, soon: Callable[[Callable[[], None]], object], finished: "Callable[[PendingAnswer], None]") -> None:
        """Call `finished` when all results are known; `soon` calls a function outside of the pipeline's work."""
        self._soon = soon
        self._finished = finished
        self._look()

    def client_gone(self) -> None:
        """Do nothing: the records are on their way."""

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

    def answer(self) -> SyncAnswer:
        """Return the answer, because all results are known."""
        answer = self._make()
        if self.log is not None:
            self.log(answer.status)
        return answer


class SyncAnswerer(Protocol):
    """What the server's protocol calls before it calls the application."""

    def sync_head(self, target: bytes, headers: Headers) -> RecordsHead | None:
        """Return the parsed head of a POST that may need no waiting, else None."""

    def tenant_of(self, head: RecordsHead) -> Tenant | None:
        """Return the tenant of a request with valid credentials, else None."""

    def sync_refusal(self, head: RecordsHead, body: bytes, client: str) -> SyncAnswer:
        """Return the answer to a request above its tenant's share of CPU time, and count it."""

    def sync_answer(self, head: RecordsHead, body: bytes, client: str) -> SyncAnswer | PendingAnswer | None:
        """Return the answer to a complete request from this address, or one that waits for results.

        None: it may have to wait, and nothing has happened.
        """

    most_single_bytes: int
    """The largest body of a request that may wait in a batch; 0: none may."""

    def sync_answer_together(self, head: RecordsHead, bodies: Sequence[bytes]) -> SyncAnswer | None:
        """Return the answer to each of several requests with one record; None: answer each alone.

        `head` is the head of one of them. The others have the same tenant, stream and options.
        """


def sync_head(target: bytes, headers: Headers) -> RecordsHead | None:
    """Return the parsed head of a request for records, or None if the application has to handle the request."""
    place = _place(target) if len(target) <= _LONGEST_TARGET else None
    if place is None:
        return None
    fields = dict(headers)
    if len(fields) != len(headers) or b"idempotency-key" in fields:
        return None
    try:
        return records_head(*place, fields)
    except Refused:
        # The application checks the credentials before it reports an invalid option.
        return None


def sync_answer(
    records: RecordsRoute, tally: Tally, head: RecordsHead, body: bytes, client: str
) -> SyncAnswer | PendingAnswer | None:
    """Return and count the answer to a request that waits at most for results. None: nothing has happened."""
    try:
        answered = records.answer_sync(head, body, client)
    except Refused as refused:
        return _refusal(tally, refused)
    if answered is None:
        return None
    answer, account = answered
    if isinstance(answer, PutRequest):
        return PendingAnswer(answer.deliveries, partial(_delivered, records, tally, answer))
    return _accepted(records, tally, answer, account)


def most_single_bytes(max_body_bytes: int, max_record_bytes: int) -> int:
    """Return the largest body of a request that may be answered together with others."""
    return min(_MOST_SINGLE_BYTES, max_body_bytes, max_record_bytes)


def sync_answer_together(
    records: RecordsRoute, tally: Tally, head: RecordsHead, bodies: Sequence[bytes]
) -> SyncAnswer | None:
    """Return and count the answer to each of these requests with one record. None: nothing has happened."""
    answer = records.queue_together(head, bodies)
    if answer is not None:
        tally.answers[answer.status] += len(bodies)
        return _without_quota(answer)
    return None


def _delivered(records: RecordsRoute, tally: Tally, request: PutRequest) -> SyncAnswer:
    try:
        return _accepted(records, tally, request.answer(records.now()), request.account)
    except Refused as refused:
        return _refusal(tally, refused)


def _refusal(tally: Tally, refused: Refused) -> SyncAnswer:
    status, headers, problem = problem_of(refused)
    tally.refusals[refused.refusal] += 1
    tally.answers[status] += 1
    return encoded(status, headers, problem)


def _accepted(records: RecordsRoute, tally: Tally, answer: Acknowledged, account: TenantAccount) -> SyncAnswer:
    tally.answers[answer.status] += 1
    if account.quota is None and len(answer.body) <= _SHORT_BYTES:
        return _without_quota(answer)
    headers = [*json_headers(answer.body), *quota_headers(account, records.now())]
    return encoded(answer.status, headers, answer.body)


def sync_refusal(tally: Tally, account: TenantAccount | None, chance: float) -> SyncAnswer:
    """Return and count the answer to a request above its tenant's share of CPU time. `chance` spreads the retries."""
    tally.refusals[Refusal.CPU_SHARE] += 1
    tally.answers[REFUSALS[Refusal.CPU_SHARE].status] += 1
    if account is not None:
        account.requests += 1
        account.refused[Refusal.CPU_SHARE] += 1
    return _over_cpu_share(None if account is None else account.tenant, 1 + int(_MOST_RETRY_SECONDS * chance))


@lru_cache(maxsize=1_024)
def _over_cpu_share(tenant: Tenant | None, retry_after: int) -> SyncAnswer:
    return encoded(*problem_of(over_cpu_share(tenant, retry_after=retry_after)))


def encoded(status: int, headers: Headers, body: bytes) -> SyncAnswer:
    """Return an answer as the bytes for the socket."""
    fields = b"".join([b"%b: %b\r\n" % field for field in headers])
    return SyncAnswer(status, b"%b\r\n%b" % (fields, body), _CLOSE in headers)


FAILED: Final = SyncAnswer(500, FAILED_CONTENT, closes=True)


@lru_cache(maxsize=256)
def _without_quota(answer: Acknowledged) -> SyncAnswer:
    return encoded(answer.status, json_headers(answer.body), answer.body)


@lru_cache(maxsize=1_024)
def _place(target: bytes) -> tuple[str, bytes] | None:
    """Return the stream and the query of a target in its plain form, without percent-encoding."""
    path, _, query = target.partition(b"?")
    if not (path.startswith(_PREFIX) and path.endswith(_SUFFIX) and path.isascii()):
        return None
    if len(path) <= len(_PREFIX) + len(_SUFFIX) or any(part in target for part in _NOT_PLAIN):
        return None
    return path[len(_PREFIX) : -len(_SUFFIX)].decode(), query
