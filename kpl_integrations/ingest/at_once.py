"""Requests that are answered in the very call that brings their last byte: no task, no messages, no waiting.

Nearly every request is whole when its header fields are, and asks for nothing that takes time. What ASGI does
around such a one (a task, an event, two messages each way) costs more than taking its records. So the server's
protocol asks here first; whatever may have to wait goes through ASGI as ever, and both end in the same route.
"""

from functools import lru_cache
from typing import Final, Protocol

from kpl_integrations.ingest.admission import Refused
from kpl_integrations.ingest.http_answer import Headers, json_headers
from kpl_integrations.ingest.problem import problem_of
from kpl_integrations.ingest.records_route import PREFIX, SUFFIX, RecordsRoute
from kpl_integrations.ingest.tally import Tally

__all__ = ["AnswersAtOnce", "answer_at_once"]

_PREFIX: Final = PREFIX.encode()
_SUFFIX: Final = SUFFIX.encode()
_LONGEST_TARGET: Final = 512
# What the plain form of a target has none of; whoever needs them needs a parser.
_NOT_PLAIN: Final = (b"%", b"#")


class AnswersAtOnce(Protocol):
    """Whom a server's protocol asks before it calls the application."""

    def answer_at_once(self, target: bytes, headers: Headers, body: bytes) -> tuple[int, Headers, bytes] | None:
        """Return status, header fields and body of the answer to a POST that is whole; None: nothing has happened."""


def answer_at_once(
    records: RecordsRoute, tally: Tally, target: bytes, headers: Headers, body: bytes
) -> tuple[int, Headers, bytes] | None:
    """Return the answer to a request that needs no waiting, and count it; None: nothing has happened."""
    place = _place(target) if len(target) <= _LONGEST_TARGET else None
    if place is None:
        return None
    try:
        answered = records.answer_at_once(*place, dict(headers), body)
    except Refused as refused:
        status, fields, problem = problem_of(refused)
        tally.refusals[refused.refusal] += 1
        tally.answers[status] += 1
        return status, fields, problem
    if answered is None:
        return None
    (status, answer), account = answered
    tally.answers[status] += 1
    return status, json_headers(account, answer, records.now()), answer


@lru_cache(maxsize=1_024)
def _place(target: bytes) -> tuple[str, bytes] | None:
    """Return the stream and the query of a target that is the route's in its plain form."""
    path, _, query = target.partition(b"?")
    if not (path.startswith(_PREFIX) and path.endswith(_SUFFIX) and path.isascii()):
        return None
    if len(path) <= len(_PREFIX) + len(_SUFFIX) or any(part in target for part in _NOT_PLAIN):
        return None
    return path[len(_PREFIX) : -len(_SUFFIX)].decode(), query
