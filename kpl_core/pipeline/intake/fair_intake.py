"""The fair intake: user records wait per flow in front of an overloaded shard, and enter aggregation in fair order.

A shard keeps up while a record for it would travel on at once: nothing of the shard waits for tokens or for its next
attempt, and little of it is sent and not answered. Then a user record goes straight to its lane. Else it waits in its
flow (`fair_shards.py`). When the shard keeps up again, user records enter in fair order until it does not.
"""

import math
from collections.abc import Iterable
from typing import Final

from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.intake.fair_shards import FairShards
from kpl_core.pipeline.stages import GroupTerms, Stages
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord

# How much of a shard's capacity may be sent and not answered while a shard keeps up.
UNANSWERED_SECONDS: Final = 0.25


class FairIntake:
    """The fair queues of one stream, and which of its shards keep up."""

    def __init__(self, stages: Stages, policy: FairnessPolicy) -> None:
        config = stages.config
        self._stages = stages
        self._policy = policy
        self._buffer_limit = stages.buffer_limit
        self._limiter = stages.limiter
        self._backoff_queue = stages.backoff_queue
        self.waiting = FairShards(policy, stages.buffer_limit, ttl_seconds=config.record_ttl_ms / 1000)
        # The flows whose user records are not aggregated, because their last put said so.
        self._lone_flows: set[str | None] = set()
        self._unanswered_limit = UNANSWERED_SECONDS * config.rate_limit_bytes_per_sec_per_shard
        self._unanswered_bytes: dict[str | None, int] = {}
        # The shards that have reached the limit.
        self._unanswering: set[str | None] = set()
        self._is_forced = False

    # The shards

    def keeps_up(self, shard_id: str | None) -> bool:
        """Return True if a record for this shard would travel on at once."""
        if self._is_forced:
            return True
        if self._limiter.is_waiting(shard_id) or self._backoff_queue.has_shard(shard_id):
            return False
        return shard_id not in self._unanswering

    def lets_pass(self, shard_id: str | None) -> bool:
        """Return True if a user record put now enters aggregation at once: the shard keeps up, and no record waits."""
        return not self.waiting.is_waiting(shard_id) and self.keeps_up(shard_id)

    def all_let_pass(self) -> bool:
        """Return True if nothing waits anywhere, as is usual: then no shard needs a look of its own."""
        # What waits for its turn, its next attempt or tokens has a time.
        first_at = min(self.waiting.next_at, self._backoff_queue.next_at, self._limiter.wakeups.next_at)
        return first_at == math.inf and not self._unanswering

    def sent(self, records: Iterable[KinesisRecord]) -> None:
        """Note that a request left with these records."""
        unanswered = self._unanswered_bytes
        for record in records:
            shard_id = record.predicted_shard
            sent = unanswered[shard_id] = unanswered.get(shard_id, 0) + record.size_bytes
            if sent >= self._unanswered_limit:
                self._unanswering.add(shard_id)

    def answered(self, records: Iterable[KinesisRecord]) -> None:
        """Note that the request with these records was answered."""
        unanswered = self._unanswered_bytes
        for record in records:
            shard_id = record.predicted_shard
            left = unanswered.get(shard_id, 0) - record.size_bytes
            if left < self._unanswered_limit:
                self._unanswering.discard(shard_id)
            if left > 0:
                unanswered[shard_id] = left
            else:
                unanswered.pop(shard_id, None)

    def force(self) -> None:
        """Let every user record enter from now on, because the producer is closing."""
        self._is_forced = True

    # The queues

    @property
    def aggregates_all(self) -> bool:
        """Whether the policy never keeps a flow from aggregation: only a subclass may."""
        return type(self._policy).aggregates is FairnessPolicy.aggregates

    def travels_alone(self, flow: str | None) -> bool:
        """Return True if the user records of this flow are not aggregated. Those without a flow are."""
        return flow is not None and (flow in self._lone_flows or not self._policy.aggregates(flow))

    def reserve(self, size_bytes: int, records: int, terms: GroupTerms) -> None:
        """Take room for so many records of a flow together; raises BufferFull, and then nothing was taken."""
        if self.waiting.next_at != math.inf:
            self.waiting.require_share(terms.flow, size_bytes, records=records, tier=terms.tier)
        self._buffer_limit.reserve(size_bytes=size_bytes, records=records, tier=terms.tier)
        if not terms.aggregate:
            self._lone_flows.add(terms.flow)
        elif self._lone_flows:
            self._lone_flows.discard(terms.flow)

    def next_ready(self, now: float) -> DetachedUserRecord | None:
        """Remove and return the next user record that may enter aggregation, None if none may."""
        waiting = self.waiting
        if not waiting or waiting.next_at <= now:
            # Expired user records leave first: the next poll takes them.
            return None
        for shard_id in waiting.shards:
            if self.keeps_up(shard_id):
                return waiting.take(shard_id)
        return None

    def route_again(self, stable: set[str]) -> None:
        """Move the user records whose shard is not in `stable` to the queue of their new shard."""
        moved = [shard_id for shard_id in self.waiting.shards if shard_id not in stable]
        for detached in self.waiting.drain(moved):
            self.waiting.put(self._stages.shard_of(detached.user_record), detached)
