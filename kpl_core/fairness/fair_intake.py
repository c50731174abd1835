"""The fair intake: user records wait per flow in front of an overloaded shard, and enter aggregation in fair order.

Each shard has a gate. It is open while records that pass it would travel on at once: nothing of the shard waits for
tokens or for its next attempt, and little of it is sent and not answered. Then a user record goes straight to its lane.
Behind a closed gate it waits in its flow (`fair_shards.py`). When the gate opens, user records enter in fair
order until it closes again.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

from kpl_core.fairness.fair_shards import FairShards
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.stages import GroupTerms, Stages
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.user_record import Tier

# How much of a shard's capacity may be sent and not answered before its gate closes.
UNANSWERED_SECONDS: Final = 0.25


class FairIntake:
    """The fair queues of one stream and the gates behind them."""

    def __init__(self, stages: Stages, policy: FairnessPolicy) -> None:
        config = stages.config
        self._stages = stages
        self._policy = policy
        self._buffer_limit = stages.buffer_limit
        self._limiter = stages.limiter
        self._backoff_queue = stages.backoff_queue
        self._waiting = FairShards(policy, stages.buffer_limit, ttl_seconds=config.record_ttl_ms / 1000)
        # The flows whose user records are not aggregated, because their last put said so.
        self._lone_flows: set[str | None] = set()
        self._unanswered_limit = UNANSWERED_SECONDS * config.rate_limit_bytes_per_sec_per_shard
        self._unanswered_bytes: dict[str | None, int] = {}
        # The shards that have reached the limit.
        self._unanswering: set[str | None] = set()
        self._is_forced = False

    # The gates

    def is_open(self, shard_id: str | None) -> bool:
        """Return True if the gate of a shard is open."""
        if self._is_forced:
            return True
        if self._limiter.is_waiting(shard_id) or self._backoff_queue.has_shard(shard_id):
            return False
        return shard_id not in self._unanswering

    def lets_pass(self, shard_id: str | None) -> bool:
        """Return True if a user record put now enters aggregation at once: the gate is open, and no record waits."""
        return not self._waiting.is_waiting(shard_id) and self.is_open(shard_id)

    def all_let_pass(self) -> bool:
        """Return True if nothing waits anywhere, as is usual: then no gate needs a look of its own."""
        if self._waiting or self._unanswering or self._backoff_queue:
            return False
        # A shard with records that wait for tokens has a wake-up.
        return self._limiter.next_wakeup() == math.inf

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

    # The queues behind closed gates

    def require_share(self, flow: str | None, size_bytes: int, *, records: int, tier: Tier) -> None:
        """Raise BufferFull if the flow has used up its share of the buffer."""
        self._waiting.require_share(flow, size_bytes, records=records, tier=tier)

    def travels_alone(self, flow: str | None) -> bool:
        """Return True if the user records of this flow are not aggregated."""
        return flow in self._lone_flows or not self._policy.aggregates(flow)

    def enqueue(self, shard_id: str | None, detached: DetachedUserRecord) -> None:
        """Let a user record wait for its turn."""
        self._waiting.put(shard_id, detached, detached.size_bytes)

    def next_ready(self, now: float) -> DetachedUserRecord | None:
        """Remove and return the next user record that may enter aggregation, None if none may."""
        waiting = self._waiting
        if not waiting or waiting.next_wakeup() <= now:
            # Expired user records leave first: the next poll takes them.
            return None
        for shard_id in waiting.waiting_shards:
            if self.is_open(shard_id):
                return waiting.take(shard_id)
        return None

    def take_expired(self, now: float) -> list[DetachedUserRecord]:
        """Remove and return user records whose time to live is over."""
        return self._waiting.take_expired(now)

    def take_all(self) -> list[DetachedUserRecord]:
        """Remove and return every waiting user record."""
        return self._waiting.drain(self._waiting.waiting_shards)

    def route_again(self, stable: set[str]) -> None:
        """Move the user records whose shard is not in `stable` to the queue of their new shard."""
        moved = [shard_id for shard_id in self._waiting.waiting_shards if shard_id not in stable]
        for detached in self._waiting.drain(moved):
            self.enqueue(self._stages.shard_of(detached.user_record), detached)

    def next_wakeup(self) -> float:
        """Return when the first user record may expire, `math.inf` if none waits."""
        return self._waiting.next_wakeup()

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait."""
        return self._waiting.user_record_count

    @property
    def waiting_by_flow(self) -> dict[Any, tuple[int, int]]:
        """Return how many user records, of how many bytes, each flow has in the queue."""
        return self._waiting.queued_by_flow

    def oldest_by_flow(self) -> dict[Any, float]:
        """Return when the oldest user record of each flow in the queue arrived."""
        return self._waiting.oldest_by_flow()

    def reserve(self, size_bytes: int, records: int, terms: GroupTerms) -> None:
        """Take room for so many records of a flow together; raises BufferFull, and then nothing was taken."""
        self._waiting.require_share(terms.flow, size_bytes, records=records, tier=terms.tier)
        self._buffer_limit.reserve(size_bytes=size_bytes, records=records, tier=terms.tier)
        if not terms.aggregate:
            self._lone_flows.add(terms.flow)
        elif self._lone_flows:
            self._lone_flows.discard(terms.flow)
