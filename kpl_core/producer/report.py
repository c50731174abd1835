"""What a flush or a close says: where every accepted user record is."""

from collections.abc import Mapping

import msgspec


class ProducerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of user records since the producer was entered, and of those its files held then.

    `accepted = delivered + failed + spooled + dead_lettered + buffered`, always. After a close
    nothing is buffered: what could not be sent is spooled or dead-lettered, where that is configured,
    else it has failed with reason `Shutdown`; what was sent and never answered with `Unknown` (it
    may be stored).
    """

    accepted: int
    delivered: int
    failed: Mapping[str, int]
    # Stored to be sent later. With a sink instead of a file, dead letters stay there.
    spooled: int = 0
    dead_lettered: int = 0
    buffered: int
    # Key and data of what is buffered.
    buffered_bytes: int
    # Those of the accepted ones that the files of the producer held when it was entered.
    found: int = 0
    # A flush: everything put before it is final. A close: nothing had to be given up.
    complete: bool

    @property
    def failed_total(self) -> int:
        """Return how many user records failed, for all reasons together."""
        return sum(self.failed.values())

    @property
    def all_delivered(self) -> bool:
        """Return True if none failed or is buffered, and no more are kept on disk than were found there."""
        return not self.failed_total and not self.buffered and self.spooled + self.dead_lettered <= self.found

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.failed.items()))
        failed = f"{self.failed_total:,} failed" + (f" ({reasons})" if reasons else "")
        kept = "".join(
            f", {count:,} {name}"
            for name, count in (("spooled", self.spooled), ("dead-lettered", self.dead_lettered))
            if count
        )
        return f"{self.accepted:,} accepted: {self.delivered:,} delivered, {failed}{kept}, {self.buffered:,} buffered"
