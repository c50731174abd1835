"""The constraints of the Kinesis API as a table, and the service's message for a violation.

Each row maps a request type to the constraints of its members, as in the service's own model (it ships with
botocore, `service-2.json`). Like the service, an error lists up to ten violations and does not quote blobs
and lists.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

import msgspec

from kpl_core.options.kinesis_limits import (
    MAX_RECORD_BYTES,
    PARTITION_KEY_CHARACTERS,
    RECORDS_PER_REQUEST,
    STREAM_ARN_CHARACTERS,
)
from kpl_core.records.user_record import STREAM_ARN
from kpl_integrations.kinesis_protocol import requests
from kpl_integrations.kinesis_protocol.requests import VALIDATION, RequestRefused

_MAX_LISTED: Final = 10
# Of a value; longer ones are cut in the message.
_MAX_QUOTED: Final = 2_048
_NAME: Final = r"[a-zA-Z0-9_.-]+"
_ARN: Final = r"arn:aws.*:kinesis:.*:\d{12}:stream/\S+"
_HASH_KEY: Final = r"0|([1-9]\d{0,38})"
_HASH_KEY_DIGITS: Final = 39
_SEQUENCE_NUMBER: Final = r"0|([1-9]\d{0,128})"
_LARGEST_INTEGER: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraints of one member; `least` and `most` bound a number, or the length of a text, blob or list."""

    name: str
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


_STREAM_NAME: Final = Constraint("stream_name", least=1, most=128, pattern=_NAME)
_STREAM_ARN: Final = Constraint("stream_arn", least=1, most=STREAM_ARN_CHARACTERS, pattern=_ARN)
_STREAM: Final = (_STREAM_NAME, _STREAM_ARN)
_NEXT_TOKEN: Final = Constraint("next_token", least=1, most=1_048_576)
_START_SHARD: Final = Constraint("exclusive_start_shard_id", least=1, most=128, pattern=_NAME)
_KIB: Final = Constraint("max_record_size_kib", least=1024, most=10_240)
_RECORD: Final = (
    Constraint("partition_key", least=1, most=PARTITION_KEY_CHARACTERS, required=True),
    Constraint("explicit_hash_key", pattern=_HASH_KEY),
    Constraint("data", least=0, most=MAX_RECORD_BYTES, required=True),
)


def _shard(name: str) -> Constraint:
    return Constraint(name, least=1, most=128, pattern=_NAME, required=True)


CONSTRAINTS: Final[dict[type[msgspec.Struct], tuple[Constraint, ...]]] = {
    requests.CreateStream: (
        Constraint("shard_count", least=1, most=_LARGEST_INTEGER),
        _KIB,
        Constraint("stream_name", least=1, most=128, pattern=_NAME, required=True),
    ),
    requests.DeleteStream: _STREAM,
    requests.DescribeStream: (Constraint("limit", least=1, most=10_000), _START_SHARD, *_STREAM),
    requests.DescribeStreamSummary: _STREAM,
    requests.GetRecords: (
        Constraint("limit", least=1, most=10_000),
        Constraint("shard_iterator", least=1, most=512, required=True),
        *_STREAM,
    ),
    requests.GetShardIterator: (
        _shard("shard_id"),
        Constraint(
            "shard_iterator_type",
            one_of=("AFTER_SEQUENCE_NUMBER", "LATEST", "AT_TIMESTAMP", "AT_SEQUENCE_NUMBER", "TRIM_HORIZON"),
            required=True,
        ),
        Constraint("starting_sequence_number", pattern=_SEQUENCE_NUMBER),
        *_STREAM,
    ),
    requests.ListShards: (Constraint("max_results", least=1, most=10_000), _START_SHARD, _NEXT_TOKEN, *_STREAM),
    requests.ListStreams: (
        Constraint("limit", least=1, most=10_000),
        Constraint("exclusive_start_stream_name", least=1, most=128, pattern=_NAME),
        _NEXT_TOKEN,
    ),
    requests.MergeShards: (_shard("shard_to_merge"), _shard("adjacent_shard_to_merge"), *_STREAM),
    requests.PutRecord: (
        Constraint("sequence_number_for_ordering", pattern=_SEQUENCE_NUMBER),
        *_RECORD,
        *_STREAM,
    ),
    requests.PutRecords: (Constraint("records", least=1, most=RECORDS_PER_REQUEST, required=True), *_STREAM),
    requests.PutRecordsRequestEntry: _RECORD,
    requests.ListShardsFilter: (
        Constraint(
            "type",
            one_of=(
                "AFTER_SHARD_ID",
                "AT_TRIM_HORIZON",
                "FROM_TRIM_HORIZON",
                "AT_LATEST",
                "AT_TIMESTAMP",
                "FROM_TIMESTAMP",
            ),
            required=True,
        ),
        Constraint("shard_id", least=1, most=128, pattern=_NAME),
    ),
    requests.SplitShard: (
        Constraint("new_starting_hash_key", pattern=_HASH_KEY, required=True),
        _shard("shard_to_split"),
        *_STREAM,
    ),
    requests.StreamModeDetails: (Constraint("stream_mode", one_of=("PROVISIONED", "ON_DEMAND"), required=True),),
    requests.UpdateMaxRecordSize: (
        Constraint("max_record_size_kib", least=1024, most=10_240, required=True),
        *_STREAM,
    ),
    requests.UpdateShardCount: (
        Constraint("target_shard_count", least=1, most=_LARGEST_INTEGER, required=True),
        Constraint("scaling_type", one_of=("UNIFORM_SCALING",), required=True),
        *_STREAM,
    ),
}

