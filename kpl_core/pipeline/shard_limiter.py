"""One shard's waiting Kinesis records and the tokens they need.

A Kinesis record costs one record token, however many user records it carries,
and its bytes (key + data); both are taken together or not at all. Expired
records leave first, and spend nothing: they must not be lost to sight just
because tokens happen to be there. Then records are admitted by tier and
deadline until one does not fit; small ones behind it wait, or large ones would
starve. (Seed 000; KPL, `limiter.h`.)

Different from the KPL: it answers *when* the next record may leave instead of
being polled every 25 ms, and it lowers its own rate when the shard refuses
records although our tokens allowed them, which means somebody else writes too.
The expired are found by their own order, not by looking at the whole queue: a
shard offered more than it takes has records expire at every drain. And where
the rate adapts, a part of the burst is left to the shard: its bucket begins to
refill when the first record arrives, ours when it leaves, so all that travels
faster than the first, over connections already open, would be refused.
"""

import math
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from sortedcontainers import SortedKeyList

from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.adaptive_rate import AdaptiveRate
from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.user_record import TIERS

__all__ = ["Drained", "ShardLimiter", "ShardUsage"]

# User records: who expires at one instant may be all there is, and a loop that serves others must not stop for them.
EXPIRED_AT_ONCE: Final = 500
# Of the burst, where the rate adapts: at one second, 250 ms of luck on the way are made up for.
BURST_SHARE: Final = 0.75

_RECORDS: Final = 0
_BYTES: Final = 1
_TIER_RANK: Final = {tier: rank for rank, tier in enumerate(TIERS)}


class Drained(NamedTuple):
    """What left the queue."""

    expired: list[KinesisRecord]
    admitted: list[KinesisRecord]


def _by_deadline(record: KinesisRecord) -> tuple[int, float, int]:
    return _TIER_RANK[record.tier], record.deadline, record.sequence


def _by_expiration(record: KinesisRecord) -> tuple[float, int]:
    return record.expires_at, record.sequence


def _by_arrival(record: KinesisRecord) -> tuple[int, float, int]:
    return 0, 0.0, record.sequence


class ShardUsage(NamedTuple):
    """What one shard was given and refused; all but `waiting_*` only grow."""

    admitted_records: int
    admitted_bytes: int
    waiting_records: int
    waiting_bytes: int
    sent_records: int
    throttled_records: int


