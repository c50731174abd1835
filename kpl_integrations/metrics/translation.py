"""From facts to values of metrics: the one translation that all vendors share.

A fact is told once per request or Kinesis record, so a histogram counts those and not user
records: 450 user records of one Kinesis record are one observation.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from kpl_core.hooks import CoordinatorMet, Fact, RecordsFinished, RequestCompleted, ShardRateChanged
from kpl_integrations.metrics.bounded_label import BoundedLabel
from kpl_integrations.metrics.shard_utilisation import ShardUtilisation

__all__ = ["Labels", "Recorder", "Sample", "Translation"]

_MAX_REASONS: Final = 50
_MAX_STREAMS: Final = 100
_MAX_SHARDS: Final = 1_000

Labels = tuple[str, ...]


class Sample(NamedTuple):
    """A value for a metric: what a counter came to, or what a gauge shows now."""

    name: str
    labels: Labels
    value: float


class Recorder(Protocol):
    """Who keeps the values: a vendor."""

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add to a counter."""

    def show(self, name: str, labels: Labels, value: float) -> None:
        """Say what a gauge shows from now on."""

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Give a histogram one observation."""


class Translation:
    """Tells `recorder` what facts say, and remembers what a gauge must show later. `clock` is monotonic seconds."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._add, self._show, self._observe = recorder.add, recorder.show, recorder.observe
        self._clock = clock
        self._reason = BoundedLabel(_MAX_REASONS)
        self._stream = BoundedLabel(_MAX_STREAMS)
        self._shard = BoundedLabel(_MAX_SHARDS)
        self._utilisation: dict[tuple[str, str], ShardUtilisation] = {}
        # Facts come on the producer's loop, whoever looks may do so on a thread of its own.
        self._looking = threading.Lock()

    def tell(self, fact: Fact) -> None:
        """Record the values that a fact adds."""
        match fact:
            case RecordsFinished():
                self._records(fact)
            case RequestCompleted():
                self._request(fact)
            case ShardRateChanged(stream=stream, shard_id=shard_id, fraction=fraction):
                self._show("kinesis_producer_shard_rate_limit", self.shard_labels(stream, shard_id), fraction)
            case CoordinatorMet(failure=failure):
                if failure:
                    self._add("kinesis_coordinator_failures_total", (failure,), 1)
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

    def _request(self, fact: RequestCompleted) -> None:
        outcome = "answered" if fact.error_code is None else "failed"
        self._observe("kinesis_producer_send_duration_seconds", (outcome,), fact.ended_at - fact.started_at)
        self._observe("kinesis_producer_queue_wait_seconds", (), fact.queue_wait)
        if fact.kinesis_records:
            self._observe("kinesis_producer_aggregation_ratio", (), fact.user_records / fact.kinesis_records)
        for shard_id, throttled in fact.throttled_by_shard.items():
            labels = self.shard_labels(fact.stream, shard_id)
            self._add("kinesis_producer_throttled_records_total", labels, throttled)

    def _records(self, fact: RecordsFinished) -> None:
        outcome = fact.outcome
        reason = fact.reason and self._reason(fact.reason)
        self._add("kinesis_producer_records_total", (outcome, reason, fact.tier), fact.user_records)
        self._add("kinesis_producer_bytes_total", (outcome,), fact.user_bytes)
        self._observe("kinesis_producer_delivery_seconds", (), fact.age)
        self._observe("kinesis_producer_attempts", (), fact.attempts)
        if outcome == "delivered":
            with self._looking:
                # Under its own name, if it has one; to ask for that each time costs twice as much.
                utilisation = self._utilisation.get((fact.stream, fact.shard_id or ""))
                if utilisation is None:
                    shard = self.shard_labels(fact.stream, fact.shard_id or "")
                    utilisation = self._utilisation.setdefault(shard, ShardUtilisation())
                # One that was settled apart from its neighbours is a part of a Kinesis record.
                is_whole = fact.kinesis_bytes > 0
                utilisation.delivered(fact.kinesis_bytes or fact.user_bytes, self._clock(), records=int(is_whole))
