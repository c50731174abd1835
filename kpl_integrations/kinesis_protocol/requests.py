"""The supported requests of the Kinesis API, member by member, with the constraints of the service's own model.

The model ships with botocore (`service-2.json`). Every member may be absent, because the service answers an absent
one with a violated constraint, not with a decoding error. Like the service, an error lists up to ten violations and
does not quote blobs and lists. Unknown members are ignored, as the service ignores them. The names are those of the
API Reference (AWS, Kinesis 2013-12-02); timestamps are seconds since 1970.
"""

import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated, Final, get_type_hints

import msgspec

from kpl_core.options.kinesis_limits import (
    MAX_RECORD_BYTES,
    PARTITION_KEY_CHARACTERS,
    RECORDS_PER_REQUEST,
    STREAM_ARN_CHARACTERS,
)
from kpl_core.records.hash_key import CANONICAL_DECIMAL
from kpl_core.records.user_record import STREAM_ARN

INVALID_ARGUMENT: Final = "InvalidArgumentException"
SERIALIZATION: Final = "SerializationException"
UNKNOWN_OPERATION: Final = "UnknownOperationException"
VALIDATION: Final = "ValidationException"

_MAX_LISTED: Final = 10
# Of a value; longer ones are cut in the message.
_MAX_QUOTED: Final = 2_048
_ARN: Final = r"arn:aws.*:kinesis:.*:\d{12}:stream/\S+"
_LARGEST_INTEGER: Final = 2**31 - 1


class RequestRefused(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The request cannot be decoded or violates a constraint; answer `code` and `message` with HTTP `status`."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


class Constraint(msgspec.Struct, frozen=True):
    """The constraints of one member; `least` and `most` bound a number, or the length of a text, blob or list."""

    least: int | None = None
    most: int | None = None
    pattern: str | None = None
    one_of: tuple[str, ...] = ()
    required: bool = False

    def violations(self, value: object) -> Iterator[str]:
        """Yield the service's message for each constraint that `value` violates."""
        if value is None:
            if self.required:
                yield "Member must not be null"
            return
        size, what = (value, "value") if isinstance(value, int) else (_length(value), "length")
        if isinstance(value, str):
            if self.one_of and value not in self.one_of:
                yield f"Member must satisfy enum value set: [{', '.join(self.one_of)}]"
            # A text that is too long is not matched.
            if self.pattern is not None and (self.most is None or size <= self.most) and not self._matches(value):
                yield f"Member must satisfy regular expression pattern: {self.pattern}"
        if self.least is not None and size < self.least:
            yield f"Member must have {what} greater than or equal to {self.least}"
        if self.most is not None and size > self.most:
            yield f"Member must have {what} less than or equal to {self.most}"

    def _matches(self, value: str) -> bool:
        # Messages show the API's pattern of an ARN. Matching it takes quadratic time.
        pattern = STREAM_ARN if self.pattern == _ARN else re.compile(self.pattern or "", re.ASCII)
        return pattern.fullmatch(value) is not None


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list)) else 0


# Seconds since 1970, years 2 to 9998: AWS clients fail on instants outside.
Instant = Annotated[float, msgspec.Meta(ge=-62_104_000_000, le=253_370_000_000)]
_Name = Annotated[str | None, Constraint(1, 128, r"[a-zA-Z0-9_.-]+")]
_RequiredName = Annotated[str | None, Constraint(1, 128, r"[a-zA-Z0-9_.-]+", required=True)]
_Arn = Annotated[str | None, Constraint(1, STREAM_ARN_CHARACTERS, _ARN)]
_PartitionKey = Annotated[str | None, Constraint(1, PARTITION_KEY_CHARACTERS, required=True)]
_HashKey = Annotated[str | None, Constraint(pattern=r"0|([1-9]\d{0,38})")]
_RequiredHashKey = Annotated[str | None, Constraint(pattern=r"0|([1-9]\d{0,38})", required=True)]
_Data = Annotated[bytes | None, Constraint(0, MAX_RECORD_BYTES, required=True)]
_SequenceNumber = Annotated[str | None, Constraint(pattern=r"0|([1-9]\d{0,128})")]
_Token = Annotated[str | None, Constraint(1, 1_048_576)]
_Limit = Annotated[int | None, Constraint(1, 10_000)]
_Count = Annotated[int | None, Constraint(1, _LARGEST_INTEGER)]


