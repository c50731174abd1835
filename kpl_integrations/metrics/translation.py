"""From facts to values of metrics: the one translation that all vendors share.

A fact is told once per request or Kinesis record, so a histogram counts those and not user
records: 450 user records of one Kinesis record are one observation.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kpl_core.hooks import CoordinatorMet, Fact, RecordsFinished, RequestCompleted, ShardRateChanged
from kpl_integrations.metrics.bounded_label import BoundedLabel
from kpl_integrations.metrics.shard_utilisation import ShardUtilisation

__all__ = ["Sample", "Translation"]

_MAX_REASONS: Final = 50
_MAX_STREAMS: Final = 100
_MAX_SHARDS: Final = 1_000


class Sample(NamedTuple):
    """A value for a metric: added to a counter, observed by a histogram, or what a gauge shows now."""

    name: str
    labels: tuple[str, ...]
    value: float


class Translation:
    """Translates facts as they come, and remembers what a gauge must show later. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reason = BoundedLabel(_MAX_REASONS)
        self._stream = BoundedLabel(_MAX_STREAMS)
        self._shard = BoundedLabel(_MAX_SHARDS)
        self._utilisation: dict[tuple[str, str], ShardUtilisation] = {}
        # Facts come on the producer's loop, whoever looks may do so on a thread of its own.
        self._looking = threading.Lock()

    def samples(self, fact: Fact) -> Iterator[Sample]:
        """Yield the values that a fact adds."""
        match fact:
            case RequestCompleted():
                yield from self._request(fact)
            case RecordsFinished():
                yield from self._records(fact)
            case ShardRateChanged(stream=stream, shard_id=shard_id, fraction=fraction):
                yield Sample("kinesis_producer_shard_rate_limit", self.shard_labels(stream, shard_id), fraction)
            case CoordinatorMet(failure=failure):
                if failure:
                    yield Sample("kinesis_coordinator_failures_total", (failure,), 1)
            case _:
                # A new shard map changes no metric; breakers, depths and shares are read from their sources.
                return

    def gauges(self) -> Iterator[Sample]:
        """Yield what must be worked out when somebody looks: the utilisation of the shards."""
        now = self._clock()
        with self._looking:
            shares = [(labels, utilisation.share(now)) for labels, utilisation in self._utilisation.items()]
        for labels, share in shares:
            yield Sample("kinesis_producer_shard_utilisation", labels, share)

    def shard_labels(self, stream: str, shard_id: str) -> tuple[str, str]:
        """Return the labels of a shard, bounded."""
        return self._stream(stream), self._shard(shard_id)

    def _request(self, fact: RequestCompleted) -> Iterator[Sample]:
        outcome = "answered" if fact.error_code is None else "failed"
        yield Sample("kinesis_producer_send_duration_seconds", (outcome,), fact.ended_at - fact.started_at)
        yield Sample("kinesis_producer_queue_wait_seconds", (), fact.queue_wait)
        if fact.kinesis_records:
            yield Sample("kinesis_producer_aggregation_ratio", (), fact.user_records / fact.kinesis_records)
        for shard_id, throttled in fact.throttled_by_shard.items():
            labels = self.shard_labels(fact.stream, shard_id)
            yield Sample("kinesis_producer_throttled_records_total", labels, throttled)

    def _records(self, fact: RecordsFinished) -> Iterator[Sample]:
        labels = (fact.outcome, self._reason(fact.reason), fact.tier)
        yield Sample("kinesis_producer_records_total", labels, fact.user_records)
        yield Sample("kinesis_producer_bytes_total", (fact.outcome,), fact.user_bytes)
        yield Sample("kinesis_producer_delivery_seconds", (), fact.age)
        yield Sample("kinesis_producer_attempts", (), fact.attempts)
        if fact.outcome == "delivered":
            shard = self.shard_labels(fact.stream, fact.shard_id or "")
            with self._looking:
                utilisation = self._utilisation.get(shard)
                if utilisation is None:
                    utilisation = self._utilisation[shard] = ShardUtilisation()
                utilisation.delivered(fact.user_bytes, self._clock())
