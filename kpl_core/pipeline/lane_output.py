"""What lanes share: the Kinesis records they closed, when the open ones are due, and what goes into one."""

import math
from collections.abc import Callable
from typing import Protocol

from kpl_core.options.stage_rules import AggregationRules
from kpl_core.pipeline.generations import Generations
from kpl_core.pipeline.wakeups import Wakeups
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.outcome import Delivery

__all__ = ["LaneOutput", "OpenLane", "Placed"]

# A user record on its way into a lane: its partition key, the lane's entry for it, data, bytes of key and data.
Placed = tuple[str, bytes, bytes, int]


class OpenLane(Protocol):
    """A lane that something is open in, until `deadline`."""

    deadline: float

    @property
    def user_record_count(self) -> int:
        """Return how many user records it holds."""

    def close(self) -> None:
        """Leave them with the output."""


class LaneOutput:
    """What all lanes of a stream share: the Kinesis records they closed, and when to look at them."""

    def __init__(self, rules: AggregationRules, generations: Generations, delivery: type[Delivery]) -> None:
        self.rules = rules
        self.generations = generations
        self.delivery = delivery
        # When which lane's open aggregated record is due.
        self.deadlines: Wakeups[OpenLane] = Wakeups()
        # Closed Kinesis records nobody has taken yet, and when somebody must look for some.
        self.closed: list[KinesisRecord] = []
        self.take_at = math.inf
        # Something was opened or must be taken since the pipeline last looked. Read after every put.
        self.news = False
        # Asked by each Kinesis record that opens, in the context of the put that opens it; None: nobody wants to know.
        self.opening_context: Callable[[], object] | None = None
        # The place of the Kinesis record closed last, and how many user records in closed ones came from a put.
        self.closed_count = 0
        self.fresh_count = 0
        # How many of `closed` hold a single user record from a put: they hold their generation, and count, together.
        self.single_count = 0

    def next_sequence(self) -> int:
        """Return the place of one more Kinesis record, behind all that were ever closed."""
        self.closed_count += 1
        return self.closed_count

    def take_closed(self, now: float = math.inf) -> list[KinesisRecord]:
        """Remove and return the closed Kinesis records, in the order they were closed."""
        closed, self.closed = self.closed, []
        if self.single_count:
            # No flush began since they were put: it takes what is closed first.
            self.generations.hold(self.generations.current, self.single_count)
            self.fresh_count += self.single_count
            self.single_count = 0
        # Where single lanes named an instant, more of theirs will follow: to look again anyway spares them to ask.
        looks_again = bool(closed) and math.isfinite(self.take_at)
        self.take_at = now + self.rules.run_seconds if looks_again else math.inf
        return closed
