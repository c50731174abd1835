"""Limit: one queue per predicted shard, and one for records without a prediction.

Shards are made when first needed. Those that wait for tokens are found through a heap of wake-ups, never by scanning
all shards. The queue without a prediction has one shard's limits: the KPL sends such records unlimited, just while the
stream is being resharded. Its records went to an unknown shard, so a new shard begins with no more tokens than it has.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.shard_limiter import Drained, ShardLimiter, ShardUsage
from kpl_core.pipeline.wakeups import Wakeups
from kpl_core.records.expiry import has_expired
from kpl_core.records.kinesis_record import KinesisRecord

# Records drained by one call. After an outage all shards are due at one instant, each with a burst, and other tasks of
# the loop must get their turn.
DRAINED_AT_ONCE: Final = 500


class StreamLimiter:
    """All shard limiters of one stream, made lazily; `None` stands for the unpredicted shard."""

    def __init__(self, rules: ShardRules) -> None:
        self._rules = rules
        self._shards: dict[str | None, ShardLimiter] = {}
        # When each shard may next let a record go.
        self.wakeups: Wakeups[str | None] = Wakeups()
        # True once the limits are lifted, because the producer is closing.
        self.is_forced = False
        # True while no record is admitted, because it could not leave.
        self.is_paused = False
        self._paused_until = -math.inf
        # The shards that were due during the pause.
        self._due_after_pause: set[str | None] = set()

    def shard(self, shard_id: str | None, now: float) -> ShardLimiter:
        """Return the limiter of a predicted shard, made when first needed."""
        limiter = self._shards.get(shard_id)
        if limiter is None:
            limiter = ShardLimiter(self._rules, now)
            unpredicted = self._shards.get(None)
            if unpredicted is not None:
                limiter.begin_like(unpredicted, now)
            self._shards[shard_id] = limiter
        return limiter

    def is_waiting(self, shard_id: str | None) -> bool:
        """Return True if records wait for this shard's tokens."""
        shard = self._shards.get(shard_id)
        return shard is not None and shard.is_waiting

    def put(self, record: KinesisRecord, now: float) -> Drained | None:
        """Admit a record and return None, or enqueue it and return what its shard lets go now."""
        if self.is_forced and not has_expired(record.expires_at, now):
            return None
        shard = self._shards.get(record.predicted_shard)
        if shard is None:
            shard = self.shard(record.predicted_shard, now)
        if not self.is_paused and shard.admit_at_once(record, now):
            return None
        shard.put(record)
        return self._drain(record.predicted_shard, shard, now)

    def put_back(self, record: KinesisRecord, now: float) -> None:
        """Enqueue a record at the place of its sequence, and drain nothing yet: others may return to their places."""
        shard = self.shard(record.predicted_shard, now)
        shard.put(record)
        self.wakeups.schedule(record.predicted_shard, shard.wakeup_at(now))

    def admit_run(self, records: Sequence[KinesisRecord], now: float) -> int:
        """Admit all of these records of one shard, or none of them; return how many. `put` the others."""
        if self.is_forced or self.is_paused:
            return 0
        return self.shard(records[0].predicted_shard, now).admit_run(records, now)

    def drain_due(self, now: float) -> list[Drained]:
        """Drain the shards that are due: about 500 records in one call; shards beyond that stay due."""
        drained: list[Drained] = []
        count = 0
        for shard_id in self.wakeups.take_due(now):
            shard = self._shards.get(shard_id)
            if shard is None:
                continue
            if count >= DRAINED_AT_ONCE:
                self.wakeups.schedule(shard_id, now)
                continue
            drained.append(self._drain(shard_id, shard, now))
            count += len(drained[-1].admitted) + sum(len(record.arrivals) for record in drained[-1].expired)
        return drained

    def drain_force(self, now: float) -> list[Drained]:
        """Empty every queue without tokens, and stop limiting. Used when a close runs out of time."""
        self.is_forced = True
        return [shard.drain_force(now) for shard in self._shards.values() if shard]

    def pause(self, until: float, now: float) -> None:
        """Admit no record before `until`, because it could not leave.

        Admitted records would gather and then reach their shard together, far above its limit. Tokens that are not
        spent do not gather beyond the burst. The pause ends with a later call that says so, not by itself.
        """
        paused = until > now
        self._paused_until = until
        if self.is_paused and not paused:
            for shard_id in self._due_after_pause:
                shard = self._shards.get(shard_id)
                if shard is not None:
                    self.wakeups.schedule(shard_id, shard.wakeup_at(now))
            self._due_after_pause.clear()
        self.is_paused = paused

    def _drain(self, shard_id: str | None, shard: ShardLimiter, now: float) -> Drained:
        if self.is_paused:
            self._due_after_pause.add(shard_id)
            expired = shard.take_expired(now)
            self.wakeups.schedule(shard_id, shard.earliest_expiration)
            return Drained(expired, [])
        drained = shard.drain(now)
        self.wakeups.schedule(shard_id, shard.wakeup_at(now))
        return drained

    def answered(self, shard_id: str | None, *, sent: int, throttled: int, now: float) -> float | None:
        """Give an answer's counts to a shard; return its new fraction of the limit, None if that did not change."""
        shard = self._shards.get(shard_id)
        if shard is None or not shard.answered(sent=sent, throttled=throttled, now=now):
            return None
        self.wakeups.schedule(shard_id, shard.wakeup_at(now))
        return shard.rate_fraction

    def finished(self, record: KinesisRecord, now: float) -> None:
        """Note that a record is final. In arrival order its shard may then admit the next."""
        shard = self._shards.get(record.predicted_shard)
        if shard is not None:
            shard.finished(record)
            self.wakeups.schedule(record.predicted_shard, shard.wakeup_at(now))

    def take_all(self) -> list[KinesisRecord]:
        """Remove and return every waiting record, in the order in which they were closed."""
        return self.take(self._shards)

    def take(self, shard_ids: Iterable[str | None]) -> list[KinesisRecord]:
        """Remove and return the records that wait for these shards, in the order in which they were closed."""
        records = [record for id_ in shard_ids if id_ in self._shards for record in self._shards[id_].take_all()]
        records.sort(key=lambda record: record.sequence)
        return records

    def keep_only(self, shard_ids: set[str]) -> None:
        """Remove the shards that are not among these; their queues are empty."""
        for shard_id in [id_ for id_ in self._shards if id_ is not None and id_ not in shard_ids]:
            del self._shards[shard_id]

    def next_wakeup(self) -> float:
        """Return when a shard may next let a record go, or the pause ends with shards due."""
        earliest = self.wakeups.next_at
        return min(earliest, self._paused_until) if self._due_after_pause else earliest

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait for tokens."""
        return sum([shard.user_record_count for shard in self._shards.values() if shard.is_waiting])

    @property
    def waiting(self) -> list[ShardLimiter]:
        """Return the shards with a queue."""
        return [shard for shard in self._shards.values() if shard]

    def set_shares(self, shares: Mapping[str | None, tuple[float, float]], now: float) -> None:
        """Set the rates of these shards, in records and bytes a second; the others keep theirs."""
        for shard_id, (records_per_second, bytes_per_second) in shares.items():
            shard = self._shards.get(shard_id)
            if shard is not None:
                shard.set_share(records_per_second, bytes_per_second, now)
                if self.is_paused:
                    self._due_after_pause.add(shard_id)
                else:
                    self.wakeups.schedule(shard_id, shard.wakeup_at(now))

    def usages(self) -> dict[str | None, ShardUsage]:
        """Return each shard's counts."""
        return {shard_id: shard.usage() for shard_id, shard in self._shards.items()}
