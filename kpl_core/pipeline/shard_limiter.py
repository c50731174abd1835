"""One shard's waiting Kinesis records and the tokens they need.

A Kinesis record costs one record token, however many user records it carries, and its bytes (key + data); both are
taken together or not at all. Expired records leave first and cost nothing. Then records are admitted by tier and
deadline until one does not fit. Small records behind it wait, or large ones would starve. (Seed 000; KPL, `limiter.h`.)

Different from the KPL:

* The limiter says *when* the next record may leave, instead of being polled every 25 ms.
* It lowers its own rate when the shard refuses records that our tokens allowed: then another process writes too.
* Waiting records are also kept sorted by expiry, so that the expired ones are found without a scan of the queue: on a
  shard that is offered more than it takes, records expire at every drain.
* Where the rate adapts, a part of the burst is never spent. The shard's bucket begins to refill when the first record
  arrives, ours when it leaves, so records that travel faster than the first would be refused.

**The adaptive rate.** Throttled Kinesis records come back inside an answer with HTTP 200, so no SDK's adaptive mode
sees them, and the KPL leaves the reaction as a TODO. Here each shard looks at its last second:

    throttled share above 1 %:   fraction x 0.85, at most once a second, never below 5 %
    otherwise, on success:       fraction + 0.2 a second, up to 1

Multiplicative decrease and additive increase let producers that know nothing of each other converge to equal shares
(Chiu and Jain, 1989).
"""

import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from sortedcontainers import SortedKeyList

from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_core.records.expiry import EXPIRED_AT_ONCE, has_expired
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.user_record import TIERS

# The part of the burst in use where the rate adapts. With a burst of 1 s this allows for 250 ms of jitter on the way.
BURST_SHARE: Final = 0.75

WINDOW_SECONDS: Final = 1.0
TOLERATED_SHARE: Final = 0.01
DECREASE: Final = 0.85
INCREASE_PER_SECOND: Final = 0.2
FLOOR: Final = 0.05

_RECORDS: Final = 0
_BYTES: Final = 1
_TIER_RANK: Final = {tier: rank for rank, tier in enumerate(TIERS)}


