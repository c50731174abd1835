"""The KPL's metrics: names, levels, units and how far down each goes, in one table.

Source: amazon-kinesis-producer, metrics.md, and its aws/metrics/metrics_constants.h. A metric exists once for
each prefix of its dimensions, `[ErrorCode], StreamName, ShardId`: two streams of two shards make seven of a name.
"""

from types import MappingProxyType
from typing import Final, Literal, NamedTuple

__all__ = ["GRANULARITIES", "KPL_METRICS", "LEVELS", "Granularity", "KplMetric", "Level", "Unit"]

Level = Literal["none", "summary", "detailed"]
Granularity = Literal["global", "stream", "shard"]
Unit = Literal["Count", "Bytes", "Milliseconds"]

LEVELS: Final = MappingProxyType({"none": 0, "summary": 1, "detailed": 2})
GRANULARITIES: Final = MappingProxyType({"global": 0, "stream": 1, "shard": 2})


class KplMetric(NamedTuple):
    """One row: from which level on it is sent, and its finest granularity."""

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
