"""The KPL's aggregated record: many user records in the data of one Kinesis record, and its encoder and decoder.

    F3 89 9A C2 | protobuf AggregatedRecord | MD5 of the protobuf (16 bytes)

    message AggregatedRecord {                message Record {
      repeated string partition_key_table = 1;     required uint64 partition_key_index = 1;
      repeated string explicit_hash_key_table = 2; optional uint64 explicit_hash_key_index = 2;
      repeated Record records = 3;                 required bytes data = 3;
    }                                              repeated Tag tags = 4;
                                              }

Both tables list each entry once, in the order of first use. Index 0 and empty data are written out. The producer
never wraps a single user record: its data is the Kinesis record's data. (Source: awslabs/amazon-kinesis-producer,
aggregation-format.md.)

The encoder is written by hand, because a protobuf library costs more per user record than everything else in this
project together. The aggregator appends user records with the tables below. All sizes are computed exactly.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import md5 as bulk_md5
from typing import Final

from kpl_core.errors import MalformedAggregatedRecord
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_core.records.hash_key import md5
from kpl_core.records.user_record import UserRecord

MAGIC: Final = b"\xf3\x89\x9a\xc2"
DIGEST_BYTES: Final = 16
ENVELOPE_BYTES: Final = len(MAGIC) + DIGEST_BYTES

_LENGTH_DELIMITED: Final = 2
_VARINT_CONTINUES: Final = 0x80
_VARINT_MAX_SHIFT: Final = 63
_SHORT_VARINTS: Final[list[bytes]] = [bytes([number]) for number in range(_VARINT_CONTINUES)]


def varint(number: int) -> bytes:
    """Return `number` (>= 0) as a protobuf varint."""
    if number < _VARINT_CONTINUES:
        return _SHORT_VARINTS[number]
    encoded = bytearray()
    while number >= _VARINT_CONTINUES:
        encoded.append(number & 0x7F | _VARINT_CONTINUES)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def partition_key_entry(key: bytes) -> bytes:
    """Return the entry of the partition key table for a UTF-8 encoded key (1 to 1,024 bytes)."""
    return PARTITION_KEY_HEAD[len(key)] + key


# Indexed by the length of the key: 256 characters of up to four bytes.
PARTITION_KEY_HEAD: Final[list[bytes]] = [b"\x0a" + varint(size) for size in range(4 * PARTITION_KEY_CHARACTERS + 1)]


def explicit_hash_key_entry(explicit_hash_key: str) -> bytes:
    """Return the entry of the explicit hash key table."""
    encoded = explicit_hash_key.encode("ascii")
    return b"\x12" + varint(len(encoded)) + encoded


def record_head(key_index: int, explicit_hash_key_index: int | None, data_bytes: int) -> bytes:
    """Return the part of a record's protobuf before its data."""
    if explicit_hash_key_index is None and data_bytes < PREPARED_DATA_BYTES and key_index < PREPARED_KEY_INDICES:
        _, head, length = (HEADS if key_index < SHORT_KEY_INDICES else HEADS_LONG)[data_bytes]
        return head + KEY_INDEX[key_index] + length
    fields = b"\x08" + varint(key_index)
    if explicit_hash_key_index is not None:
        fields += b"\x10" + varint(explicit_hash_key_index)
    fields += b"\x1a" + varint(data_bytes)
    return b"\x1a" + varint(len(fields) + data_bytes) + fields


# Most user records have small data, one of the first keys, and no explicit hash key. Their head is assembled from
# prepared pieces. HEADS[data size] is the length of the whole record, the bytes before the key index, and the
# encoded length of the data. KEY_INDEX[key index] belongs between those two pieces. HEADS_LONG is for a key index
# of two varint bytes, which makes the head longer. With an explicit hash key, EXPLICIT_KEY_INDEX[key index] and
# KEY_INDEX[index of the explicit hash key] belong there.
PREPARED_DATA_BYTES: Final = 1280
SHORT_KEY_INDICES: Final = 128
PREPARED_KEY_INDICES: Final = 2048

