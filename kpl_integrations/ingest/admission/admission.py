"""Why a request is not taken, and how the client hears of it: one table, read by the code, the tests and OpenAPI.

Problem types: "quota-exceeded" and "temporary-reduced-capacity" are registered by the RateLimit draft
(draft-ietf-httpapi-ratelimit-headers); the others are "about:blank" with a `code` of ours (RFC 9457).
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

__all__ = ["ADMISSION", "Answer", "Refusal", "Refused"]


class Refusal(enum.Enum):
    """What kept a request out."""

    QUOTA = "quota"
    QUEUE_SHARE = "queue share"
    NO_ROOM = "no room"
    BREAKER_OPEN = "breaker open"
    DRAINING = "draining"
    NOT_SPOOLED = "not spooled"
    STREAM_UNCERTAIN = "stream uncertain"
    NO_CREDENTIALS = "no credentials"
    BAD_CREDENTIALS = "bad credentials"
    FORBIDDEN = "forbidden"
    UNKNOWN_STREAM = "unknown stream"
    UNKNOWN_PATH = "unknown path"
    METHOD = "method"
    TOO_LARGE = "too large"
    SLOW_BODY = "slow body"
    UNSUPPORTED = "unsupported"
    MALFORMED = "malformed"
    BAD_RECORDS = "bad records"
    BAD_PARAMETER = "bad parameter"
    KEY_IN_USE = "idempotency key in use"
    KEY_REUSED = "idempotency key reused"
    EXPIRED = "expired"
    NOT_DELIVERED = "not delivered"


class Answer(NamedTuple):
    """A row: the status, the problem's code and title, and which header fields go with it."""

    status: int
    code: str
    title: str
    # Retry-After: the same request can succeed later.
    comes_again: bool = False
    # RateLimit and RateLimit-Policy, where the tenant has a quota.
    shows_quota: bool = False
    # What the client still sends is not worth reading.
    closes: bool = False


_QUOTA: Final = "quota-exceeded"
_CAPACITY: Final = "temporary-reduced-capacity"

ADMISSION: Final[Mapping[Refusal, Answer]] = MappingProxyType(
    {
        # The tenant asks for more than its own.
        Refusal.QUOTA: Answer(429, _QUOTA, "Over the tenant's rate", comes_again=True, shows_quota=True),
        Refusal.QUEUE_SHARE: Answer(429, _QUOTA, "Over the tenant's share of the queue", comes_again=True),
        # The gateway, or what is behind it, can take no more from anybody.
        Refusal.NO_ROOM: Answer(503, _CAPACITY, "Out of room", comes_again=True),
        Refusal.BREAKER_OPEN: Answer(503, _CAPACITY, "The stream does not answer", comes_again=True),
        Refusal.DRAINING: Answer(503, _CAPACITY, "Shutting down", comes_again=True, closes=True),
        Refusal.NOT_SPOOLED: Answer(503, _CAPACITY, "The spool takes no more", comes_again=True),
        Refusal.STREAM_UNCERTAIN: Answer(503, _CAPACITY, "The stream could not be looked up", comes_again=True),
        # Who, and what for.
        Refusal.NO_CREDENTIALS: Answer(401, "no-credentials", "No credentials"),
        Refusal.BAD_CREDENTIALS: Answer(401, "bad-credentials", "Unknown credentials"),
        Refusal.FORBIDDEN: Answer(403, "stream-forbidden", "Not this tenant's stream"),
        Refusal.UNKNOWN_STREAM: Answer(404, "unknown-stream", "No such stream"),
        Refusal.UNKNOWN_PATH: Answer(404, "unknown-path", "No such resource"),
        Refusal.METHOD: Answer(405, "method-not-allowed", "Method not allowed"),
        # What the request says.
        Refusal.TOO_LARGE: Answer(413, "too-large", "Too large", closes=True),
        Refusal.SLOW_BODY: Answer(408, "slow-body", "The body did not come in time", closes=True),
        Refusal.UNSUPPORTED: Answer(415, "unsupported-media-type", "Unsupported content"),
        Refusal.MALFORMED: Answer(400, "malformed", "Malformed body"),
        Refusal.BAD_RECORDS: Answer(400, "bad-records", "Some records cannot be taken"),
        Refusal.BAD_PARAMETER: Answer(400, "bad-parameter", "A parameter cannot be understood"),
        Refusal.KEY_IN_USE: Answer(
            409, "idempotency-key-in-use", "The first request is not answered", comes_again=True
        ),
        Refusal.KEY_REUSED: Answer(422, "idempotency-key-reused", "The key belongs to another request"),
        # Accepted, waited for, and not delivered.
        Refusal.EXPIRED: Answer(504, "expired", "No record was delivered in time"),
        Refusal.NOT_DELIVERED: Answer(502, "not-delivered", "Kinesis took no record"),
    }
)


class Refused(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A request is not taken; whoever catches it answers `ADMISSION[refusal]`.

    `detail` is a sentence for people, with value and bound and never a secret. `retry_after` is in seconds,
    for rows that come again. `code` replaces the row's where more is known. `extensions` are further members
    of the problem, `headers` further header fields.
    """

    def __init__(
        self,
        refusal: Refusal,
        detail: str,
        *,
        retry_after: float = 1.0,
        code: str | None = None,
        extensions: Mapping[str, Any] | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(f"{refusal.value}: {detail}")
        self.refusal = refusal
        self.detail = detail
        self.retry_after = retry_after
        self.code = code
        self.extensions = extensions
        self.headers = headers
