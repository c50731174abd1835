"""The reasons for rejecting a request, and the answer to each. The code, the tests and OpenAPI read this table.

Problem types: "quota-exceeded" and "temporary-reduced-capacity" are registered by the RateLimit draft
(draft-ietf-httpapi-ratelimit-headers). The others are "about:blank" with a `code` of this gateway (RFC 9457).
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kpl_integrations.ingest.decoding import DecodeRefusal


class Refusal(enum.Enum):
    """The reasons for a rejection."""

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
    HOST = "host"
    WRONG_KEYS = "wrong keys"
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


class RefusalAnswer(NamedTuple):
    """A row of the table: the status, the problem's code and title, and the header fields."""

    status: int
    code: str
    title: str
    # Retry-After if the code that rejects has no better value; None: a retry of the same request cannot succeed.
    retry_after_seconds: float | None = None
    # Sends RateLimit and RateLimit-Policy if the tenant has a quota.
    shows_quota: bool = False
    # Closes the connection, because the rest of the request is not worth reading.
    closes: bool = False


_QUOTA: Final = "quota-exceeded"
_CAPACITY: Final = "temporary-reduced-capacity"

REFUSALS: Final[Mapping[Refusal, RefusalAnswer]] = MappingProxyType(
    {
        # The tenant is above its own limits.
        Refusal.QUOTA: RefusalAnswer(429, _QUOTA, "Over the tenant's rate", retry_after_seconds=1.0, shows_quota=True),
        Refusal.QUEUE_SHARE: RefusalAnswer(
            429, _QUOTA, "Over the tenant's share of the queue", retry_after_seconds=1.0
        ),
        # The gateway or Kinesis has no capacity left for any tenant.
        Refusal.NO_ROOM: RefusalAnswer(503, _CAPACITY, "Out of room", retry_after_seconds=1.0),
        Refusal.BREAKER_OPEN: RefusalAnswer(503, _CAPACITY, "The stream does not answer", retry_after_seconds=1.0),
        Refusal.DRAINING: RefusalAnswer(503, _CAPACITY, "Shutting down", retry_after_seconds=1.0, closes=True),
        Refusal.NOT_SPOOLED: RefusalAnswer(503, _CAPACITY, "The spool takes no more", retry_after_seconds=1.0),
        Refusal.STREAM_UNCERTAIN: RefusalAnswer(
            503, _CAPACITY, "The stream could not be looked up", retry_after_seconds=2.0
        ),
        # Credentials, permissions and paths.
        Refusal.NO_CREDENTIALS: RefusalAnswer(401, "no-credentials", "No credentials"),
        Refusal.BAD_CREDENTIALS: RefusalAnswer(401, "bad-credentials", "Unknown credentials"),
        Refusal.WRONG_KEYS: RefusalAnswer(429, "too-many-wrong-keys", "Too many wrong keys", retry_after_seconds=12.0),
        Refusal.FORBIDDEN: RefusalAnswer(403, "stream-forbidden", "Not this tenant's stream"),
        Refusal.UNKNOWN_STREAM: RefusalAnswer(404, "unknown-stream", "No such stream"),
        Refusal.UNKNOWN_PATH: RefusalAnswer(404, "unknown-path", "No such resource"),
        Refusal.METHOD: RefusalAnswer(405, "method-not-allowed", "Method not allowed"),
        Refusal.HOST: RefusalAnswer(421, "unknown-host", "Not a name of this gateway"),
        # The content of the request.
        Refusal.TOO_LARGE: RefusalAnswer(413, "too-large", "Too large", closes=True),
        Refusal.SLOW_BODY: RefusalAnswer(408, "slow-body", "The body did not come in time", closes=True),
        Refusal.UNSUPPORTED: RefusalAnswer(415, "unsupported-media-type", "Unsupported content"),
        Refusal.MALFORMED: RefusalAnswer(400, "malformed", "Malformed body"),
        Refusal.BAD_RECORDS: RefusalAnswer(400, "bad-records", "Some records cannot be taken"),
        Refusal.BAD_PARAMETER: RefusalAnswer(400, "bad-parameter", "A parameter cannot be understood"),
        Refusal.KEY_IN_USE: RefusalAnswer(
            409, "idempotency-key-in-use", "The first request is not answered", retry_after_seconds=1.0
        ),
        Refusal.KEY_REUSED: RefusalAnswer(422, "idempotency-key-reused", "The key belongs to another request"),
        # Accepted with ack=delivered, and not delivered.
        Refusal.EXPIRED: RefusalAnswer(504, "expired", "No record was delivered in time"),
        Refusal.NOT_DELIVERED: RefusalAnswer(502, "not-delivered", "Kinesis took no record"),
    }
)


class Refused(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A request is rejected. The handler answers `REFUSALS[refusal]`.

    `detail` is a sentence for people, with the value and the bound and never a secret. `retry_after` in seconds
    replaces the row's value. `code` replaces the row's code where more is known. `extensions` are further members
    of the problem (`http.answers.Problem`), `headers` further header fields. `work_bytes` is how much was received or
    inflated before the request was rejected, as far as the handler does not know it.
    """

    def __init__(
        self,
        refusal: Refusal,
        detail: str,
        *,
        retry_after: float | None = None,
        code: str | None = None,
        extensions: Mapping[str, Any] | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(f"{refusal.value}: {detail}")
        self.refusal = refusal
        self.detail = detail
        row = REFUSALS[refusal].retry_after_seconds
        self.retry_after = row if row is None or retry_after is None else retry_after
        self.code = code
        self.extensions = extensions
        self.headers = headers
        self.work_bytes = 0


_OF_DECODING: Final = {
    400: Refusal.MALFORMED,
    413: Refusal.TOO_LARGE,
    415: Refusal.UNSUPPORTED,
}


def refused_decoding(refusal: DecodeRefusal, inflated_bytes: int = 0) -> Refused:
    """Return a decoder's refusal as a rejected request."""
    place = {"index": refusal.index, "field": refusal.field}
    refused = Refused(
        _OF_DECODING[refusal.status],
        refusal.detail,
        code=refusal.code,
        extensions={name: value for name, value in place.items() if value is not None},
    )
    refused.work_bytes = inflated_bytes or refusal.inflated_bytes
    return refused
