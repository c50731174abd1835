"""The base class of every metrics vendor except CloudWatch: it turns facts into metric values.

The producer reports a fact once per request or Kinesis record, not per user record, and a histogram
counts those: a Kinesis record with 450 user records is one observation.
"""

import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kpl_core.hooks import CoordinatorMet, Fact, RecordsFinished, RequestCompleted, ShardRateChanged
from kpl_core.options.kinesis_limits import BYTES_PER_SECOND_PER_SHARD, RECORDS_PER_SECOND_PER_SHARD

OTHER: Final = "other"
LOST: Final = "kinesis_producer_lost_records_total"
_MAX_REASONS: Final = 50
_MAX_STREAMS: Final = 100
_MAX_SHARDS: Final = 1_000
_UTILISATION_WINDOW_SECONDS: Final = 10

Labels = tuple[str, ...]


class Sample(NamedTuple):
    """The current value of a counter or a gauge."""

    name: str
    labels: Labels
    value: float


Source = Callable[[], Iterable[Sample]]


class MetricsHook(ABC):
    """Keeps counters and gauges; a vendor subclass implements `observe` and exports `samples()`.

    Facts arrive on the producer's event loop; `samples` may be called on another thread. Counters are kept
    in a dictionary, because those of the vendors' libraries take a lock for each value.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reason = BoundedLabel(_MAX_REASONS)
        self._stream = BoundedLabel(_MAX_STREAMS)
        self._shard = BoundedLabel(_MAX_SHARDS)
        # From the start: Prometheus sees no increase where a series begins with its first loss.
        self._values: defaultdict[tuple[str, Labels], float] = defaultdict(int, {(LOST, ()): 0})
        self._sources: list[Source] = []
        # By stream and shard, also of those whose label is "other": their shares must not be summed.
        self._utilisation: dict[tuple[str, str], _ShardUtilisation] = {}
        self._utilisation_bound = _MAX_SHARDS
        self._utilisation_lock = threading.Lock()

    def __call__(self, fact: Fact) -> None:
        """Record the values that a fact adds."""
        match fact:
            case RecordsFinished():
                self._on_records_finished(fact)
            case RequestCompleted():
                self._on_request_completed(fact)
            case ShardRateChanged(stream=stream, shard_id=shard_id, fraction=fraction):
                self._values["kinesis_producer_shard_rate_limit", self._shard_labels(stream, shard_id)] = fraction
            case CoordinatorMet(failure=failure):
                if failure:
                    self._values["kinesis_coordinator_failures_total", (failure,)] += 1
            case _:
                # A new shard map changes no metric; breakers, depths and shares are read from their sources.
                return

    def watch(self, source: Source) -> None:
        """Read `source` at every scrape or collection. Add each kind of source at most once."""
        self._sources.append(source)

    def samples(self) -> list[Sample]:
        """Return the current values of all counters and gauges, those of the sources included."""
        samples = [Sample(name, labels, value) for (name, labels), value in list(self._values.items())]
        now = self._clock()
        with self._utilisation_lock:
            self._forget_idle_others(now)
            shares: dict[Labels, float] = {}
            for utilisation in self._utilisation.values():
                shares[utilisation.labels] = max(utilisation.share(now), shares.get(utilisation.labels, 0.0))
        samples += [Sample("kinesis_producer_shard_utilisation", labels, share) for labels, share in shares.items()]
        for source in self._sources:
            samples += source()
        return samples

    @abstractmethod
    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Add one observation to a histogram."""

    def _shard_labels(self, stream: str, shard_id: str) -> tuple[str, str]:
        return self._stream(stream), self._shard(shard_id)

    def _on_request_completed(self, fact: RequestCompleted) -> None:
        outcome = "answered" if fact.error_code is None else "failed"
        self.observe("kinesis_producer_send_duration_seconds", (outcome,), fact.ended_at - fact.started_at)
        self.observe("kinesis_producer_queue_wait_seconds", (), fact.queue_wait)
        if fact.kinesis_records:
            self.observe("kinesis_producer_aggregation_ratio", (), fact.user_records / fact.kinesis_records)
        for shard_id, throttled in fact.throttled_by_shard.items():
            labels = self._shard_labels(fact.stream, shard_id)
            self._values["kinesis_producer_throttled_records_total", labels] += throttled

    def _on_records_finished(self, fact: RecordsFinished) -> None:
        outcome = fact.outcome
        reason = fact.reason and self._reason(fact.reason)
        self._values["kinesis_producer_records_total", (outcome, reason, fact.tier)] += fact.user_records
        self._values["kinesis_producer_bytes_total", (outcome,)] += fact.user_bytes
        self.observe("kinesis_producer_delivery_seconds", (), fact.age)
        self.observe("kinesis_producer_attempts", (), fact.attempts)
        if outcome == "failed":
            self._values[LOST, ()] += fact.user_records
        if outcome == "delivered":
            with self._utilisation_lock:
                place = fact.stream, fact.shard_id or ""
                utilisation = self._utilisation.get(place)
                if utilisation is None:
                    utilisation = self._utilisation[place] = _ShardUtilisation(self._shard_labels(*place))
                    if len(self._utilisation) > self._utilisation_bound:
                        self._forget_idle_others(self._clock())
                # A user record that was finished separately is only a part of a Kinesis record.
                is_kinesis_record = fact.kinesis_bytes > 0
                size_bytes = fact.kinesis_bytes or fact.user_bytes
                utilisation.add(size_bytes, self._clock(), records=int(is_kinesis_record))

    def _forget_idle_others(self, now: float) -> None:
        """Forget shards without a label of their own that have been idle for 10 seconds: reshards make new ones."""
        if len(self._utilisation) > _MAX_SHARDS:
            self._utilisation = {
                place: each for place, each in self._utilisation.items() if each.labels == place or each.share(now)
            }
            # Twice as many as are left: a search for each new shard would take time quadratic in the shards.
            self._utilisation_bound = 2 * max(_MAX_SHARDS, len(self._utilisation))