class StreamRequest(msgspec.Struct, rename="pascal", kw_only=True):
    """A request for a stream, which is given by its name, its ARN, or both."""

    stream_name: _Name = None
    stream_arn: _Arn = msgspec.field(default=None, name="StreamARN")

    def stream(self) -> str:
        """Return the stream's ARN or name; empty if a token or an iterator stands for it.

        Raises:
            RequestRefused: name and ARN are those of different streams.
        """
        name, arn = self.stream_name, self.stream_arn
        if name is not None and arn is not None and arn.rpartition("/")[2] != name:
            raise RequestRefused(INVALID_ARGUMENT, f"StreamName {name} does not match StreamARN {arn}.")
        return arn or name or ""


class PutRecordsRequestEntry(msgspec.Struct, rename="pascal", gc=False):
    """One record of a PutRecords request."""

    partition_key: _PartitionKey = None
    explicit_hash_key: _HashKey = None
    data: _Data = None


class PutRecords(StreamRequest):
    """The parameters of PutRecords (Kinesis API reference, API_PutRecords)."""

    records: Annotated[list[PutRecordsRequestEntry] | None, Constraint(1, RECORDS_PER_REQUEST, required=True)] = None


class PutRecord(StreamRequest):
    """The parameters of PutRecord (Kinesis API reference, API_PutRecord)."""

    partition_key: _PartitionKey = None
    explicit_hash_key: _HashKey = None
    data: _Data = None
    sequence_number_for_ordering: _SequenceNumber = None


class StreamModeDetails(msgspec.Struct, rename="pascal"):
    """The capacity mode inside CreateStream."""

    stream_mode: Annotated[str | None, Constraint(one_of=("PROVISIONED", "ON_DEMAND"), required=True)] = None


class CreateStream(StreamRequest):
    """The parameters of CreateStream (Kinesis API reference, API_CreateStream)."""

    stream_name: _RequiredName = None
    shard_count: _Count = None
    stream_mode_details: StreamModeDetails | None = None
    max_record_size_kib: Annotated[int | None, Constraint(1_024, 10_240)] = msgspec.field(
        default=None, name="MaxRecordSizeInKiB"
    )


class DeleteStream(StreamRequest):
    """The parameters of DeleteStream (Kinesis API reference, API_DeleteStream)."""


class DescribeStream(StreamRequest):
    """The parameters of DescribeStream (Kinesis API reference, API_DescribeStream)."""

    limit: _Limit = None
    exclusive_start_shard_id: _Name = None


class DescribeStreamSummary(StreamRequest):
    """The parameters of DescribeStreamSummary (Kinesis API reference, API_DescribeStreamSummary)."""


class ListStreams(msgspec.Struct, rename="pascal", kw_only=True):
    """The parameters of ListStreams (Kinesis API reference, API_ListStreams)."""

    limit: _Limit = None
    exclusive_start_stream_name: _Name = None
    next_token: _Token = None


_FILTER_TYPES: Final = (
    "AFTER_SHARD_ID",
    "AT_TRIM_HORIZON",
    "FROM_TRIM_HORIZON",
    "AT_LATEST",
    "AT_TIMESTAMP",
    "FROM_TIMESTAMP",
)


class ListShardsFilter(msgspec.Struct, rename="pascal"):
    """The parameters of ShardFilter (Kinesis API reference, API_ShardFilter)."""

    type: Annotated[str | None, Constraint(one_of=_FILTER_TYPES, required=True)] = None
    shard_id: _Name = None
    timestamp: Instant | None = None


class ListShards(StreamRequest):
    """The parameters of ListShards (Kinesis API reference, API_ListShards)."""

    next_token: _Token = None
    exclusive_start_shard_id: _Name = None
    max_results: _Limit = None
    stream_creation_timestamp: Instant | None = None
    shard_filter: ListShardsFilter | None = None


_ITERATOR_TYPES: Final = ("AFTER_SEQUENCE_NUMBER", "LATEST", "AT_TIMESTAMP", "AT_SEQUENCE_NUMBER", "TRIM_HORIZON")


class GetShardIterator(StreamRequest):
    """The parameters of GetShardIterator (Kinesis API reference, API_GetShardIterator)."""

    shard_id: _RequiredName = None
    shard_iterator_type: Annotated[str | None, Constraint(one_of=_ITERATOR_TYPES, required=True)] = None
    starting_sequence_number: _SequenceNumber = None
    timestamp: Instant | None = None


class GetRecords(StreamRequest):
    """The parameters of GetRecords (Kinesis API reference, API_GetRecords)."""

    shard_iterator: Annotated[str | None, Constraint(1, 512, required=True)] = None
    limit: _Limit = None


class SplitShard(StreamRequest):
    """The parameters of SplitShard (Kinesis API reference, API_SplitShard)."""

    shard_to_split: _RequiredName = None
    new_starting_hash_key: _RequiredHashKey = None


class MergeShards(StreamRequest):
    """The parameters of MergeShards (Kinesis API reference, API_MergeShards)."""

    shard_to_merge: _RequiredName = None
    adjacent_shard_to_merge: _RequiredName = None