class AdaptiveRate:
    """The fraction, 0.05 .. 1, of the configured limit that a shard may use now."""

    __slots__ = ("_answers", "_changed_at", "_lowered_at", "_sent", "_throttled", "fraction")

    def __init__(self, now: float) -> None:
        self.fraction = 1.0
        self._answers: deque[tuple[float, int, int]] = deque()
        self._sent = 0
        self._throttled = 0
        self._lowered_at = -WINDOW_SECONDS + now
        self._changed_at = now

    def answered(self, *, sent: int, throttled: int, now: float) -> bool:
        """Count `sent` Kinesis records, `throttled` of them refused; return True if the fraction changed."""
        self._answers.append((now, sent, throttled))
        self._sent += sent
        self._throttled += throttled
        while self._answers[0][0] <= now - WINDOW_SECONDS:
            _, old_sent, old_throttled = self._answers.popleft()
            self._sent -= old_sent
            self._throttled -= old_throttled
        before = self.fraction
        if self._throttled > TOLERATED_SHARE * self._sent:
            if now - self._lowered_at >= WINDOW_SECONDS:
                self.fraction = max(FLOOR, before * DECREASE)
                self._lowered_at = now
            self._changed_at = now
        elif sent > throttled:
            self.fraction = min(1.0, before + INCREASE_PER_SECOND * (now - self._changed_at))
            self._changed_at = now
        return self.fraction != before


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
    """Records and bytes that one shard was offered and that wait now, and the records sent and throttled.

    All but `waiting` only grow, except that `offered` falls when a waiting record expires.
    """

    offered: tuple[int, int]
    waiting: tuple[int, int]
    sent: int
    throttled: int


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
        # When the first record expires. Infinite if, and only if, the queue is empty.
        self.earliest_expiration = math.inf
        self._rate = AdaptiveRate(now) if rules.adaptive else None
        self._in_order = rules.in_order
        self._in_flight: KinesisRecord | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_waiting(self) -> bool:
        """Return True if a record waits; cheaper than the length."""
        return self.earliest_expiration != math.inf

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait."""
        return sum(len(record.arrivals) for record in self._queue)

    @property
    def rate_fraction(self) -> float:
        """Return the fraction of the configured limit in use, 1.0 unless throttling lowered it."""
        return 1.0 if self._rate is None else self._rate.fraction

    def put(self, record: KinesisRecord) -> None:
        """Enqueue a Kinesis record until `drain` finds tokens for it."""
        self._queue.add(record)
        self._expiring.add(record)
        self.earliest_expiration = self._expiring[0].expires_at

    def begin_like(self, other: "ShardLimiter", now: float) -> None:
        """Spend the tokens that `other` has spent: records that it admitted may have gone to this shard."""
        bucket = other._bucket  # noqa: SLF001 - the same class
        levels = zip(bucket.capacities, bucket.tokens(now), strict=True)
        self._bucket.try_take([max(0.0, capacity - tokens) for capacity, tokens in levels], now)

    def admit_at_once(self, record: KinesisRecord, now: float) -> bool:
        """Admit a record past an empty queue if its tokens are there: the usual case, made fast."""
        # An infinite earliest expiration means an empty queue; asking the queue itself would be a call, as would
        # `has_expired`.
        if self.earliest_expiration != math.inf or self._in_flight is not None or record.expires_at <= now:
            return False
        if not self._bucket.try_take((1, record.size_bytes), now):
            return False
        self._admitted_records += 1
        self._admitted_bytes += record.size_bytes
        if self._in_order:
            self._in_flight = record
        return True

    def admit_run(self, records: Sequence[KinesisRecord], now: float) -> int:
        """Admit all of these records past an empty queue if there are tokens for all, else none; return how many."""
        if self.earliest_expiration != math.inf or self._in_order:
            return 0
        # Those that have not expired (`has_expired`), without a call for each.
        costs = [record.size_bytes for record in records if record.expires_at > now]
        count, size_bytes = len(costs), sum(costs)
        most_records, most_bytes = self._bucket.capacities
        # A full bucket admits one cost above its capacity. These records, taken one by one, would not all pass.
        if count < len(records) or count > most_records or size_bytes > most_bytes:
            return 0
        if not self._bucket.try_take((count, size_bytes), now):
            return 0
        self._admitted_records += count
        self._admitted_bytes += size_bytes
        return count

    def drain(self, now: float) -> Drained:
        """Remove and return the expired records, then those that the tokens admit."""
        expired = self.take_expired(now)
        admitted: list[KinesisRecord] = []
        if self.earliest_expiration <= now or (expired and self._in_order):
            # The other expired records leave first. In arrival order the rest of an expired one returns to its place.
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
        """Remove and return every record: the expired ones, and all others without tokens."""
        return Drained(self.take_expired(now, at_most=sys.maxsize), self.take_all())

    def take_expired(self, now: float, *, at_most: int = EXPIRED_AT_ONCE) -> list[KinesisRecord]:
        """Remove and return records whose time to live is over: `at_most` user records, or those of one record more.

        If more have expired, `wakeup_at` returns a time in the past.
        """
        expired: list[KinesisRecord] = []
        if self.earliest_expiration > now:
            return expired
        expiring = self._expiring
        count = 0
        while expiring and has_expired(expiring[0].expires_at, now) and count < at_most:
            record = expiring.pop(0)
            self._queue.remove(record)
            expired.append(record)
            count += len(record.arrivals)
        self._look_for_expiration()
        return expired

    def _look_for_expiration(self) -> None:
        self.earliest_expiration = self._expiring[0].expires_at if self._expiring else math.inf

    def take_all(self) -> list[KinesisRecord]:
        """Remove and return everything that waits, in order."""
        records = list(self._queue)
        self._queue.clear()
        self._expiring.clear()
        self.earliest_expiration = math.inf
        return records

    def wakeup_at(self, now: float) -> float:
        """Return when `drain` will next return a record, `math.inf` if no record waits for time to pass."""
        if not self._queue:
            return math.inf
        if self._in_flight is not None:
            return self.earliest_expiration
        return min(self._bucket.ready_at((1, self._queue[0].size_bytes), now), self.earliest_expiration)

    def answered(self, *, sent: int, throttled: int, now: float) -> bool:
        """Count an answer for `sent` Kinesis records; return True if the rate changed."""
        self._sent_records += sent
        self._throttled_records += throttled
        if self._rate is None or not self._rate.answered(sent=sent, throttled=throttled, now=now):
            return False
        fraction = self._rate.fraction
        self._bucket.set_rate(_RECORDS, self._records_per_second * fraction, now)
        self._bucket.set_rate(_BYTES, self._bytes_per_second * fraction, now)
        return True

    def set_share(self, records_per_second: float, bytes_per_second: float, now: float) -> None:
        """Use these rates from now on instead of the configured ones. The burst follows; tokens in the bucket stay."""
        if (records_per_second, bytes_per_second) == (self._records_per_second, self._bytes_per_second):
            return
        self._records_per_second = records_per_second
        self._bytes_per_second = bytes_per_second
        fraction, burst_seconds = self.rate_fraction, self._burst_seconds
        self._bucket.set_rate(_RECORDS, records_per_second * fraction, now, capacity=records_per_second * burst_seconds)
        self._bucket.set_rate(_BYTES, bytes_per_second * fraction, now, capacity=bytes_per_second * burst_seconds)

    def usage(self) -> ShardUsage:
        """Return the counts; this looks at the whole queue."""
        waiting = (len(self._queue), sum([record.size_bytes for record in self._queue])) if self.is_waiting else (0, 0)
        offered = self._admitted_records + waiting[0], self._admitted_bytes + waiting[1]
        return ShardUsage(offered, waiting, self._sent_records, self._throttled_records)

    def finished(self, record: KinesisRecord) -> None:
        """In arrival order, admit the next record: `record` is final, or back in the queue."""
        if self._in_flight is record:
            self._in_flight = None

    def __repr__(self) -> str:
        return f"<ShardLimiter {len(self._queue)} waiting, at {self.rate_fraction:.0%} of its limit>"
