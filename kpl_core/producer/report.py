"""What a producer says of itself: where every accepted user record is, and why it is not ready."""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from kpl_core.durability.breaker_gate import WHOLE_STREAM
from kpl_core.durability.circuit_breaker import BreakerState, CircuitBreaker
from kpl_core.pipeline.intake.write_ahead import SpoolState

T = TypeVar("T")

# How often a count is repeated that another thread's change interrupted.
_TRIES: Final = 100


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


def counted(count: Callable[[], T]) -> T:
    """Return what `count` returns. Call it from any thread: it counts again if the loop added a stream meanwhile."""
    for _ in range(_TRIES):
        try:
            return count()
        except RuntimeError:
            # "dictionary changed size during iteration". Counting takes less time than there is between two changes.
            continue
    return count()


def unready_because(
    state: str,
    failure: BaseException | None,
    breakers: Mapping[tuple[str, str], CircuitBreaker],
    spool: SpoolState | None,
) -> list[str]:
    """Return the reasons, each a sentence, to send traffic elsewhere."""
    reasons = [] if state == "open" else [f"the producer is {state}"]
    if failure is not None:
        # Without its text, which may quote what no probe should show.
        reasons = [f"the producer has failed with {type(failure).__name__}"]
    for (stream, shard_id), breaker in breakers.items():
        # One shard in trouble is no reason to send the traffic of the others away.
        if shard_id == WHOLE_STREAM and breaker.known_state is BreakerState.OPEN:
            reasons.append(f"the circuit breaker of stream {stream} is open")
    if spool is not None and (why := spool.unready()) is not None:
        reasons.append(why)
    return reasons