class UpdateShardCount(StreamRequest):
    """The parameters of UpdateShardCount (Kinesis API reference, API_UpdateShardCount)."""

    target_shard_count: Annotated[int | None, Constraint(1, _LARGEST_INTEGER, required=True)] = None
    scaling_type: Annotated[str | None, Constraint(one_of=("UNIFORM_SCALING",), required=True)] = None


class UpdateMaxRecordSize(StreamRequest):
    """The parameters of UpdateMaxRecordSize (Kinesis API reference, API_UpdateMaxRecordSize)."""

    max_record_size_kib: Annotated[int | None, Constraint(1_024, 10_240, required=True)] = msgspec.field(
        default=None, name="MaxRecordSizeInKiB"
    )


# Every request for a stream is an operation.
_OPERATIONS: Final[list[type[msgspec.Struct]]] = [*StreamRequest.__subclasses__(), ListStreams]
REQUEST_TYPES: Final = {each.__name__: each for each in sorted(_OPERATIONS, key=lambda each: each.__name__)}


def _constraints(request_type: type[msgspec.Struct]) -> dict[str, Constraint]:
    """Return the constraints by member; like the service, those of the stream come last."""
    hints = get_type_hints(request_type, include_extras=True)
    ordered = sorted(hints.items(), key=lambda hint: hint[0] in StreamRequest.__annotations__)
    constrained = ((name, getattr(hint, "__metadata__", (None,))[0]) for name, hint in ordered)
    return {name: constraint for name, constraint in constrained if isinstance(constraint, Constraint)}


_NESTED_TYPES: Final[list[type[msgspec.Struct]]] = [PutRecordsRequestEntry, ListShardsFilter, StreamModeDetails]
CONSTRAINTS: Final = {each: _constraints(each) for each in [*_OPERATIONS, *_NESTED_TYPES]}

# These take the stream from the name to create, from a token or from an iterator.
_NEED_NO_STREAM: Final = (CreateStream, ListShards, GetRecords)


def check_constraints(request: msgspec.Struct) -> None:
    """Check a request against the API's own model.

    Raises:
        RequestRefused: a ValidationException that lists the violations.
    """
    lacking = "Value null at 'streamName' failed to satisfy constraint: Member must not be null"
    found = chain(_violations(request, ""), [lacking] if _lacks_stream(request) else [])
    if listed := list(islice(found, _MAX_LISTED)):
        plural = "s" if len(listed) > 1 else ""
        raise RequestRefused(VALIDATION, f"{len(listed)} validation error{plural} detected: {'; '.join(listed)}")


def _lacks_stream(request: msgspec.Struct) -> bool:
    return (
        isinstance(request, StreamRequest)
        and not isinstance(request, _NEED_NO_STREAM)
        and request.stream_name is None
        and request.stream_arn is None
    )


def _violations(request: msgspec.Struct, path: str) -> Iterator[str]:
    wire_names = dict(zip(request.__struct_fields__, request.__struct_encode_fields__, strict=True))
    for member, constraint in CONSTRAINTS[type(request)].items():
        value, wire_name = getattr(request, member), wire_names[member]
        for violation in constraint.violations(value):
            at = f"{path}{wire_name[0].lower()}{wire_name[1:]}"
            yield f"Value{_quoted(value)} at '{at}' failed to satisfy constraint: {violation}"
    if isinstance(request, PutRecords):
        for position, entry in enumerate((request.records or [])[:RECORDS_PER_REQUEST], 1):
            if not _is_valid(entry):
                yield from _violations(entry, f"{path}records.{position}.member.")
    elif isinstance(request, ListShards) and request.shard_filter is not None:
        yield from _violations(request.shard_filter, "shardFilter.")
    elif isinstance(request, CreateStream) and request.stream_mode_details is not None:
        yield from _violations(request.stream_mode_details, "streamModeDetails.")


def _is_valid(entry: PutRecordsRequestEntry) -> bool:
    """Return True if a record satisfies its rows; takes a fraction of a microsecond."""
    key, data, hash_key = entry.partition_key, entry.data, entry.explicit_hash_key
    return (
        key is not None
        and data is not None
        and 0 < len(key) <= PARTITION_KEY_CHARACTERS
        and len(data) <= MAX_RECORD_BYTES
        and (hash_key is None or CANONICAL_DECIMAL.fullmatch(hash_key) is not None)
    )


def _quoted(value: object) -> str:
    if value is None:
        return " null"
    if isinstance(value, (str, int)):
        text = str(value)
        return f" '{text}'" if len(text) <= _MAX_QUOTED else f" '{text[:_MAX_QUOTED]}...'"
    return " '[]'" if value == [] else ""
