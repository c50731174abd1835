"""What the fake service and its callers say to each other: quotas, answers and errors, in the service's words.

Instants are milliseconds since 1970, and `*_bytes` counts the UTF-8 key and the data. The table of errors holds
the codes that a producer meets, with the status and the wording of the service (AWS, API pages of Kinesis Data
Streams and "Common errors"; wording from public issue reports of the AWS libraries).
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

from kpl_core.options.kinesis_limits import (
    BYTES_PER_SECOND_PER_SHARD,
    DEFAULT_MAX_RECORD_BYTES,
    MAX_RECORD_BYTES,
    RECORDS_PER_REQUEST,
    RECORDS_PER_SECOND_PER_SHARD,
    REQUEST_BYTES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The quotas that the fake service enforces. The defaults are those of AWS ("Quotas and limits").

    A shard's token bucket holds `burst_seconds` of its rates and starts full. Records older than
    `retention_seconds` are trimmed, which also bounds the memory of a long run.
    """

    records_per_second_per_shard: float = RECORDS_PER_SECOND_PER_SHARD
    bytes_per_second_per_shard: float = BYTES_PER_SECOND_PER_SHARD
    burst_seconds: float = 1.0
    records_per_request: int = RECORDS_PER_REQUEST
    request_bytes: int = REQUEST_BYTES
    default_max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES
    max_record_bytes: int = MAX_RECORD_BYTES
    shards_per_account: int = 20_000
    retention_seconds: float = 86_400.0

    def scaled(self, factor: float) -> Self:
        """Return the same limits with the per-shard rates multiplied by `factor`."""
        return replace(
            self,
            records_per_second_per_shard=self.records_per_second_per_shard * factor,
            bytes_per_second_per_shard=self.bytes_per_second_per_shard * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDurations:
    """How many seconds a stream stays CREATING, UPDATING or DELETING. A reshard takes effect when UPDATING ends."""

    creating_seconds: float = 0.0
    updating_seconds: float = 0.0
    deleting_seconds: float = 0.0


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
    """One page of ListShards. The last page has no token."""

    shards: tuple[ShardDescription, ...]
    next_token: str | None


class ChildShard(NamedTuple):
    """A child of a closed shard, as GetRecords names it at the shard's end."""

    shard_id: str
    parent_shard_ids: tuple[str, ...]
    starting_hash_key: int
    ending_hash_key: int


class RecordsPage(NamedTuple):
    """One answer of GetRecords. It has no next iterator if the shard is closed and was read to its end."""

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
    """One page of ListStreams. The last page has no token."""

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
    """What happened on one stream since it was created.

    `put_requests` counts the PutRecord and PutRecords requests that were routed, and `records_offered` the records
    in them. Each record was stored, throttled by the shard's capacity, or failed by an armed fault.
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


EXPIRED_ITERATOR: Final = "ExpiredIteratorException"
EXPIRED_NEXT_TOKEN: Final = "ExpiredNextTokenException"  # noqa: S105 - the name of an error
INVALID_ARGUMENT: Final = "InvalidArgumentException"
LIMIT_EXCEEDED: Final = "LimitExceededException"
THROUGHPUT_EXCEEDED: Final = "ProvisionedThroughputExceededException"
RESOURCE_IN_USE: Final = "ResourceInUseException"
RESOURCE_NOT_FOUND: Final = "ResourceNotFoundException"
SERIALIZATION: Final = "SerializationException"
VALIDATION: Final = "ValidationException"


class ServiceError(NamedTuple):
    """The HTTP status and the usual wording of one error code."""

    status: int
    message: str


SERVICE_ERRORS: Final[dict[str, ServiceError]] = {
    "AccessDeniedException": ServiceError(400, "User is not authorized to perform this action on the resource"),
    EXPIRED_ITERATOR: ServiceError(400, "Iterator expired."),
    EXPIRED_NEXT_TOKEN: ServiceError(400, "NextToken expired."),
    "ExpiredTokenException": ServiceError(400, "The security token included in the request is expired"),
    "InternalFailure": ServiceError(500, "Internal Service Failure"),
    INVALID_ARGUMENT: ServiceError(400, "The request holds an invalid argument."),
    "InvalidSignatureException": ServiceError(
        400, "The request signature we calculated does not match the signature you provided."
    ),
    "KMSAccessDeniedException": ServiceError(400, "The ciphertext references a key you cannot use."),
    "KMSDisabledException": ServiceError(400, "The key is disabled."),
    "KMSInvalidStateException": ServiceError(400, "The state of the key is not valid for this request."),
    "KMSNotFoundException": ServiceError(400, "The key cannot be found."),
    "KMSOptInRequired": ServiceError(400, "The AWS access key ID needs a subscription for the service."),
    "KMSThrottlingException": ServiceError(400, "The request was denied due to request throttling by KMS."),
    LIMIT_EXCEEDED: ServiceError(400, "Rate exceeded for stream."),
    THROUGHPUT_EXCEEDED: ServiceError(400, "Rate exceeded for shard."),
    RESOURCE_IN_USE: ServiceError(400, "The stream is not ACTIVE."),
    RESOURCE_NOT_FOUND: ServiceError(400, "The stream was not found."),
    "ServiceUnavailable": ServiceError(503, "Service is unavailable."),
    "ThrottlingException": ServiceError(400, "Rate exceeded"),
    "UnrecognizedClientException": ServiceError(400, "The security token included in the request is invalid."),
    VALIDATION: ServiceError(400, "The request does not satisfy the constraints of the service."),
}


class KinesisError(Exception):
    """The service rejects one whole request. None of its records was stored.

    `code` is the service's error code, `message` its wording and `status` the HTTP status. Message and status
    default to the row of `SERVICE_ERRORS`. The status of a code without a row is 400.
    """

    def __init__(self, code: str, message: str | None = None, *, status: int | None = None) -> None:
        usual = SERVICE_ERRORS.get(code, ServiceError(400, code))
        self.code = code
        self.message = usual.message if message is None else message
        self.status = usual.status if status is None else status
        super().__init__(f"{code}: {self.message}")


def constraint_violated(*, path: str, constraint: str, value: str | None = None) -> KinesisError:
    """Return the service's ValidationException for one violated constraint.

    `path` is a member in the service's spelling, such as `records.1.member.data`. Pass `value` only if the service
    quotes it; it quotes no blobs and no lists.
    """
    quoted = "" if value is None else f" '{value}'"
    message = f"1 validation error detected: Value{quoted} at '{path}' failed to satisfy constraint: {constraint}"
    return KinesisError(VALIDATION, message)