# These take the stream from the name to create, from a token or from an iterator.
_NEED_NO_STREAM: Final = (requests.CreateStream, requests.ListShards, requests.GetRecords)


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
        isinstance(request, requests.StreamRequest)
        and not isinstance(request, _NEED_NO_STREAM)
        and request.stream_name is None
        and request.stream_arn is None
    )


def _violations(request: msgspec.Struct, path: str) -> Iterator[str]:
    wire_names = dict(zip(request.__struct_fields__, request.__struct_encode_fields__, strict=True))
    for member in CONSTRAINTS[type(request)]:
        value = getattr(request, member.name)
        wire_name = wire_names[member.name]
        for constraint in member.violations(value):
            at = f"{path}{wire_name[0].lower()}{wire_name[1:]}"
            yield f"Value{_quoted(value)} at '{at}' failed to satisfy constraint: {constraint}"
    if isinstance(request, requests.PutRecords):
        for position, entry in enumerate((request.records or [])[:RECORDS_PER_REQUEST], 1):
            if not _is_valid(entry):
                yield from _violations(entry, f"{path}records.{position}.member.")
    elif isinstance(request, requests.ListShards) and request.shard_filter is not None:
        yield from _violations(request.shard_filter, "shardFilter.")
    elif isinstance(request, requests.CreateStream) and request.stream_mode_details is not None:
        yield from _violations(request.stream_mode_details, "streamModeDetails.")


def _is_valid(entry: requests.PutRecordsRequestEntry) -> bool:
    """Return True if a record satisfies its rows; takes a fraction of a microsecond."""
    key, data, hash_key = entry.partition_key, entry.data, entry.explicit_hash_key
    return (
        key is not None
        and data is not None
        and 0 < len(key) <= PARTITION_KEY_CHARACTERS
        and len(data) <= MAX_RECORD_BYTES
        and (hash_key is None or _is_canonical(hash_key))
    )


def _is_canonical(hash_key: str) -> bool:
    # The same as matching `_HASH_KEY`, at a third of its cost.
    digits = len(hash_key) <= _HASH_KEY_DIGITS and hash_key.isascii() and hash_key.isdigit()
    return digits and (hash_key[0] != "0" or hash_key == "0")


def _quoted(value: object) -> str:
    if value is None:
        return " null"
    if isinstance(value, (str, int)):
        text = str(value)
        return f" '{text}'" if len(text) <= _MAX_QUOTED else f" '{text[:_MAX_QUOTED]}...'"
    return " '[]'" if value == [] else ""
