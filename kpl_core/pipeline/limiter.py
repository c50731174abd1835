"""Limit: one queue per predicted shard, and one for records without a prediction.

Shards are made when first needed. Those that wait for tokens are found through
a heap of wake-ups, never by scanning all shards. The queue without a prediction
has one shard's limits: the KPL sends such records unlimited, just when the
stream is being resharded. What it let pass went to some shard, nobody knows to
which, so a shard begins with no more tokens than it has.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.shard_limiter import Drained, ShardLimiter, ShardUsage
from kpl_core.pipeline.wakeups import Wakeups
from kpl_core.records.kinesis_record import KinesisRecord

__all__ = ["Limiter"]

# After an outage all shards are due at one instant, each with a burst; the loop that serves others too must not
# stop for all of them together.
DRAINED_AT_ONCE: Final = 500


class Limiter:
    """All shard limiters of one stream, made lazily; `None` stands for the unpredicted shard."""

    def __init__(self, rules: ShardRules) -> None:
        self._rules = rules
        self._shards: dict[str | None, ShardLimiter] = {}
        self._wakeups: Wakeups[str | None] = Wakeups()
        # Nothing is limited any more.
        self.is_forced = False
        # Nothing is admitted, because it could not leave.
        self.is_held = False
        self._held_until = -math.inf
        # Who would have been drained meanwhile.
        self._held_back: set[str | None] = set()

    def shard(self, shard_id: str | None, now: float) -> ShardLimiter:
        """Return the limiter of a predicted shard, made when first asked for."""
        limiter = self._shards.get(shard_id)
        if limiter is None:
            limiter = ShardLimiter(self._rules, now)
            unpredicted = self._shards.get(None)
            if unpredicted is not None:
                limiter.begin_like(unpredicted, now)
            self._shards[shard_id] = limiter
        return limiter

    def is_waiting(self, shard_id: str | None) -> bool:
        """Say whether records wait for this shard's tokens."""
        shard = self._shards.get(shard_id)
        return shard is not None and shard.is_waiting

    def put(self, record: KinesisRecord, now: float) -> Drained | None:
        """Let a record wait, and drain its own shard at once. None: it was admitted, alone, and nothing else moved."""
        if self.is_forced and record.expires_at > now:
            return None
        shard = self._shards.get(record.predicted_shard)
        if shard is None:
            shard = self.shard(record.predicted_shard, now)
        if not self.is_held and shard.admit_at_once(record, now):
            return None
        shard.put(record)
        return self._drain(record.predicted_shard, shard, now)

    def put_back(self, record: KinesisRecord, now: float) -> None:
        """Let a record wait in the place it has, and drain nothing yet: others may come back to theirs."""
        shard = self.shard(record.predicted_shard, now)
        shard.put(record)
        self._wakeups.schedule(record.predicted_shard, shard.wakeup_at(now))

    def admit_run(self, records: Sequence[KinesisRecord], now: float) -> int:
        """Admit the first of these records of one shard, as many as can go at once; return how many. Put the others."""
        if self.is_forced or self.is_held:
            return 0
        return self.shard(records[0].predicted_shard, now).admit_run(records, now)

    def drain_due(self, now: float) -> list[Drained]:
        """Drain the shards that wait for this instant; if those are too many records, the others are due at once."""
        drained: list[Drained] = []
        count = 0
        for shard_id in self._wakeups.take_due(now):
            shard = self._shards.get(shard_id)
            if shard is None:
                continue
            if count >= DRAINED_AT_ONCE:
                self._wakeups.schedule(shard_id, now)
                continue
            drained.append(self._drain(shard_id, shard, now))
            count += len(drained[-1].admitted) + sum(len(record.arrivals) for record in drained[-1].expired)
        return drained

    def drain_force(self, now: float) -> list[Drained]:
        """Empty every queue whether tokens are there or not, and limit nothing from now on.

        Used when closing runs out of time.
        """
        self.is_forced = True
        return [shard.drain_force(now) for shard in self._shards.values() if shard]

    def hold(self, until: float, now: float) -> None:
        """Admit nothing before `until`: what is admitted now could not leave, and tokens would gather with it.

        All of it would reach the shard at once in the end, far above its limit. Tokens that nobody
        takes do not gather beyond the burst. The hold ends with the next call that says so, not by itself.
        """
        held = until > now
        self._held_until = until
        if self.is_held and not held:
            for shard_id in self._held_back:
                shard = self._shards.get(shard_id)
                if shard is not None:
                    self._wakeups.schedule(shard_id, shard.wakeup_at(now))
            self._held_back.clear()
        self.is_held = held

    def _drain(self, shard_id: str | None, shard: ShardLimiter, now: float) -> Drained:
        if self.is_held:
            self._held_back.add(shard_id)
            expired = shard.take_expired(now)
            self._wakeups.schedule(shard_id, shard.earliest_expiration)
            return Drained(expired, [])
        drained = shard.drain(now)
        self._wakeups.schedule(shard_id, shard.wakeup_at(now))
        return drained

    def answered(self, shard_id: str | None, *, sent: int, throttled: int, now: float) -> float | None:
        """Let a shard learn from an answer; return its new fraction of the limit if that changed."""
        shard = self._shards.get(shard_id)
        if shard is None or not shard.answered(sent=sent, throttled=throttled, now=now):
            return None
        self._wakeups.schedule(shard_id, shard.wakeup_at(now))
        return shard.rate_fraction

    def finished(self, record: KinesisRecord, now: float) -> None:
        """Tell the shard of a record that is final; with arrival order kept, the next may go."""
        shard = self._shards.get(record.predicted_shard)
        if shard is not None:
            shard.finished(record)
            self._wakeups.schedule(record.predicted_shard, shard.wakeup_at(now))

    def take_all(self) -> list[KinesisRecord]:
        """Remove and return everything that waits, in the order it was closed."""
        return self.take(self._shards)

    def take(self, shard_ids: Iterable[str | None]) -> list[KinesisRecord]:
        """Remove and return everything that waits for these shards, in the order it was closed."""
        records = [record for id_ in shard_ids if id_ in self._shards for record in self._shards[id_].take_all()]
        records.sort(key=lambda record: record.sequence)
        return records

    def keep_only(self, shard_ids: set[str]) -> None:
        """Forget the shards that are not among these; their queues are empty."""
        for shard_id in [id_ for id_ in self._shards if id_ is not None and id_ not in shard_ids]:
            del self._shards[shard_id]

    def next_wakeup(self) -> float:
        """Return the earliest instant at which some shard may let something go."""
        earliest = self._wakeups.earliest()
        return min(earliest, self._held_until) if self._held_back else earliest

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait for tokens."""
        return sum(shard.user_record_count for shard in self._shards.values())

    @property
    def waiting(self) -> list[ShardLimiter]:
        """Return the shards with a queue."""
        return [shard for shard in self._shards.values() if shard]

    def set_shares(self, shares: Mapping[str | None, tuple[float, float]], now: float) -> None:
        """Let shards use these rates, records and bytes a second, from now on; the others keep theirs."""
        for shard_id, (records_per_second, bytes_per_second) in shares.items():
            shard = self._shards.get(shard_id)
            if shard is not None:
                shard.set_share(records_per_second, bytes_per_second, now)
                if self.is_held:
                    self._held_back.add(shard_id)
                else:
                    self._wakeups.schedule(shard_id, shard.wakeup_at(now))

    def usages(self) -> dict[str | None, ShardUsage]:
        """Return what passed each shard's limiter and what waits there."""
        return {shard_id: shard.usage() for shard_id, shard in self._shards.items()}

    def rate_fractions(self) -> dict[str | None, float]:
        """Return each shard's fraction of the configured limit."""
        return {shard_id: shard.rate_fraction for shard_id, shard in self._shards.items()}
