"""The result of one user record: success or failure, its attempts, and the reason of a failure.

The reasons are a closed set, which dead letters, replay and metrics share.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

import msgspec

# Error codes of the producer, which the service never sends. The names are the KPL's where it has one.
EXPIRED: Final = "Expired"
INTERNAL: Final = "Internal"
WRONG_SHARD: Final = "Wrong Shard"
RECORD_COUNT_MISMATCH: Final = "RecordCountMismatch"
SHUTDOWN: Final = "Shutdown"
UNKNOWN: Final = "Unknown"
BREAKER_OPEN: Final = "BreakerOpen"
# A bulk record beyond the bulk tier's share of the buffer.
RATE_LIMITED: Final = "RateLimited"
# The spool is full or failed, and the record must be in the spool before it is acknowledged.
NOT_SPOOLED: Final = "NotSpooled"

# Where a user record is stored that was not delivered.
Place = Literal["spooled", "dead_lettered"]


class Attempt(NamedTuple):
    """One attempt to deliver a user record.

    `started_at` and `ended_at` are seconds of the event loop's monotonic clock. `error_code` is a code of Kinesis or
    one of the producer's: `Expired`, `Internal`, `Wrong Shard`, `RecordCountMismatch`, `Shutdown`, `Unknown` (sent,
    but never answered), `BreakerOpen`, `RateLimited`, `NotSpooled`.
    """

    success: bool
    error_code: str | None
    error_message: str | None
    started_at: float
    ended_at: float


class RecordResult(msgspec.Struct, frozen=True, gc=False):
    """The final result of one user record. A failed put returns this value; it never raises an exception.

    If the record failed but is not lost, `kept` is "spooled" (it will be delivered later) or "dead_lettered".
    """

    successful: bool
    shard_id: str | None
    sequence_number: str | None
    attempts: tuple[Attempt, ...]
    kept: Place | None = None

    @property
    def error_code(self) -> str | None:
        """Return the error code of the last attempt, or None after a success."""
        return self.attempts[-1].error_code if self.attempts else None

    @property
    def error_message(self) -> str | None:
        """Return the error message of the last attempt, or None after a success."""
        return self.attempts[-1].error_message if self.attempts else None


Reason = Literal[
    "rate_limited",
    "ttl",
    "retries_exhausted",
    "throttled",
    "invalid",
    "oversize",
    "breaker_open",
    "shutdown",
    "unserialisable",
]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)

# The error code of the last attempt -> the reason. `reason_of_code` handles "Expired".
REASON_BY_ERROR_CODE: Final[Mapping[str, Reason]] = {
    "ProvisionedThroughputExceededException": "throttled",
    "LimitExceededException": "throttled",
    "KMSThrottlingException": "throttled",
    "ValidationException": "invalid",
    "InvalidArgumentException": "invalid",
    BREAKER_OPEN: "breaker_open",
    RATE_LIMITED: "rate_limited",
    SHUTDOWN: "shutdown",
    UNKNOWN: "shutdown",
}

# Records that failed for one of these reasons would fail on every retry.
INCURABLE: Final[frozenset[Reason]] = frozenset({"invalid", "oversize", "unserialisable"})


def reason_of_code(code: str, *, attempts: int) -> Reason:
    """Return why a user record failed after this number of attempts, the last of which has this error code.

    The expiration is itself an attempt. So a record that expired with one attempt was never sent: its reason is
    "ttl". With more attempts the reason is "retries_exhausted".
    """
    if code == EXPIRED:
        return "ttl" if attempts == 1 else "retries_exhausted"
    return REASON_BY_ERROR_CODE.get(code, "retries_exhausted")


def reason_of(result: RecordResult) -> Reason:
    """Return the reason of a failed result."""
    return reason_of_code(result.error_code or "", attempts=len(result.attempts))