# Made when the package is imported, so without a call for each element.
VARINTS: Final = [bytes((low,)) for low in range(128)] + [
    bytes((low, high)) for high in range(1, PREPARED_KEY_INDICES // 128) for low in range(128, 256)
]
KEY_INDEX: Final[list[bytes]] = [index + b"\x1a" for index in VARINTS[:PREPARED_KEY_INDICES]]


def _heads(key_index_bytes: int) -> list[tuple[int, bytes, bytes]]:
    # After its own tag and length, a record has two tags, the key index, the length of the data, and the data.
    sizes = [2 + key_index_bytes + (1 if size < SHORT_KEY_INDICES else 2) + size for size in range(PREPARED_DATA_BYTES)]
    return [
        (1 + len(length) + fields, b"\x1a" + length + b"\x08", data_length)
        for fields, data_length in zip(sizes, VARINTS, strict=False)
        for length in (VARINTS[fields],)
    ]


HEADS: Final = _heads(1)
HEADS_LONG: Final = _heads(2)


@cache
def explicit_heads() -> tuple[list[list[tuple[int, bytes, bytes]]], list[bytes]]:
    """Return the HEADS of records with explicit hash keys, by how many of the two indices are long; EXPLICIT_KEY_INDEX.

    They are made when they are first needed.
    """
    return [_heads(3), _heads(4), _heads(5)], [index + b"\x10" for index in VARINTS[:PREPARED_KEY_INDICES]]


# In place of the digest, until it is computed.
UNSEALED: Final = bytes(DIGEST_BYTES)


def with_digest(data: bytes) -> bytes:
    """Return an aggregated record with its digest in place of the last 16 bytes."""
    protobuf = memoryview(data)[len(MAGIC) : -DIGEST_BYTES]
    # OpenSSL's MD5 starts slower than the one for short keys, but is a tenth faster from 4 KiB on.
    return b"".join((MAGIC, protobuf, bulk_md5(protobuf, usedforsecurity=False).digest()))


def encode(user_records: Sequence[UserRecord]) -> bytes:
    """Return the aggregated record of one or more user records, in their order.

    It also wraps a single user record. The producer sends a single one unwrapped.
    """
    return with_digest(b"".join((MAGIC, *_pieces(user_records), UNSEALED)))


def _pieces(user_records: Sequence[UserRecord]) -> list[bytes]:
    keys: dict[str, int] = {}
    explicit_hash_keys: dict[str, int] = {}
    records: list[bytes] = []
    for record in user_records:
        key_index = keys.setdefault(record.partition_key, len(keys))
        explicit_index = None
        if record.explicit_hash_key is not None:
            explicit_index = explicit_hash_keys.setdefault(record.explicit_hash_key, len(explicit_hash_keys))
        records += (record_head(key_index, explicit_index, len(record.data)), record.data)
    tables = [partition_key_entry(key.encode()) for key in keys]
    tables += [explicit_hash_key_entry(explicit_hash_key) for explicit_hash_key in explicit_hash_keys]
    return tables + records


def decode(data: bytes) -> tuple[UserRecord, ...] | None:
    """Return the user records in the data of a Kinesis record, or None if it is not an aggregated record.

    Data without the magic, or with a wrong MD5 at its end, is a plain record. The KCL decides in the same way.

    Raises:
        MalformedAggregatedRecord: magic and MD5 are right, but the protobuf is malformed or an index is outside its
            table.
    """
    if len(data) < ENVELOPE_BYTES or not data.startswith(MAGIC):
        return None
    protobuf = data[len(MAGIC) : -DIGEST_BYTES]
    if md5(protobuf).digest() != data[-DIGEST_BYTES:]:
        return None
    return decode_protobuf(protobuf)


def decode_protobuf(protobuf: bytes) -> tuple[UserRecord, ...]:
    """Return the user records of an aggregated record, given without magic and digest. Raises as `decode`."""
    keys: list[str] = []
    explicit_hash_keys: list[str] = []
    records: list[bytes] = []
    try:
        for field, value in _fields(protobuf):
            if not isinstance(value, bytes):
                continue
            if field == 1:
                keys.append(value.decode())
            elif field == 2:  # noqa: PLR2004 - field numbers of the message above
                explicit_hash_keys.append(value.decode())
            elif field == 3:  # noqa: PLR2004
                records.append(value)
        return tuple(_decode_record(record, keys, explicit_hash_keys) for record in records)
    except (IndexError, UnicodeDecodeError) as error:
        message = f"an aggregated record of {ENVELOPE_BYTES + len(protobuf)} bytes cannot be read: {error}"
        raise MalformedAggregatedRecord(message) from error


def _decode_record(record: bytes, keys: list[str], explicit_hash_keys: list[str]) -> UserRecord:
    key_index: int | None = None
    explicit_index: int | None = None
    data: bytes | None = None
    for field, value in _fields(record):
        if field == 1 and isinstance(value, int):
            key_index = value
        elif field == 2 and isinstance(value, int):  # noqa: PLR2004
            explicit_index = value
        elif field == 3 and isinstance(value, bytes):  # noqa: PLR2004
            data = value
    if key_index is None or data is None:
        message = "a record has no partition key index or no data"
        raise MalformedAggregatedRecord(message)
    return UserRecord(
        partition_key=keys[key_index],
        data=data,
        explicit_hash_key=None if explicit_index is None else explicit_hash_keys[explicit_index],
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message, including unknown fields, which the caller skips."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _read_varint(message, position)
            yield tag >> 3, value
            continue
        if wire_type == _LENGTH_DELIMITED:
            length, position = _read_varint(message, position)
        elif wire_type in _FIXED_BYTES:
            length = _FIXED_BYTES[wire_type]
        else:
            problem = f"wire type {wire_type} is unknown"
            raise MalformedAggregatedRecord(problem)
        if position + length > len(message):
            problem = f"a field of {length} bytes ends {position + length - len(message)} bytes after the message"
            raise MalformedAggregatedRecord(problem)
        yield tag >> 3, message[position : position + length]
        position += length


_FIXED_BYTES: Final = {1: 8, 5: 4}


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < _VARINT_CONTINUES:
            return number, position
        shift += 7
        if shift > _VARINT_MAX_SHIFT:
            problem = "a varint is longer than ten bytes"
            raise MalformedAggregatedRecord(problem)
