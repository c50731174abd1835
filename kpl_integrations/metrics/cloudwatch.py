"""The KPL's metrics for CloudWatch: same names, dimensions, levels and granularity, so that existing alarms work.

    metrics = CloudWatchMetrics()
    producer = Producer(config, hooks=[metrics])
    metrics.watch(producer)
    with CloudWatchUploader(metrics, region="us-east-1"):
        ...

Where the process may not call CloudWatch (Lambda, containers with an agent), `emf_lines` makes log lines of
the same metrics. CloudWatch charges for every metric of every shard: `granularity="stream"` is cheaper and
enough for most.

Source: amazon-kinesis-producer, metrics.md and aws/metrics/metrics_constants.h. A metric exists once for each
prefix of its dimensions `[ErrorCode], StreamName, ShardId`: two streams of two shards make seven series.
The KPL adds a sample for each user record; a fact covers a whole Kinesis record or request. So sums and counts
are the KPL's, minimum and maximum are those of the records' means, and `BufferingTime` has one sample per
request: the wait of its oldest user record.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from kpl_core.hooks import Fact, RecordsFinished, RequestCompleted
from kpl_core.options.validation import require_choice
from kpl_core.records.pipeline_statistics import PipelineStatistics
from kpl_core.records.record_result import EXPIRED
from kpl_integrations.metrics.metrics_hook import BoundedLabel

_MAX_STREAMS: Final = 100
_MAX_SHARDS: Final = 1_000
_MAX_CODES: Final = 50
_MILLISECONDS: Final = 1_000
# The KPL samples pending records five times a second. Here they are sampled with a fact, at most that often.
_PENDING_SECONDS: Final = 0.2

Level = Literal["none", "summary", "detailed"]
Granularity = Literal["global", "stream", "shard"]
Unit = Literal["Count", "Bytes", "Milliseconds"]
Dimensions = tuple[tuple[str, str], ...]

# Each includes those before it.
_LEVELS: Final[tuple[str, ...]] = get_args(Level)
_GRANULARITIES: Final[tuple[str, ...]] = get_args(Granularity)


class KplMetric(NamedTuple):
    """One metric of the KPL: the lowest level that sends it, its unit and its finest granularity."""

    name: str
    level: Level
    unit: Unit
    finest: Granularity


_ROWS: Final = (
    KplMetric("UserRecordsReceived", "detailed", "Count", "stream"),
    KplMetric("UserRecordsPending", "detailed", "Count", "stream"),
    KplMetric("UserRecordsPut", "summary", "Count", "shard"),
    KplMetric("UserRecordsDataPut", "detailed", "Bytes", "shard"),
    KplMetric("UserRecordExpired", "summary", "Count", "shard"),
    KplMetric("KinesisRecordsPut", "summary", "Count", "shard"),
    KplMetric("KinesisRecordsDataPut", "detailed", "Bytes", "shard"),
    KplMetric("ErrorsByCode", "summary", "Count", "shard"),
    KplMetric("AllErrors", "summary", "Count", "shard"),
    KplMetric("RetriesPerRecord", "detailed", "Count", "shard"),
    KplMetric("BufferingTime", "summary", "Milliseconds", "stream"),
    KplMetric("RequestTime", "detailed", "Milliseconds", "stream"),
    KplMetric("UserRecordsPerKinesisRecord", "detailed", "Count", "shard"),
    KplMetric("KinesisRecordsPerPutRecordsRequest", "detailed", "Count", "stream"),
    KplMetric("UserRecordsPerPutRecordsRequest", "detailed", "Count", "stream"),
)

KPL_METRICS: Final = MappingProxyType({metric.name: metric for metric in _ROWS})


class StatisticSet(msgspec.Struct):
    """CloudWatch's summary of many values: their sum, number, minimum and maximum."""

    total: float = 0.0
    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, total: float, count: int) -> None:
        """Add `count` (>= 1) values that sum to `total`; their mean stands for minimum and maximum."""
        mean = total / count
        self.total += total
        self.count += count
        if mean < self.minimum:
            self.minimum = mean
        if mean > self.maximum:
            self.maximum = mean

    def merged(self, other: "StatisticSet") -> "StatisticSet":
        """Return the summary of the values of both."""
        minimum, maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        return StatisticSet(self.total + other.total, self.count + other.count, minimum, maximum)


