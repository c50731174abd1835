"""Requests that are answered in the very call that brings their last byte: no task, no messages, no waiting.

Nearly every request is whole when its header fields are, and asks for nothing that takes time. What ASGI does
around such a one (a task, an event, two messages each way) costs more than taking its records. So the server's
protocol asks here first; whatever may have to wait goes through ASGI as ever, and both end in the same route.

What a head asks for and what becomes of a body are two questions, for most requests of a connection have one head.
"""

from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from kpl_integrations.ingest.admission.acknowledgement import Acknowledged
from kpl_integrations.ingest.admission.admission import Refused
from kpl_integrations.ingest.http.http_answer import Headers, json_headers, quota_headers
from kpl_integrations.ingest.http.problem import problem_of
from kpl_integrations.ingest.http.tally import Tally
from kpl_integrations.ingest.routes.records_head import RecordsHead, records_head
from kpl_integrations.ingest.routes.records_route import PREFIX, SUFFIX, RecordsRoute

__all__ = ["AnswersAtOnce", "AtOnceAnswer", "answer_at_once", "head_at_once", "written"]

_PREFIX: Final = PREFIX.encode()
_SUFFIX: Final = SUFFIX.encode()
_LONGEST_TARGET: Final = 512
# What the plain form of a target has none of; whoever needs them needs a parser.
_NOT_PLAIN: Final = (b"%", b"#")
# What says no more than how many were accepted, as nearly all answers do, is written once for all requests.
_SHORT_BYTES: Final = 64
_CLOSE: Final = (b"connection", b"close")


class AtOnceAnswer(NamedTuple):
    """`content` is all that follows the server's own header fields; `closes`: no request follows it."""

    status: int
    content: bytes
    closes: bool = False


class AnswersAtOnce(Protocol):
    """Whom a server's protocol asks before it calls the application."""

    def head_at_once(self, target: bytes, headers: Headers) -> RecordsHead | None:
        """Return what the head of a POST asks for, if that may need no waiting."""

    def answer_at_once(self, head: RecordsHead, body: bytes) -> AtOnceAnswer | None:
        """Return the answer to a request that is whole; None: it may have to wait, and nothing has happened."""


def head_at_once(target: bytes, headers: Headers) -> RecordsHead | None:
    """Return what a head asks for, None if only the application can tell."""
    place = _place(target) if len(target) <= _LONGEST_TARGET else None
    if place is None:
        return None
    fields = dict(headers)
    if len(fields) != len(headers) or b"idempotency-key" in fields or b"content-length" not in fields:
        return None
    try:
        return records_head(*place, fields)
    except Refused:
        # Who asks comes before what for.
        return None


def answer_at_once(records: RecordsRoute, tally: Tally, head: RecordsHead, body: bytes) -> AtOnceAnswer | None:
    """Return the answer to a request that needs no waiting, and count it; None: nothing has happened."""
    try:
        answered = records.answer_at_once(head, body)
    except Refused as refused:
        status, headers, problem = problem_of(refused)
        tally.refusals[refused.refusal] += 1
        tally.answers[status] += 1
        return written(status, headers, problem)
    if answered is None:
        return None
    answer, account = answered
    tally.answers[answer.status] += 1
    if account.quota is None and len(answer.body) <= _SHORT_BYTES:
        return _without_quota(answer)
    headers = [*json_headers(answer.body), *quota_headers(account, records.now())]
    return written(answer.status, headers, answer.body)


def written(status: int, headers: Headers, body: bytes) -> AtOnceAnswer:
    """Write an answer as it goes to the socket."""
    fields = b"".join([b"%b: %b\r\n" % field for field in headers])
    return AtOnceAnswer(status, b"%b\r\n%b" % (fields, body), _CLOSE in headers)


@lru_cache(maxsize=256)
def _without_quota(answer: Acknowledged) -> AtOnceAnswer:
    return written(answer.status, json_headers(answer.body), answer.body)


@lru_cache(maxsize=1_024)
def _place(target: bytes) -> tuple[str, bytes] | None:
    """Return the stream and the query of a target that is the route's in its plain form."""
    path, _, query = target.partition(b"?")
    if not (path.startswith(_PREFIX) and path.endswith(_SUFFIX) and path.isascii()):
        return None
    if len(path) <= len(_PREFIX) + len(_SUFFIX) or any(part in target for part in _NOT_PLAIN):
        return None
    return path[len(_PREFIX) : -len(_SUFFIX)].decode(), query
