"""The user record that a caller puts, and the checks of its fields.

The rules are those of the service (API_PutRecords): a partition key of 1 to 256 Unicode code points, an explicit
hash key of 0 .. 2**128 - 1 in canonical decimal, and key and data within the stream's maximum record size. The KPL
counts UTF-16 units and ignores the key's bytes. Then the service rejects the record, and the KPL retries it until
it expires.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypedDict, get_args

import msgspec

from kpl_core.errors import InvalidUserRecord
from kpl_core.options.kinesis_limits import MAX_RECORD_BYTES, PARTITION_KEY_CHARACTERS, STREAM_ARN_CHARACTERS
from kpl_core.records.hash_key import hash_key_digest, hash_key_to_digest, parse_explicit_hash_key

# API_PutRecords: StreamARN, in linear time. The API's own pattern has `.*` twice and backtracks; partition and region
# have no colon.
STREAM_ARN: Final = re.compile(r"arn:aws[^:\s]*:kinesis:[^:\s]*:\d{12}:stream/\S+", re.ASCII)
_STREAM_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

Tier = Literal["critical", "normal", "bulk"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
_RANKS: Final[dict[Tier, int]] = {tier: rank for rank, tier in enumerate(TIERS)}

# The types of data that a put accepts. It copies them to bytes, so the caller may reuse its buffer.
BytesLike = bytes | bytearray | memoryview


class UserRecord(msgspec.Struct, frozen=True):
    """One record as the caller puts it.

    `flow` is the group of records, such as a tenant, that competes with others for a hot shard. `tier` is the
    priority: bulk is evicted first, critical last. `metadata` is not sent; dead letters get it. The producer drops it
    when the result is final. The garbage collector tracks a record with metadata, which may refer back to it, and no
    other.
    """

    partition_key: str
    data: bytes
    explicit_hash_key: str | None = None
    flow: str | None = None
    tier: Tier = "normal"
    metadata: Mapping[str, Any] | None = None


class PutOptions(TypedDict, total=False):
    """The optional arguments of a put."""

    explicit_hash_key: str | None
    flow: str | None
    tier: Tier
    metadata: Mapping[str, Any] | None


def encode_partition_key(partition_key: str) -> bytes:
    """Return the UTF-8 bytes of a valid partition key.

    Raises:
        TypeError: it is not a string.
        InvalidUserRecord: it is empty, longer than 256 code points, or not valid Unicode.
    """
    if not isinstance(partition_key, str):
        message = f"partition_key must be a str of 1 to 256 characters, not {type(partition_key).__name__}"
        raise TypeError(message)
    if not 1 <= len(partition_key) <= PARTITION_KEY_CHARACTERS:
        advice = "shorten it or use a hash of it" if partition_key else "give a random key if the order does not matter"
        message = (
            f"partition_key has {len(partition_key)} characters; Kinesis accepts 1 to {PARTITION_KEY_CHARACTERS}, "
            f"so {advice}"
        )
        raise InvalidUserRecord(message)
    try:
        return partition_key.encode()
    except UnicodeEncodeError as error:
        message = (
            f"partition_key has a lone surrogate at character {error.start}, which UTF-8 cannot encode; "
            f"decode the key's source with errors='replace'"
        )
        raise InvalidUserRecord(message) from error


def as_bytes(data: object) -> bytes:
    """Return bytes-like `data` as an object of type bytes. Encoders reject subclasses, such as numpy's.

    Raises:
        TypeError: it is not bytes-like. A str must be encoded first.
    """
    if type(data) is bytes:
        return data
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(memoryview(data))
    message = f"data must be bytes, bytearray or memoryview, not {type(data).__name__}; encode it first"
    raise TypeError(message)


def require_stream(stream: str) -> None:
    """Check that `stream` can be the name or the ARN of a stream.

    With a name like "my stream" the service would reject every request as invalid, and the retrier would bisect
    each one to find an invalid record.

    Raises:
        TypeError: it is not a string.
        InvalidUserRecord: no stream can have this name.
    """
    if not isinstance(stream, str):
        message = f"stream must be a str, the name or the ARN of a stream, not {type(stream).__name__}"
        raise TypeError(message)
    if not stream:
        message = "stream is empty; it must be the name or the ARN of a stream"
        raise InvalidUserRecord(message)
    if len(stream) > STREAM_ARN_CHARACTERS:
        message = f"stream has {len(stream):,} characters; a name has at most 128, an ARN {STREAM_ARN_CHARACTERS:,}"
        raise InvalidUserRecord(message)
    if _STREAM_NAME.fullmatch(stream) is None and STREAM_ARN.fullmatch(stream) is None:
        message = (
            f"stream is {stream!r}; it must be the ARN of a stream, or a name of 1 to 128 ASCII letters, digits, "
            f"underscores, dots and hyphens"
        )
        raise InvalidUserRecord(message)


def rank_of(tier: Tier) -> int:
    """Return the rank of a tier. 0 is the tier that is served first and evicted last.

    Raises:
        InvalidUserRecord: there is no such tier.
    """
    rank = _RANKS.get(tier)
    if rank is None:
        message = f"tier is {tier!r}; it must be one of {', '.join(TIERS)}"
        raise InvalidUserRecord(message)
    return rank


def require_notes(flow: object, metadata: object) -> None:
    """Check the fields that are not sent, before the spool has to write them.

    Raises:
        TypeError: `flow` is not a str, or `metadata` is not a mapping.
        InvalidUserRecord: `flow` is not valid Unicode.
    """
    if flow is not None:
        if not isinstance(flow, str):
            message = f"flow must be a str, such as the name of a tenant, not {type(flow).__name__}"
            raise TypeError(message)
        try:
            flow.encode()
        except UnicodeEncodeError as error:
            message = (
                f"flow has a lone surrogate at character {error.start}, which UTF-8 cannot encode; "
                f"decode its source with errors='replace'"
            )
            raise InvalidUserRecord(message) from error
    if metadata is not None and not isinstance(metadata, Mapping):
        message = f"metadata must be a mapping, as in {{'severity': 'ERROR'}}, not {type(metadata).__name__}"
        raise TypeError(message)


def require_size(key_bytes: int, data_bytes: int, *, max_record_bytes: int) -> None:
    """Check that key and data together fit one Kinesis record of the stream.

    Raises:
        InvalidUserRecord: they do not.
    """
    if key_bytes + data_bytes > max_record_bytes:
        advice = "split the data"
        if max_record_bytes < MAX_RECORD_BYTES:
            advice += " or raise the stream's limit (UpdateMaxRecordSize), which a new producer finds"
        message = (
            f"partition_key and data have {key_bytes + data_bytes:,} bytes together; the stream accepts at most "
            f"{max_record_bytes:,}, so {advice}"
        )
        raise InvalidUserRecord(message)


def with_bytes(record: UserRecord) -> UserRecord:
    """Return a user record whose data is of type bytes. It raises the errors of `as_bytes`."""
    return record if type(record.data) is bytes else msgspec.structs.replace(record, data=as_bytes(record.data))


def check_user_record(record: UserRecord, *, max_record_bytes: int) -> int:
    """Do all the checks of a put. Return the number of bytes of key and data.

    Raises:
        TypeError: a field has a wrong type.
        InvalidUserRecord: Kinesis would never accept the record.
    """
    key = encode_partition_key(record.partition_key)
    if record.explicit_hash_key is not None:
        parse_explicit_hash_key(record.explicit_hash_key)
    if record.tier != "normal":
        rank_of(record.tier)
    if record.flow is not None or record.metadata is not None:
        require_notes(record.flow, record.metadata)
    data = record.data if type(record.data) is bytes else as_bytes(record.data)
    size_bytes = len(key) + len(data)
    if size_bytes > max_record_bytes:
        require_size(len(key), len(data), max_record_bytes=max_record_bytes)
    return size_bytes


def user_record_digest(partition_key: str, explicit_hash_key: str | None) -> bytes:
    """Return the hash key of a user record as 16 big-endian bytes."""
    if explicit_hash_key is not None:
        return hash_key_to_digest(parse_explicit_hash_key(explicit_hash_key))
    return hash_key_digest(encode_partition_key(partition_key))