class Datum(msgspec.Struct, frozen=True):
    """One metric over one interval."""

    name: str
    dimensions: Dimensions
    unit: str
    values: StatisticSet


class _SeriesKey(NamedTuple):
    """A metric at its finest granularity; shard and code are "" if it has none."""

    name: str
    stream: str
    shard: str
    code: str


class _Producer(Protocol):
    def statistics(self) -> Mapping[str, PipelineStatistics]:
        """Return the counts of each stream."""


class CloudWatchMetrics:
    """A hook that summarises facts until `take` removes the summary.

    Args:
        level: "none", "summary" or "detailed", as the KPL's `MetricsLevel`.
        granularity: "global", "stream" or "shard", as the KPL's `MetricsGranularity`.
        dimensions: more dimensions, before the others.
        clock: monotonic seconds.

    Raises:
        ConfigError: the level or the granularity does not exist.
    """

    def __init__(
        self,
        *,
        level: Level = "detailed",
        granularity: Granularity = "shard",
        dimensions: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_choice("level", level, _LEVELS)
        require_choice("granularity", granularity, _GRANULARITIES)
        sent = _LEVELS[: _LEVELS.index(level) + 1]
        self._names = {name for name, metric in KPL_METRICS.items() if metric.level in sent}
        self._granularities = _GRANULARITIES[: _GRANULARITIES.index(granularity) + 1]
        self._extra: Dimensions = tuple((dimensions or {}).items())
        self._clock = clock
        self._stream = BoundedLabel(_MAX_STREAMS)
        self._shard = BoundedLabel(_MAX_SHARDS)
        self._code = BoundedLabel(_MAX_CODES)
        # Facts arrive on the producer's event loop; the uploader has its own thread.
        self._lock = threading.Lock()
        # A value is added once, at its finest granularity; `take` sums up the coarser ones.
        self._finest: dict[_SeriesKey, StatisticSet] = {}
        self._sets: dict[tuple[str, Dimensions], StatisticSet] = {}
        self._producer: _Producer | None = None
        self._received: dict[str, int] = {}
        self._pending_at = -_PENDING_SECONDS

    def watch(self, producer: _Producer) -> None:
        """Count the received and the pending user records of this producer."""
        self._producer = producer

    def __call__(self, fact: Fact) -> None:
        """Add the samples of one fact."""
        with self._lock:
            match fact:
                case RecordsFinished(outcome="delivered" | "failed"):
                    self._on_records_finished(fact)
                case RequestCompleted():
                    self._on_request_completed(fact)
                case _:
                    # Spooled and dead-lettered records come back; the KPL has no metrics of maps, rates and breakers.
                    pass
            if self._clock() - self._pending_at >= _PENDING_SECONDS:
                self._sample_producer()

    def take(self) -> list[Datum]:
        """Remove and return the summary since the last call."""
        with self._lock:
            self._sample_producer()
            finest, self._finest = self._finest, {}
            for key, values in finest.items():
                for dimensions in self._dimension_prefixes(key):
                    self._merge(key.name, dimensions, values)
            sets, self._sets = self._sets, {}
        return [Datum(name, dimensions, KPL_METRICS[name].unit, values) for (name, dimensions), values in sets.items()]

    def give_back(self, data: Sequence[Datum]) -> None:
        """Take back data that could not be sent; the next `take` includes it."""
        with self._lock:
            for datum in data:
                self._merge(datum.name, datum.dimensions, datum.values)

    def _merge(self, name: str, dimensions: Dimensions, values: StatisticSet) -> None:
        key = name, dimensions
        known = self._sets.get(key)
        self._sets[key] = values if known is None else known.merged(values)

    def _sample_producer(self) -> None:
        self._pending_at = self._clock()
        if self._producer is None:
            return
        for stream, counts in self._producer.statistics().items():
            new = counts.accepted - self._received.get(stream, 0)
            self._received[stream] = counts.accepted
            if new:
                self._add("UserRecordsReceived", stream, "", new, new)
            self._add("UserRecordsPending", stream, "", counts.buffered)

    def _on_request_completed(self, fact: RequestCompleted) -> None:
        add, stream = self._add, fact.stream
        add("RequestTime", stream, "", (fact.ended_at - fact.started_at) * _MILLISECONDS)
        add("BufferingTime", stream, "", fact.queue_wait * _MILLISECONDS)
        add("KinesisRecordsPerPutRecordsRequest", stream, "", fact.kinesis_records)
        add("UserRecordsPerPutRecordsRequest", stream, "", fact.user_records)
        for (shard, code), count in fact.errors_by_shard.items():
            add("KinesisRecordsPut", stream, shard, 0, count)
            add("AllErrors", stream, shard, count, count)
            add("ErrorsByCode", stream, shard, count, count, code)

    def _on_records_finished(self, fact: RecordsFinished) -> None:
        add, stream, shard, count = self._add, fact.stream, fact.shard_id or "", fact.user_records
        is_delivered = fact.outcome == "delivered"
        add("UserRecordsPut", stream, shard, count if is_delivered else 0, count)
        add("RetriesPerRecord", stream, shard, max(0, fact.attempts - 1) * count, count)
        if fact.reason == EXPIRED:
            add("UserRecordExpired", stream, shard, count, count)
        if is_delivered:
            add("UserRecordsDataPut", stream, shard, fact.user_bytes, count)
            if fact.kinesis_bytes:
                add("KinesisRecordsPut", stream, shard, 1)
                add("KinesisRecordsDataPut", stream, shard, fact.kinesis_bytes)
                add("AllErrors", stream, shard, 0)
                add("UserRecordsPerKinesisRecord", stream, shard, count)

    def _add(self, name: str, stream: str, shard: str, total: float, number: int = 1, code: str = "") -> None:
        if name not in self._names:
            return
        key = _SeriesKey(name, stream, shard, code)
        values = self._finest.get(key)
        if values is None:
            values = self._finest[key] = StatisticSet()
        values.add(total, number)

    def _dimension_prefixes(self, key: _SeriesKey) -> Iterator[Dimensions]:
        """Yield every prefix of the dimensions, down to the configured granularity."""
        dimensions = self._extra
        yield dimensions
        if key.code:
            dimensions = (*dimensions, ("ErrorCode", self._code(key.code)))
            yield dimensions
        if "stream" in self._granularities:
            dimensions = (*dimensions, ("StreamName", self._stream(key.stream)))
            yield dimensions
            if key.shard and KPL_METRICS[key.name].finest == "shard" and "shard" in self._granularities:
                yield (*dimensions, ("ShardId", self._shard(key.shard)))


def emf_lines(data: Sequence[Datum], *, namespace: str, now: float) -> Iterator[bytes]:
    """Yield CloudWatch's embedded metric format: one JSON line per set of dimensions.

    `now` is seconds since 1970. Source: the CloudWatch user guide, "Embedded Metric Format specification";
    statistic sets are written as AWS' own EMF libraries write them.
    """
    by_dimensions: dict[Dimensions, list[Datum]] = {}
    for datum in data:
        by_dimensions.setdefault(datum.dimensions, []).append(datum)
    for dimensions, group in by_dimensions.items():
        directive = {
            "Namespace": namespace,
            "Dimensions": [[name for name, _ in dimensions]],
            "Metrics": [{"Name": datum.name, "Unit": datum.unit} for datum in group],
        }
        line: dict[str, Any] = {"_aws": {"Timestamp": int(now * 1_000), "CloudWatchMetrics": [directive]}}
        line.update(dimensions)
        for datum in group:
            values = datum.values
            line[datum.name] = {
                "Max": values.maximum,
                "Min": values.minimum,
                "Count": values.count,
                "Sum": values.total,
            }
        yield msgspec.json.encode(line)
