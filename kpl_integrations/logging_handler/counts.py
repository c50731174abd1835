"""Where every log record is, by number."""

from collections.abc import Mapping
from typing import Final

import msgspec

__all__ = ["CLOSED", "EVICTED", "FORMAT_ERROR", "FULL", "NOT_KEPT", "SENDER_FAILED", "SHUTDOWN", "LogCounts"]

# Why a record did not arrive, beside the error codes of the producer (Expired, Shutdown, Unknown, ...).
FULL: Final = "Full"
EVICTED: Final = "Evicted"
CLOSED: Final = "Closed"
FORMAT_ERROR: Final = "FormatError"
SENDER_FAILED: Final = "SenderFailed"
SHUTDOWN: Final = "Shutdown"
# Too large for the stream, and the dead letters did not take it.
NOT_KEPT: Final = "NotKept"


class LogCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of log records since the handler was made, in this process.

    `emitted = delivered + kept + dropped + buffered`, always. A record that was split counts once, and as dropped
    if a piece of it was; the handler's own notices are not counted. `Unknown` among the reasons means sent
    and never answered: it may be stored. `kept` is in the spool or among the dead letters.
    """

    emitted: int
    delivered: int
    kept: int = 0
    dropped: Mapping[str, int]
    buffered: int

    @property
    def dropped_total(self) -> int:
        """Return how many records were dropped, for whatever reason."""
        return sum(self.dropped.values())
