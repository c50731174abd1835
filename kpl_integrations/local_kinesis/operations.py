"""Carries out the operations of the Kinesis API: one function each, from a checked request to the answer's members.

Members without a value are left out of an answer, as the service does. An answer without members has no body.
"""

from collections.abc import Mapping
from functools import singledispatch

import msgspec

from kpl_core.options.kinesis_limits import SHARDS_PER_PAGE
from kpl_core.testing import (
    ChildShard,
    FakeKinesis,
    ShardDescription,
    ShardListingFilter,
    StreamSummary,
)
from kpl_integrations.kinesis_protocol import requests
from kpl_integrations.kinesis_protocol.wire import Timestamp, present

Answer = Mapping[str, object]

_ITEMS_PER_PAGE = 100
_RECORDS_PER_ANSWER = 10_000
_FEATURES: Answer = {"EnhancedMonitoring": [{"ShardLevelMetrics": []}], "EncryptionType": "NONE"}


def _milliseconds(timestamp: float | None) -> int | None:
    return None if timestamp is None else round(timestamp * 1000)


@singledispatch
def answer(request: msgspec.Struct, kinesis: FakeKinesis, now: float) -> Answer | None:
    """Carry out a request at `now` (seconds of the server's clock) and return the members of its answer.

    Raises:
        KinesisError: the service answers with this error.
    """
    message = f"{type(request).__name__} at {now} is not an operation of {kinesis!r}"
    raise TypeError(message)


@answer.register
def _(request: requests.CreateStream, kinesis: FakeKinesis, now: float) -> None:
    mode = request.stream_mode_details and request.stream_mode_details.stream_mode
    kinesis.create_stream(
        request.stream_name or "",
        shard_count=request.shard_count,
        mode=mode or "PROVISIONED",
        max_record_size_kib=request.max_record_size_kib,
        now=now,
    )


@answer.register
def _(request: requests.DeleteStream, kinesis: FakeKinesis, now: float) -> None:
    kinesis.delete_stream(request.stream(), now=now)


@answer.register
def _(request: requests.DescribeStream, kinesis: FakeKinesis, now: float) -> Answer:
    stream = kinesis.describe_stream(
        request.stream(),
        limit=request.limit or _ITEMS_PER_PAGE,
        exclusive_start_shard_id=request.exclusive_start_shard_id,
        now=now,
    )
    members = _stream(stream.summary) | {
        "Shards": [_shard(shard) for shard in stream.shards],
        "HasMoreShards": stream.has_more_shards,
        "RetentionPeriodHours": stream.summary.retention_hours,
        **_FEATURES,
    }
    return {"StreamDescription": members}


@answer.register
def _(request: requests.DescribeStreamSummary, kinesis: FakeKinesis, now: float) -> Answer:
    stream = kinesis.describe_stream_summary(request.stream(), now=now)
    members = _stream(stream) | {
        "RetentionPeriodHours": stream.retention_hours,
        **_FEATURES,
        "OpenShardCount": stream.open_shard_count,
        "ConsumerCount": 0,
        "MaxRecordSizeInKiB": stream.max_record_size_kib,
    }
    return {"StreamDescriptionSummary": members}


@answer.register
def _(request: requests.ListStreams, kinesis: FakeKinesis, now: float) -> Answer:
    page = kinesis.list_streams(
        limit=request.limit or _ITEMS_PER_PAGE,
        exclusive_start_stream_name=request.exclusive_start_stream_name,
        next_token=request.next_token,
        now=now,
    )
    members = {
        "StreamNames": [stream.stream_name for stream in page.streams],
        "HasMoreStreams": page.next_token is not None,
        "NextToken": page.next_token,
        "StreamSummaries": [_stream(stream) for stream in page.streams],
    }
    return present(members)


