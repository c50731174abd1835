"""The values a fake service answers with, in the service's words.

Instants are milliseconds since 1970; `*_bytes` counts the UTF-8 key and the data.
"""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

__all__ = [
    "ChildShard",
    "PutRecordsEntry",
    "RecordsPage",
    "ShardCountChange",
    "ShardDescription",
    "ShardPage",
    "StoredRecord",
    "StreamDescription",
    "StreamPage",
    "StreamStatistics",
    "StreamSummary",
]


class PutRecordsEntry(msgspec.Struct, frozen=True, gc=False):
    """The answer to one record: where it is stored, or the error it got. Exactly one pair is set."""

    shard_id: str | None = None
    sequence_number: str | None = None
    error_code: str | None = None
    error_message: str | None = None


class StoredRecord(NamedTuple):
    """One stored Kinesis record."""

    shard_id: str
    sequence_number: str
    partition_key: str
    data: bytes
    arrived_ms: int


class ShardDescription(NamedTuple):
    """One shard as ListShards describes it; both ends of the hash key range are inclusive."""

    shard_id: str
    starting_hash_key: int
    ending_hash_key: int
    starting_sequence_number: str
    ending_sequence_number: str | None
    parent_shard_id: str | None
    adjacent_parent_shard_id: str | None


class ShardPage(NamedTuple):
    """One page of ListShards; no token: the last one."""

    shards: tuple[ShardDescription, ...]
    next_token: str | None


class ChildShard(NamedTuple):
    """A successor of a closed shard, as GetRecords names it at the shard's end."""

    shard_id: str
    parent_shard_ids: tuple[str, ...]
    starting_hash_key: int
    ending_hash_key: int


class RecordsPage(NamedTuple):
    """One answer of GetRecords; no iterator: the shard is closed and read to its end."""

    records: tuple[StoredRecord, ...]
    next_shard_iterator: str | None
    millis_behind_latest: int
    child_shards: tuple[ChildShard, ...]


class StreamSummary(NamedTuple):
    """A stream as DescribeStreamSummary and ListStreams describe it. Modes: PROVISIONED, ON_DEMAND."""

    stream_name: str
    stream_arn: str
    stream_status: str
    stream_mode: str
    created_ms: int
    retention_hours: int
    open_shard_count: int
    max_record_size_kib: int


class StreamDescription(NamedTuple):
    """A stream as DescribeStream describes it."""

    summary: StreamSummary
    shards: tuple[ShardDescription, ...]
    has_more_shards: bool


class StreamPage(NamedTuple):
    """One page of ListStreams; no token: the last one."""

    streams: tuple[StreamSummary, ...]
    next_token: str | None


class ShardCountChange(NamedTuple):
    """The answer of UpdateShardCount."""

    stream_name: str
    stream_arn: str
    current_shard_count: int
    target_shard_count: int


@dataclass(slots=True)
class StreamStatistics:
    """What one stream has seen since it was created.

    `put_requests` counts PutRecord and PutRecords requests that were routed, `records_offered`
    the records in them; each of those was stored, throttled by the shard's capacity, or refused
    by an armed fault.
    """

    put_requests: int = 0
    records_offered: int = 0
    records_stored: int = 0
    records_throttled: int = 0
    records_faulted: int = 0
    bytes_stored: int = 0
    get_records_requests: int = 0
    records_read: int = 0
    list_shards_requests: int = 0
