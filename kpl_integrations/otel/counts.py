"""Where everything that was given to an exporter is, by number."""

from collections.abc import Mapping
from typing import Final

import msgspec

__all__ = ["CLOSED", "ENCODING_FAILED", "FULL", "SENDER_FAILED", "TOO_LARGE", "UNKNOWN", "ExportCounts"]

# Why something did not arrive, beside the producer's error codes (Expired, Shutdown, ...).
CLOSED: Final = "Closed"
ENCODING_FAILED: Final = "EncodingFailed"
FULL: Final = "Full"
SENDER_FAILED: Final = "SenderFailed"
TOO_LARGE: Final = "TooLarge"
UNKNOWN: Final = "Unknown"


class ExportCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of spans, log records or data points since the exporter was made, in this process.

    `exported = delivered + kept + lost + pending`, always. `Unknown` among the reasons means sent and never
    answered before the shutdown's time was over: it may be stored. `kept` is in the spool or among the
    dead letters of `config`.
    """

    exported: int
    delivered: int
    kept: int = 0
    lost: Mapping[str, int]
    pending: int

    @property
    def lost_total(self) -> int:
        """Return how many were lost, for whatever reason."""
        return sum(self.lost.values())

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.lost.items()))
        lost = f"{self.lost_total:,} lost" + (f" ({reasons})" if reasons else "")
        return f"{self.exported:,} exported: {self.delivered:,} delivered, {lost}, {self.pending:,} pending"
