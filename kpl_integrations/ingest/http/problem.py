"""A refusal as HTTP: status, header fields, and a problem document (RFC 9457)."""

import math
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kpl_integrations.ingest.admission.admission import ADMISSION, Refused

__all__ = ["PROBLEM_JSON", "REGISTERED_TYPES", "problem_of"]

PROBLEM_JSON: Final = b"application/problem+json"
_REGISTRY: Final = "https://iana.org/assignments/http-problem-types#"
REGISTERED_TYPES: Final = frozenset({"quota-exceeded", "temporary-reduced-capacity"})

Header = tuple[bytes, bytes]


def problem_of(refused: Refused, *, quota_headers: tuple[Header, ...] = ()) -> tuple[int, list[Header], bytes]:
    """Return status, header fields and body of the answer to a refused request."""
    answer = ADMISSION[refused.refusal]
    document: dict[str, Any] = {
        "type": _REGISTRY + answer.code if answer.code in REGISTERED_TYPES else "about:blank",
        "title": answer.title if answer.code in REGISTERED_TYPES else HTTPStatus(answer.status).phrase,
        "status": answer.status,
        "detail": refused.detail,
        "code": refused.code or answer.code,
        **(refused.extensions or {}),
    }
    body = msgspec.json.encode(document)
    headers = [(b"content-type", PROBLEM_JSON), (b"content-length", str(len(body)).encode()), *refused.headers]
    if answer.comes_again:
        headers.append((b"retry-after", str(max(1, math.ceil(refused.retry_after))).encode()))
    if answer.shows_quota:
        headers += quota_headers
    if answer.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b'Bearer realm="kpl-ingest"'))
    if answer.closes:
        headers.append((b"connection", b"close"))
    return answer.status, headers, body
