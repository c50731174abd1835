"""The gates of the shards: open while what is let through would travel on at once.

A gate is closed while something of its shard waits for tokens or for its next attempt, or much of it is sent and not
answered. What comes then waits in front, in its flow (see `fair_shards`).
"""

import math
from collections.abc import Iterable
from typing import Final

from kpl_core.fairness.fair_shards import FairShards
from kpl_core.pipeline.backing_off import BackingOff
from kpl_core.pipeline.limiter import Limiter
from kpl_core.records.kinesis_record import KinesisRecord

__all__ = ["ShardGates"]

# How much of a shard's capacity may be sent and not answered: what is there waits for nobody's turn.
UNANSWERED_SECONDS: Final = 0.25


class ShardGates:
    """Asks the stages behind the gates what waits there, and counts itself what is not answered."""

    def __init__(
        self, limiter: Limiter, backing_off: BackingOff, waiting: FairShards, *, bytes_per_second: float
    ) -> None:
        self._limiter = limiter
        self._backing_off = backing_off
        self._waiting = waiting
        self._unanswered_limit = UNANSWERED_SECONDS * bytes_per_second
        self._unanswered_bytes: dict[str | None, int] = {}
        # The shards that have as much as that.
        self._unanswering: set[str | None] = set()
        self._are_forced = False

    def is_open(self, shard_id: str | None) -> bool:
        """Say whether what waits in front may go on."""
        if self._are_forced:
            return True
        if self._limiter.is_waiting(shard_id) or self._backing_off.holds(shard_id):
            return False
        return shard_id not in self._unanswering

    def lets_pass(self, shard_id: str | None) -> bool:
        """Say whether what comes now may go on: the gate is open, and nobody waits in front of it."""
        return not self._waiting.is_waiting(shard_id) and self.is_open(shard_id)

    def all_let_pass(self) -> bool:
        """Say whether nothing waits anywhere, as is usual: then no gate needs a look of its own."""
        if self._waiting or self._unanswering or self._backing_off:
            return False
        # What waits for tokens has an instant at which somebody looks.
        return self._limiter.next_wakeup() == math.inf

    def sent(self, records: Iterable[KinesisRecord]) -> None:
        """Count what a request carries."""
        unanswered = self._unanswered_bytes
        for record in records:
            shard_id = record.predicted_shard
            sent = unanswered[shard_id] = unanswered.get(shard_id, 0) + record.size_bytes
            if sent >= self._unanswered_limit:
                self._unanswering.add(shard_id)

    def answered(self, records: Iterable[KinesisRecord]) -> None:
        """Count it no more."""
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
        """Open all gates for good: closing runs out of time."""
        self._are_forced = True
