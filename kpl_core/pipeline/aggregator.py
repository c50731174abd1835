"""Aggregate: collect user records of one predicted shard into one Kinesis record.

There is a lane for each predicted shard and tier. A lane's open aggregated record closes when the next user record
would not fit (size), when it has enough of them (count), when its oldest one has waited long enough (deadline), or by
a flush. As in the KPL, user records of different shards never share one: a consumer drops the whole aggregated record
if any user record in it belongs to another shard. While the shard is unknown, each user record travels alone.

Different from the KPL: sizes are exact before a user record is added, so none is taken out again. (`reducer.h`
estimates, sorts and trims.)
"""

import sys
from collections.abc import Container

from kpl_core.options.stage_rules import AggregationRules
from kpl_core.pipeline.lane import AggregatingLane, Lane, LaneOutput, SingleLane
from kpl_core.pipeline.ledger import Generations
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.user_record import Tier


class Aggregator:
    """All lanes of one stream; `output` has their deadlines and the records they closed."""

    def __init__(
        self, rules: AggregationRules, generations: Generations, *, delivery: type[ResultHandle] = ResultHandle
    ) -> None:
        self.output = LaneOutput(rules, generations, delivery)
        self._lanes: dict[tuple[str | None, Tier], Lane] = {}
        self._single_lanes: dict[tuple[str | None, Tier], Lane] = {}

    def lane(self, shard_id: str | None, tier: Tier = "normal") -> Lane:
        """Return the lane of a predicted shard (None: unpredicted), made when first asked for."""
        lane = self._lanes.get((shard_id, tier))
        if lane is None:
            # Without a predicted shard no two user records may safely share a Kinesis record.
            if shard_id is None or not self.output.rules.enabled:
                lane = SingleLane(self.output, shard_id, tier)
            else:
                lane = AggregatingLane(self.output, shard_id, tier)
            self._lanes[shard_id, tier] = lane
        return lane

    def single_lane(self, shard_id: str | None, tier: Tier) -> Lane:
        """Return a lane of a predicted shard that never aggregates, also where aggregation is on."""
        lane = self._single_lanes.get((shard_id, tier))
        if lane is None:
            lane = self._single_lanes[shard_id, tier] = SingleLane(self.output, shard_id, tier)
        return lane

    def lane_apart(self, shard_id: str, tier: Tier) -> AggregatingLane:
        """Return a new lane that no other put can reach: for user records that must stay together."""
        return AggregatingLane(self.output, shard_id, tier)

    def close_due(self, by: float, most: int = sys.maxsize) -> None:
        """Close the open aggregated records whose deadline is at or before `by`; at most `most` of them."""
        deadlines = self.output.deadlines
        for lane in deadlines.take_due(by, most):
            if lane.deadline <= by:
                lane.close()
            elif lane.user_record_count:
                deadlines.schedule(lane, lane.deadline)

    def close_all(self) -> None:
        """Close every open aggregated record."""
        for lane in self._lanes.values():
            lane.close()
        self.output.deadlines.clear()

    def close_lanes(self, shard_ids: Container[str | None]) -> None:
        """Close every open aggregated record of these shards."""
        for (shard_id, _), lane in self._lanes.items():
            if shard_id in shard_ids:
                lane.close()

    def close_lanes_except(self, shard_ids: set[str]) -> None:
        """Close and forget the lanes of all other shards."""
        for shard_id, tier in list(self._lanes):
            if shard_id not in shard_ids:
                self._lanes.pop((shard_id, tier)).close()
        self._single_lanes.clear()

    def take_closed(self) -> list[KinesisRecord]:
        """Remove and return the closed Kinesis records."""
        return self.output.take_closed()

    @property
    def accepted(self) -> int:
        """Return how many user records were put into lanes so far, including those in open records."""
        closed = self.output.fresh_count + self.output.single_count
        return closed + sum(lane.fresh_count for lane in self._lanes.values())

    @property
    def open_user_records(self) -> int:
        """Return how many user records wait in open aggregated records."""
        return sum(lane.user_record_count for lane in self._lanes.values())

    @property
    def closed_user_records(self) -> int:
        """Return how many user records are in closed Kinesis records that wait to be taken."""
        return sum(len(record.arrivals) for record in self.output.closed)