class BoundedLabel:
    """Returns the first `limit` distinct values unchanged, and "other" for every further one.

    A monitoring system stores each combination of label values as a series. A stream that is resharded
    daily, or an error code that contains an id, must not fill its memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """Return `value`, or "other" if the limit is reached."""
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


class _ShardUtilisation:
    """Sums what was delivered to a shard over the last 10 seconds, in slots of one second."""

    __slots__ = ("_bytes", "_records", "_slots", "labels")

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        # [second, Kinesis records, bytes], oldest first; the other two fields are their sums.
        self._slots: deque[list[int]] = deque()
        self._records = 0
        self._bytes = 0

    def add(self, size_bytes: int, now: float, *, records: int) -> None:
        """Add delivered Kinesis records with `size_bytes` in total; `records` is 0 for a part of one."""
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._drop_old_slots(second)
            self._slots.append([second, 0, 0])
        newest = self._slots[-1]
        newest[1] += records
        newest[2] += size_bytes
        self._records += records
        self._bytes += size_bytes

    def share(self, now: float) -> float:
        """Return the used share of the records limit or of the bytes limit, whichever is larger; 1 is the limit."""
        self._drop_old_slots(int(now))
        return max(
            self._records / (RECORDS_PER_SECOND_PER_SHARD * _UTILISATION_WINDOW_SECONDS),
            self._bytes / (BYTES_PER_SECOND_PER_SHARD * _UTILISATION_WINDOW_SECONDS),
        )

    def _drop_old_slots(self, second: int) -> None:
        while self._slots and self._slots[0][0] <= second - _UTILISATION_WINDOW_SECONDS:
            _, records, size_bytes = self._slots.popleft()
            self._records -= records
            self._bytes -= size_bytes
