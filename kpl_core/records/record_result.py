"""What became of one user record: its result and every attempt made on the way."""

from typing import Final, Literal, NamedTuple

import msgspec

__all__ = [
    "BREAKER_OPEN",
    "EXPIRED",
    "INTERNAL",
    "NOT_SPOOLED",
    "RATE_LIMITED",
    "RECORD_COUNT_MISMATCH",
    "SHUTDOWN",
    "UNKNOWN",
    "WRONG_SHARD",
    "Attempt",
    "Place",
    "RecordResult",
]

# Codes the service never sends: ours, in the KPL's words.
EXPIRED: Final = "Expired"
INTERNAL: Final = "Internal"
WRONG_SHARD: Final = "Wrong Shard"
RECORD_COUNT_MISMATCH: Final = "RecordCountMismatch"
SHUTDOWN: Final = "Shutdown"
UNKNOWN: Final = "Unknown"
BREAKER_OPEN: Final = "BreakerOpen"
# Bulk beyond its share of the room.
RATE_LIMITED: Final = "RateLimited"
# The spool, full or broken, did not take what must be in it before it is acknowledged.
NOT_SPOOLED: Final = "NotSpooled"

# Where a user record is kept that was not delivered.
Place = Literal["spooled", "dead_lettered"]


class Attempt(NamedTuple):
    """One pass through send and classify.

    `started_at` and `ended_at` are seconds on the producer's monotonic clock (the event
    loop's). The codes are Kinesis' own, or one of ours: `Expired`, `Internal`,
    `Wrong Shard`, `RecordCountMismatch`, `Shutdown`, `Unknown` (sent, never answered), `BreakerOpen`,
    `RateLimited`, `NotSpooled`.
    """

    success: bool
    error_code: str | None
    error_message: str | None
    started_at: float
    ended_at: float


class RecordResult(msgspec.Struct, frozen=True, gc=False):
    """The final word on one user record. A failed put is this value, never an exception.

    `kept` says that it was not delivered but is not lost: "spooled" (it will be delivered later), or
    "dead_lettered".
    """

    successful: bool
    shard_id: str | None
    sequence_number: str | None
    attempts: tuple[Attempt, ...]
    kept: Place | None = None

    @property
    def error_code(self) -> str | None:
        """Return the code of the attempt that ended it, None for a success."""
        return self.attempts[-1].error_code if self.attempts else None

    @property
    def error_message(self) -> str | None:
        """Return the message of the attempt that ended it, None for a success."""
        return self.attempts[-1].error_message if self.attempts else None