@answer.register
def _(request: requests.ListShards, kinesis: FakeKinesis, now: float) -> Answer:
    wanted = request.shard_filter
    shard_filter = (
        None
        if wanted is None
        else ShardListingFilter(wanted.type or "", wanted.shard_id, _milliseconds(wanted.timestamp))
    )
    page = kinesis.list_shards(
        request.stream() or None,
        shard_filter=shard_filter,
        exclusive_start_shard_id=request.exclusive_start_shard_id,
        max_results=request.max_results or SHARDS_PER_PAGE,
        next_token=request.next_token,
        now=now,
    )
    return present({"Shards": [_shard(shard) for shard in page.shards], "NextToken": page.next_token})


@answer.register
def _(request: requests.PutRecord, kinesis: FakeKinesis, now: float) -> Answer:
    record = (request.partition_key or "", request.explicit_hash_key, request.data or b"")
    entry = kinesis.put_record(request.stream(), record, now=now)
    return {"ShardId": entry.shard_id, "SequenceNumber": entry.sequence_number}


@answer.register
def _(request: requests.GetShardIterator, kinesis: FakeKinesis, now: float) -> Answer:
    iterator = kinesis.get_shard_iterator(
        request.stream(),
        shard_id=request.shard_id or "",
        iterator_type=request.shard_iterator_type or "",
        starting_sequence_number=request.starting_sequence_number,
        timestamp_ms=_milliseconds(request.timestamp),
        now=now,
    )
    return {"ShardIterator": iterator}


@answer.register
def _(request: requests.GetRecords, kinesis: FakeKinesis, now: float) -> Answer:
    limit = request.limit or _RECORDS_PER_ANSWER
    page = kinesis.get_records(request.shard_iterator or "", limit=limit, now=now)
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
    return present(
        {
            "Records": records,
            "NextShardIterator": page.next_shard_iterator,
            "MillisBehindLatest": page.millis_behind_latest,
            "ChildShards": children or None,
        }
    )


@answer.register
def _(request: requests.SplitShard, kinesis: FakeKinesis, now: float) -> None:
    kinesis.split_shard(
        request.stream(),
        shard_id=request.shard_to_split or "",
        new_starting_hash_key=int(request.new_starting_hash_key or ""),
        now=now,
    )


@answer.register
def _(request: requests.MergeShards, kinesis: FakeKinesis, now: float) -> None:
    kinesis.merge_shards(
        request.stream(),
        shard_id=request.shard_to_merge or "",
        adjacent_shard_id=request.adjacent_shard_to_merge or "",
        now=now,
    )


@answer.register
def _(request: requests.UpdateShardCount, kinesis: FakeKinesis, now: float) -> Answer:
    stream = request.stream()
    change = kinesis.update_shard_count(stream, target_shard_count=request.target_shard_count or 0, now=now)
    return {
        "StreamName": change.stream_name,
        "StreamARN": change.stream_arn,
        "CurrentShardCount": change.current_shard_count,
        "TargetShardCount": change.target_shard_count,
    }


@answer.register
def _(request: requests.UpdateMaxRecordSize, kinesis: FakeKinesis, now: float) -> None:
    size = request.max_record_size_kib or 0
    kinesis.update_max_record_size(request.stream(), max_record_size_kib=size, now=now)


def _hash_key_range(shard: ShardDescription | ChildShard) -> Answer:
    return {"StartingHashKey": str(shard.starting_hash_key), "EndingHashKey": str(shard.ending_hash_key)}


def _shard(shard: ShardDescription) -> Answer:
    numbers = {
        "StartingSequenceNumber": shard.starting_sequence_number,
        "EndingSequenceNumber": shard.ending_sequence_number,
    }
    return present(
        {
            "ShardId": shard.shard_id,
            "ParentShardId": shard.parent_shard_id,
            "AdjacentParentShardId": shard.adjacent_parent_shard_id,
            "HashKeyRange": _hash_key_range(shard),
            "SequenceNumberRange": numbers,
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
