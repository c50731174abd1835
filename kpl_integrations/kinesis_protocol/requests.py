"""The supported requests of the Kinesis API, member by member.

Every member may be absent, because the service answers an absent one with a violated constraint, not with a
decoding error (see `constraints`). Unknown members are ignored, as the service ignores them. The names are those
of the API Reference (AWS, Kinesis 2013-12-02); timestamps are seconds since 1970.
"""

from typing import Annotated, Final

import msgspec

SERIALIZATION: Final = "SerializationException"
UNKNOWN_OPERATION: Final = "UnknownOperationException"
VALIDATION: Final = "ValidationException"

# Seconds since 1970, years 2 to 9998: AWS clients fail on instants outside.
Instant = Annotated[float, msgspec.Meta(ge=-62_104_000_000, le=253_370_000_000)]


class RequestRefused(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The request cannot be decoded or violates a constraint; answer `code` and `message` with HTTP `status`."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


class StreamRequest(msgspec.Struct, rename="pascal", kw_only=True):
    """A request for a stream, which is given by its name, its ARN, or both."""

    stream_name: str | None = None
    stream_arn: str | None = msgspec.field(default=None, name="StreamARN")


class PutRecordsRequestEntry(msgspec.Struct, rename="pascal", gc=False):
    """One record of a PutRecords request."""

    partition_key: str | None = None
    explicit_hash_key: str | None = None
    data: bytes | None = None


class PutRecords(StreamRequest):
    """The parameters of PutRecords (Kinesis API reference, API_PutRecords)."""

    records: list[PutRecordsRequestEntry] | None = None


class PutRecord(StreamRequest):
    """The parameters of PutRecord (Kinesis API reference, API_PutRecord)."""

    partition_key: str | None = None
    explicit_hash_key: str | None = None
    data: bytes | None = None
    sequence_number_for_ordering: str | None = None


class StreamModeDetails(msgspec.Struct, rename="pascal"):
    """The capacity mode inside CreateStream."""

    stream_mode: str | None = None


class CreateStream(StreamRequest):
    """The parameters of CreateStream (Kinesis API reference, API_CreateStream)."""

    shard_count: int | None = None
    stream_mode_details: StreamModeDetails | None = None
    max_record_size_kib: int | None = msgspec.field(default=None, name="MaxRecordSizeInKiB")


class DeleteStream(StreamRequest):
    """The parameters of DeleteStream (Kinesis API reference, API_DeleteStream)."""


class DescribeStream(StreamRequest):
    """The parameters of DescribeStream (Kinesis API reference, API_DescribeStream)."""

    limit: int | None = None
    exclusive_start_shard_id: str | None = None


class DescribeStreamSummary(StreamRequest):
    """The parameters of DescribeStreamSummary (Kinesis API reference, API_DescribeStreamSummary)."""


class ListStreams(msgspec.Struct, rename="pascal", kw_only=True):
    """The parameters of ListStreams (Kinesis API reference, API_ListStreams)."""

    limit: int | None = None
    exclusive_start_stream_name: str | None = None
    next_token: str | None = None


class ListShardsFilter(msgspec.Struct, rename="pascal"):
    """The parameters of ShardFilter (Kinesis API reference, API_ShardFilter)."""

    type: str | None = None
    shard_id: str | None = None
    timestamp: Instant | None = None


class ListShards(StreamRequest):
    """The parameters of ListShards (Kinesis API reference, API_ListShards)."""

    next_token: str | None = None
    exclusive_start_shard_id: str | None = None
    max_results: int | None = None
    stream_creation_timestamp: Instant | None = None
    shard_filter: ListShardsFilter | None = None


class GetShardIterator(StreamRequest):
    """The parameters of GetShardIterator (Kinesis API reference, API_GetShardIterator)."""

    shard_id: str | None = None
    shard_iterator_type: str | None = None
    starting_sequence_number: str | None = None
    timestamp: Instant | None = None


class GetRecords(StreamRequest):
    """The parameters of GetRecords (Kinesis API reference, API_GetRecords)."""

    shard_iterator: str | None = None
    limit: int | None = None


class SplitShard(StreamRequest):
    """The parameters of SplitShard (Kinesis API reference, API_SplitShard)."""

    shard_to_split: str | None = None
    new_starting_hash_key: str | None = None


class MergeShards(StreamRequest):
    """The parameters of MergeShards (Kinesis API reference, API_MergeShards)."""

    shard_to_merge: str | None = None
    adjacent_shard_to_merge: str | None = None


class UpdateShardCount(StreamRequest):
    """The parameters of UpdateShardCount (Kinesis API reference, API_UpdateShardCount)."""

    target_shard_count: int | None = None
    scaling_type: str | None = None


class UpdateMaxRecordSize(StreamRequest):
    """The parameters of UpdateMaxRecordSize (Kinesis API reference, API_UpdateMaxRecordSize)."""

    max_record_size_kib: int | None = msgspec.field(default=None, name="MaxRecordSizeInKiB")


REQUEST_TYPES: Final[dict[str, type[msgspec.Struct]]] = {
    request_type.__name__: request_type
    for request_type in (
        CreateStream,
        DeleteStream,
        DescribeStream,
        DescribeStreamSummary,
        GetRecords,
        GetShardIterator,
        ListShards,
        ListStreams,
        MergeShards,
        PutRecord,
        PutRecords,
        SplitShard,
        UpdateMaxRecordSize,
        UpdateShardCount,
    )
}
