"""The KPL's metrics for CloudWatch: same names, dimensions, levels and granularity, so that its alarms keep working.

    metrics = CloudWatchMetrics()
    producer = Producer(config, hooks=[metrics])
    metrics.watch(producer)
    with CloudWatchUploader(metrics, region="us-east-1"):
        ...

Where nothing may call CloudWatch (Lambda, containers with an agent), `emf_lines` makes log lines of the same.
Every metric of every shard is paid for: `granularity="stream"` is enough for most, and cheaper.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, get_args

import msgspec

from kpl_core import ConfigError
from kpl_core.hooks import Fact
from kpl_core.pipeline.pipeline_statistics import PipelineStatistics
from kpl_integrations.metrics.bounded_label import BoundedLabel
from kpl_integrations.metrics.kpl_names import GRANULARITIES, KPL_METRICS, LEVELS, Granularity, Level
from kpl_integrations.metrics.kpl_samples import add_kpl_samples
from kpl_integrations.metrics.statistic_set import StatisticSet

__all__ = ["CloudWatchMetrics", "Datum", "emf_lines"]

_MAX_STREAMS: Final = 100
_MAX_SHARDS: Final = 1_000
_MAX_CODES: Final = 50
# The KPL samples what is pending five times a second; here whenever a fact comes, and no more often.
_PENDING_SECONDS: Final = 0.2

Dimensions = tuple[tuple[str, str], ...]
_Key = tuple[str, Dimensions]
# Name, stream, shard, code.
_Deepest = tuple[str, str, str, str]


class Datum(msgspec.Struct, frozen=True):
    """One metric over one interval."""

    name: str
    dimensions: Dimensions
    unit: str
    values: StatisticSet


class _Producer(Protocol):
    def statistics(self) -> Mapping[str, PipelineStatistics]:
        """Return each stream's counts."""


class CloudWatchMetrics:
    """A hook that sums up what is told, until somebody takes it. `clock` is monotonic seconds.

    Args:
        level: "none", "summary" or "detailed", as the KPL's `MetricsLevel`.
        granularity: "global", "stream" or "shard", as the KPL's `MetricsGranularity`.
        dimensions: more dimensions, before the others.
        clock: seconds, monotonic.

    Raises:
        ConfigError: level or granularity is another word.
    """

    def __init__(
        self,
        *,
        level: Level = "detailed",
        granularity: Granularity = "shard",
        dimensions: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value, words in (("level", level, Level), ("granularity", granularity, Granularity)):
            if value not in get_args(words):
                message = f"{name} is {value!r}; it must be one of {', '.join(map(repr, get_args(words)))}"
                raise ConfigError(message)
        self._names = {name for name, metric in KPL_METRICS.items() if LEVELS[metric.level] <= LEVELS[level]}
        self._depth = GRANULARITIES[granularity]
        self._extra: Dimensions = tuple((dimensions or {}).items())
        self._clock = clock
        self._stream = BoundedLabel(_MAX_STREAMS)
        self._shard = BoundedLabel(_MAX_SHARDS)
        self._code = BoundedLabel(_MAX_CODES)
        # Facts come on the producer's loop, the uploader has a thread of its own.
        self._lock = threading.Lock()
        # At its deepest place each value is summed up once; what stands above is summed up when it is taken.
        self._deepest: dict[_Deepest, StatisticSet] = {}
        self._sets: dict[_Key, StatisticSet] = {}
        self._producer: _Producer | None = None
        self._received: dict[str, int] = {}
        self._pending_at = -_PENDING_SECONDS

    def watch(self, producer: _Producer) -> None:
        """Count what this producer accepts and what it has pending."""
        self._producer = producer

    def __call__(self, fact: Fact) -> None:
        """Take note of one fact."""
        with self._lock:
            add_kpl_samples(fact, self._add)
            if self._clock() - self._pending_at >= _PENDING_SECONDS:
                self._look()

    def take(self) -> list[Datum]:
        """Remove and return what came since the last time."""
        with self._lock:
            self._look()
            self._spread()
            sets, self._sets = self._sets, {}
        return [Datum(name, dimensions, KPL_METRICS[name].unit, values) for (name, dimensions), values in sets.items()]

    def give_back(self, data: Sequence[Datum]) -> None:
        """Take back what could not be sent: it is in the next that is taken."""
        with self._lock:
            for datum in data:
                key = datum.name, datum.dimensions
                known = self._sets.get(key)
                self._sets[key] = datum.values if known is None else known.merged(datum.values)

    def _look(self) -> None:
        self._pending_at = self._clock()
        if self._producer is None:
            return
        for stream, counts in self._producer.statistics().items():
            new = counts.accepted - self._received.get(stream, 0)
            self._received[stream] = counts.accepted
            if new:
                self._add("UserRecordsReceived", stream, "", new, new)
            self._add("UserRecordsPending", stream, "", counts.buffered)

    def _add(self, name: str, stream: str, shard: str, total: float, number: int = 1, code: str = "") -> None:
        if name not in self._names:
            return
        key = name, stream, shard, code
        values = self._deepest.get(key)
        if values is None:
            values = self._deepest[key] = StatisticSet()
        values.add(total, number)

    def _spread(self) -> None:
        """Sum up the deepest values for every prefix of their dimensions."""
        deepest, self._deepest = self._deepest, {}
        for (name, stream, shard, code), values in deepest.items():
            for dimensions in self._places(name, stream, shard, code):
                key = name, dimensions
                known = self._sets.get(key)
                self._sets[key] = values if known is None else known.merged(values)

    def _places(self, name: str, stream: str, shard: str, code: str) -> Iterator[Dimensions]:
        """Yield every prefix of the dimensions, as far down as is wanted."""
        place = self._extra
        yield place
        if code:
            place = (*place, ("ErrorCode", self._code(code)))
            yield place
        if self._depth >= GRANULARITIES["stream"]:
            place = (*place, ("StreamName", self._stream(stream)))
            yield place
            is_of_shard = shard and KPL_METRICS[name].finest == "shard"
            if is_of_shard and self._depth >= GRANULARITIES["shard"]:
                yield (*place, ("ShardId", self._shard(shard)))


def emf_lines(data: Sequence[Datum], *, namespace: str, now: float) -> Iterator[bytes]:
    """Yield CloudWatch's embedded metric format, a line of JSON for each place; `now` is seconds since 1970.

    Source: the CloudWatch user guide, Embedded Metric Format specification; statistic sets as AWS' own EMF
    libraries write them.
    """
    places: dict[Dimensions, list[Datum]] = {}
    for datum in data:
        places.setdefault(datum.dimensions, []).append(datum)
    for dimensions, here in places.items():
        directive = {
            "Namespace": namespace,
            "Dimensions": [[name for name, _ in dimensions]],
            "Metrics": [{"Name": datum.name, "Unit": datum.unit} for datum in here],
        }
        line: dict[str, Any] = {"_aws": {"Timestamp": int(now * 1_000), "CloudWatchMetrics": [directive]}}
        line.update(dimensions)
        for datum in here:
            values = datum.values
            line[datum.name] = {
                "Max": values.maximum,
                "Min": values.minimum,
                "Count": values.count,
                "Sum": values.total,
            }
        yield msgspec.json.encode(line)