class ShardLimiter:
    """The queue in front of one shard."""

    def __init__(self, rules: ShardRules, now: float) -> None:
        self._rules = rules
        self._records_per_second = rules.records_per_second
        self._bytes_per_second = rules.bytes_per_second
        self._burst_seconds = rules.burst_seconds * (BURST_SHARE if rules.adaptive else 1.0)
        self._bucket = TokenBucket(
            [
                (rules.records_per_second, rules.records_per_second * self._burst_seconds),
                (rules.bytes_per_second, rules.bytes_per_second * self._burst_seconds),
            ],
            now=now,
        )
        self._admitted_records = 0
        self._admitted_bytes = 0
        self._sent_records = 0
        self._throttled_records = 0
        self._queue: SortedKeyList[KinesisRecord] = SortedKeyList(key=_by_arrival if rules.in_order else _by_deadline)
        # The same records. A retried one has a late deadline and an early expiration.
        self._expiring: SortedKeyList[KinesisRecord] = SortedKeyList(key=_by_expiration)
        # Infinite if, and only if, the queue is empty.
        self._earliest_expiration = math.inf
        self._rate = AdaptiveRate(now) if rules.adaptive else None
        self._in_order = rules.in_order
        self._in_flight: KinesisRecord | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_waiting(self) -> bool:
        """Say whether anything waits in it; asked more often than how much."""
        return self._earliest_expiration != math.inf

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait in it."""
        return sum(len(record.arrivals) for record in self._queue)

    @property
    def rate_fraction(self) -> float:
        """Return the fraction of the configured limit in use, 1.0 unless throttling lowered it."""
        return 1.0 if self._rate is None else self._rate.fraction

    def put(self, record: KinesisRecord) -> None:
        """Let a Kinesis record wait for its tokens, until `drain` finds them."""
        self._queue.add(record)
        self._expiring.add(record)
        self._earliest_expiration = self._expiring[0].expires_at

    def begin_like(self, other: "ShardLimiter", now: float) -> None:
        """Give up the tokens `other` is missing: what it let pass may have gone to this shard."""
        bucket = other._bucket  # noqa: SLF001 - one of us
        held = zip(bucket.capacities, bucket.tokens(now), strict=True)
        self._bucket.try_take([max(0.0, capacity - tokens) for capacity, tokens in held], now)

    def admit_at_once(self, record: KinesisRecord, now: float) -> bool:
        """Admit a record past an empty queue if its tokens are there; the usual case, and a quick one."""
        # Nothing can expire in an empty queue; asking the queue itself would be a call.
        if self._earliest_expiration != math.inf or self._in_flight is not None or record.expires_at <= now:
            return False
        if not self._bucket.try_take((1, record.size_bytes), now):
            return False
        self._admitted_records += 1
        self._admitted_bytes += record.size_bytes
        if self._in_order:
            self._in_flight = record
        return True

    def admit_run(self, records: Sequence[KinesisRecord], now: float) -> int:
        """Admit all of these records past an empty queue if tokens for all are there, else none; return how many."""
        if self._earliest_expiration != math.inf or self._in_order:
            return 0
        costs = [record.size_bytes for record in records if record.expires_at > now]
        count, size_bytes = len(costs), sum(costs)
        most_records, most_bytes = self._bucket.capacities
        # A cost above the capacity would pass a full bucket whole; taken one by one, these would not.
        if count < len(records) or count > most_records or size_bytes > most_bytes:
            return 0
        if not self._bucket.try_take((count, size_bytes), now):
            return 0
        self._admitted_records += count
        self._admitted_bytes += size_bytes
        return count

    def drain(self, now: float) -> Drained:
        """Take out what is expired, then what the tokens admit."""
        expired = self.take_expired(now)
        admitted: list[KinesisRecord] = []
        if self._earliest_expiration <= now or (expired and self._in_order):
            # The other expired leave first as well; in arrival order, what is left of them comes back to its place.
            return Drained(expired, admitted)
        queue = self._queue
        while queue and self._in_flight is None and self._bucket.try_take((1, queue[0].size_bytes), now):
            record = queue.pop(0)
            self._expiring.remove(record)
            admitted.append(record)
            self._admitted_records += 1
            self._admitted_bytes += record.size_bytes
            if self._in_order:
                self._in_flight = record
        if admitted:
            self._look_for_expiration()
        return Drained(expired, admitted)

    def drain_force(self, now: float) -> Drained:
        """Take out everything: the expired, and all others whether tokens are there or not."""
        expired = self.take_expired(now, at_most=sys.maxsize)
        admitted = self.take_all()
        return Drained(expired, admitted)

    def take_expired(self, now: float, *, at_most: int = EXPIRED_AT_ONCE) -> list[KinesisRecord]:
        """Remove and return records whose time to live is over, until they hold `at_most` user records or one more.

        If there are others left, `wakeup_at` says at once.
        """
        expired: list[KinesisRecord] = []
        if self._earliest_expiration > now:
            return expired
        expiring = self._expiring
        count = 0
        while expiring and expiring[0].expires_at <= now and count < at_most:
            record = expiring.pop(0)
            self._queue.remove(record)
            expired.append(record)
            count += len(record.arrivals)
        self._look_for_expiration()
        return expired

    def _look_for_expiration(self) -> None:
        self._earliest_expiration = self._expiring[0].expires_at if self._expiring else math.inf

    @property
    def earliest_expiration(self) -> float:
        """Return when the first record in the queue expires, `math.inf` if it is empty."""
        return self._earliest_expiration

    def take_all(self) -> list[KinesisRecord]:
        """Remove and return everything that waits, in order."""
        records = list(self._queue)
        self._queue.clear()
        self._expiring.clear()
        self._earliest_expiration = math.inf
        return records

    def wakeup_at(self, now: float) -> float:
        """Return when `drain` will next find something, `math.inf` if nothing waits for time to pass."""
        if not self._queue:
            return math.inf
        if self._in_flight is not None:
            return self._earliest_expiration
        return min(self._bucket.ready_at((1, self._queue[0].size_bytes), now), self._earliest_expiration)

    def answered(self, *, sent: int, throttled: int, now: float) -> bool:
        """Learn from an answer for `sent` Kinesis records; say whether the rate changed."""
        self._sent_records += sent
        self._throttled_records += throttled
        if self._rate is None or not self._rate.answered(sent=sent, throttled=throttled, now=now):
            return False
        fraction = self._rate.fraction
        self._bucket.set_rate(_RECORDS, self._records_per_second * fraction, now)
        self._bucket.set_rate(_BYTES, self._bytes_per_second * fraction, now)
        return True

    def set_share(self, records_per_second: float, bytes_per_second: float, now: float) -> None:
        """Use these rates from now on in place of the configured ones; the burst follows, tokens held stay."""
        if (records_per_second, bytes_per_second) == (self._records_per_second, self._bytes_per_second):
            return
        self._records_per_second = records_per_second
        self._bytes_per_second = bytes_per_second
        fraction, burst_seconds = self.rate_fraction, self._burst_seconds
        self._bucket.set_rate(_RECORDS, records_per_second * fraction, now, capacity=records_per_second * burst_seconds)
        self._bucket.set_rate(_BYTES, bytes_per_second * fraction, now, capacity=bytes_per_second * burst_seconds)

    def usage(self) -> ShardUsage:
        """Return what passed and what waits; looks at the whole queue."""
        return ShardUsage(
            admitted_records=self._admitted_records,
            admitted_bytes=self._admitted_bytes,
            waiting_records=len(self._queue),
            waiting_bytes=sum(record.size_bytes for record in self._queue),
            sent_records=self._sent_records,
            throttled_records=self._throttled_records,
        )

    def finished(self, record: KinesisRecord) -> None:
        """Let the next record go if they go in order: `record` is final, or back in the queue."""
        if self._in_flight is record:
            self._in_flight = None

    def __repr__(self) -> str:
        return f"<ShardLimiter {len(self._queue)} waiting, at {self.rate_fraction:.0%} of its limit>"
