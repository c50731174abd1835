"""From a checked wire request to a call of the fake service and its answer: one function per operation."""

from functools import singledispatch

import msgspec

from kpl_core.options.kinesis_limits import SHARDS_PER_PAGE
from kpl_core.testing import FakeKinesis, KinesisError, ShardFilter
from kpl_integrations import kinesis_protocol as wire
from kpl_integrations.local_kinesis import answers
from kpl_integrations.local_kinesis.answers import Answer

__all__ = ["answer", "stream_of"]

_NOTHING: Answer = {}
_ITEMS_PER_PAGE = 100
_RECORDS_PER_ANSWER = 10_000


def stream_of(kinesis: FakeKinesis, request: msgspec.Struct) -> str:
    """Return the name or ARN a request names its stream by; empty when it names none.

    Raises:
        KinesisError: it names two streams.
    """
    if not isinstance(request, wire.StreamRequest):
        return ""
    name, arn = request.stream_name, request.stream_arn
    if name is not None and arn is not None and kinesis.stream_name(arn) != name:
        code, message = "InvalidArgumentException", f"StreamName {name} does not match StreamARN {arn}."
        raise KinesisError(code, message)
    return arn or name or ""


def _milliseconds(timestamp: float | None) -> int | None:
    return None if timestamp is None else round(timestamp * 1000)


@singledispatch
def answer(request: msgspec.Struct, kinesis: FakeKinesis, now: float) -> Answer:
    """Carry out a request at `now` (seconds of the server's clock) and return the members of its answer.

    Raises:
        KinesisError: the service refuses it.
    """
    message = f"{type(request).__name__} at {now} is no operation of {kinesis!r}"
    raise TypeError(message)


@answer.register
def _(request: wire.CreateStream, kinesis: FakeKinesis, now: float) -> Answer:
    mode = request.stream_mode_details and request.stream_mode_details.stream_mode
    kinesis.create_stream(
        request.stream_name or "",
        shard_count=request.shard_count,
        mode=mode or "PROVISIONED",
        max_record_size_kib=request.max_record_size_kib,
        now=now,
    )
    return _NOTHING


@answer.register
def _(request: wire.DeleteStream, kinesis: FakeKinesis, now: float) -> Answer:
    kinesis.delete_stream(stream_of(kinesis, request), now=now)
    return _NOTHING


@answer.register
def _(request: wire.DescribeStream, kinesis: FakeKinesis, now: float) -> Answer:
    return answers.description(
        kinesis.describe_stream(
            stream_of(kinesis, request),
            limit=request.limit or _ITEMS_PER_PAGE,
            exclusive_start_shard_id=request.exclusive_start_shard_id,
            now=now,
        )
    )


@answer.register
def _(request: wire.DescribeStreamSummary, kinesis: FakeKinesis, now: float) -> Answer:
    return answers.summary(kinesis.describe_stream_summary(stream_of(kinesis, request), now=now))


@answer.register
def _(request: wire.ListStreams, kinesis: FakeKinesis, now: float) -> Answer:
    return answers.listed_streams(
        kinesis.list_streams(
            limit=request.limit or _ITEMS_PER_PAGE,
            exclusive_start_stream_name=request.exclusive_start_stream_name,
            next_token=request.next_token,
            now=now,
        )
    )


@answer.register
def _(request: wire.ListShards, kinesis: FakeKinesis, now: float) -> Answer:
    wanted = request.shard_filter
    shard_filter = (
        None if wanted is None else ShardFilter(wanted.type or "", wanted.shard_id, _milliseconds(wanted.timestamp))
    )
    return answers.listed_shards(
        kinesis.list_shards(
            stream_of(kinesis, request) or None,
            shard_filter=shard_filter,
            exclusive_start_shard_id=request.exclusive_start_shard_id,
            max_results=request.max_results or SHARDS_PER_PAGE,
            next_token=request.next_token,
            now=now,
        )
    )


@answer.register
def _(request: wire.PutRecord, kinesis: FakeKinesis, now: float) -> Answer:
    record = (request.partition_key or "", request.explicit_hash_key, request.data or b"")
    entry = kinesis.put_record(stream_of(kinesis, request), record, now=now)
    return {"ShardId": entry.shard_id, "SequenceNumber": entry.sequence_number}


@answer.register
def _(request: wire.GetShardIterator, kinesis: FakeKinesis, now: float) -> Answer:
    iterator = kinesis.get_shard_iterator(
        stream_of(kinesis, request),
        shard_id=request.shard_id or "",
        iterator_type=request.shard_iterator_type or "",
        starting_sequence_number=request.starting_sequence_number,
        timestamp_ms=_milliseconds(request.timestamp),
        now=now,
    )
    return {"ShardIterator": iterator}


@answer.register
def _(request: wire.GetRecords, kinesis: FakeKinesis, now: float) -> Answer:
    limit = request.limit or _RECORDS_PER_ANSWER
    return answers.read_records(kinesis.get_records(request.shard_iterator or "", limit=limit, now=now))


@answer.register
def _(request: wire.SplitShard, kinesis: FakeKinesis, now: float) -> Answer:
    kinesis.split_shard(
        stream_of(kinesis, request),
        shard_id=request.shard_to_split or "",
        new_starting_hash_key=int(request.new_starting_hash_key or ""),
        now=now,
    )
    return _NOTHING


@answer.register
def _(request: wire.MergeShards, kinesis: FakeKinesis, now: float) -> Answer:
    kinesis.merge_shards(
        stream_of(kinesis, request),
        shard_id=request.shard_to_merge or "",
        adjacent_shard_id=request.adjacent_shard_to_merge or "",
        now=now,
    )
    return _NOTHING


@answer.register
def _(request: wire.UpdateShardCount, kinesis: FakeKinesis, now: float) -> Answer:
    stream = stream_of(kinesis, request)
    change = kinesis.update_shard_count(stream, target_shard_count=request.target_shard_count or 0, now=now)
    return {
        "StreamName": change.stream_name,
        "StreamARN": change.stream_arn,
        "CurrentShardCount": change.current_shard_count,
        "TargetShardCount": change.target_shard_count,
    }


@answer.register
def _(request: wire.UpdateMaxRecordSize, kinesis: FakeKinesis, now: float) -> Answer:
    size = request.max_record_size_kib or 0
    kinesis.update_max_record_size(stream_of(kinesis, request), max_record_size_kib=size, now=now)
    return _NOTHING
