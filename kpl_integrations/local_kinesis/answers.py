"""The fake service's values as members of wire answers; absent members are left out, as the service does."""

from collections.abc import Mapping

from kpl_core.testing import (
    ChildShard,
    RecordsPage,
    ShardDescription,
    ShardPage,
    StreamDescription,
    StreamPage,
    StreamSummary,
)
from kpl_integrations.kinesis_protocol import Timestamp

__all__ = ["Answer", "description", "listed_shards", "listed_streams", "read_records", "summary"]

Answer = Mapping[str, object]


def _present(members: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}


def _hash_key_range(shard: ShardDescription | ChildShard) -> Answer:
    return {"StartingHashKey": str(shard.starting_hash_key), "EndingHashKey": str(shard.ending_hash_key)}


def _shard(shard: ShardDescription) -> Answer:
    numbers = {
        "StartingSequenceNumber": shard.starting_sequence_number,
        "EndingSequenceNumber": shard.ending_sequence_number,
    }
    return _present(
        {
            "ShardId": shard.shard_id,
            "ParentShardId": shard.parent_shard_id,
            "AdjacentParentShardId": shard.adjacent_parent_shard_id,
            "HashKeyRange": _hash_key_range(shard),
            "SequenceNumberRange": _present(numbers),
        }
    )


def _stream(stream: StreamSummary) -> dict[str, object]:
    return {
        "StreamName": stream.stream_name,
        "StreamARN": stream.stream_arn,
        "StreamStatus": stream.stream_status,
        "StreamModeDetails": {"StreamMode": stream.stream_mode},
        "StreamCreationTimestamp": Timestamp(stream.created_ms),
    }


def summary(stream: StreamSummary) -> Answer:
    """Return the answer of DescribeStreamSummary."""
    members = _stream(stream) | {
        "RetentionPeriodHours": stream.retention_hours,
        "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
        "EncryptionType": "NONE",
        "OpenShardCount": stream.open_shard_count,
        "ConsumerCount": 0,
        "MaxRecordSizeInKiB": stream.max_record_size_kib,
    }
    return {"StreamDescriptionSummary": members}


def description(stream: StreamDescription) -> Answer:
    """Return the answer of DescribeStream."""
    members = _stream(stream.summary) | {
        "Shards": [_shard(shard) for shard in stream.shards],
        "HasMoreShards": stream.has_more_shards,
        "RetentionPeriodHours": stream.summary.retention_hours,
        "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
        "EncryptionType": "NONE",
    }
    return {"StreamDescription": members}


def listed_streams(page: StreamPage) -> Answer:
    """Return the answer of ListStreams."""
    members: dict[str, object] = {
        "StreamNames": [stream.stream_name for stream in page.streams],
        "HasMoreStreams": page.next_token is not None,
        "NextToken": page.next_token,
        "StreamSummaries": [_stream(stream) for stream in page.streams],
    }
    return _present(members)


def listed_shards(page: ShardPage) -> Answer:
    """Return the answer of ListShards."""
    return _present({"Shards": [_shard(shard) for shard in page.shards], "NextToken": page.next_token})


def read_records(page: RecordsPage) -> Answer:
    """Return the answer of GetRecords."""
    records = [
        {
            "SequenceNumber": record.sequence_number,
            "ApproximateArrivalTimestamp": Timestamp(record.arrived_ms),
            "Data": record.data,
            "PartitionKey": record.partition_key,
        }
        for record in page.records
    ]
    children = [
        {
            "ShardId": child.shard_id,
            "ParentShards": list(child.parent_shard_ids),
            "HashKeyRange": _hash_key_range(child),
        }
        for child in page.child_shards
    ]
    return _present(
        {
            "Records": records,
            "NextShardIterator": page.next_shard_iterator,
            "MillisBehindLatest": page.millis_behind_latest,
            "ChildShards": children or None,
        }
    )
