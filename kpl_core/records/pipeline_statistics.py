"""Where the user records of one stream are."""

from collections.abc import Mapping

import msgspec


class PipelineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the user records of one stream are. The stages are counted one by one, not by subtraction.

    `accepted + replayed + redriven = delivered + failed + spooled + dead_lettered + buffered`: what is
    kept comes back, and each time it does it is delivered, failed or kept again.
    """

    accepted: int
    delivered: int
    failed: Mapping[str, int]
    aggregating: int
    limited: int
    collected: int
    in_flight: int
    backing_off: int
    held: int
    # Waiting for their turn in front of a shard, where flows are configured.
    queueing: int = 0
    # On their way to the disk, before they are acknowledged or after they could not be delivered.
    keeping: int = 0
    # How many times a user record went to the spool or the dead letters, and came back from there.
    spooled: int = 0
    dead_lettered: int = 0
    replayed: int = 0
    redriven: int = 0
    # The state of each shard's circuit breaker; "" is the whole stream's.
    breakers: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def buffered(self) -> int:
        """Return how many user records have no result yet."""
        return (
            self.aggregating
            + self.limited
            + self.collected
            + self.in_flight
            + self.backing_off
            + self.held
            + self.queueing
            + self.keeping
        )
