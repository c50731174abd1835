"""Decode an aggregated record, independently of kpl_core.

The sink must not check a producer with the producer's own decoder. This one implements only the
format description (amazon-kinesis-producer, `aggregation-format.md`): magic F3 89 9A C2, a protobuf message
(1: partition key table, 2: explicit hash key table, 3: records of {1: key index, 2: hash key index,
3: data}), and the MD5 of that message.
"""

from collections.abc import Iterator
from hashlib import md5

__all__ = ["BlobUserRecord", "MalformedBlobError", "open_blob"]

MAGIC = b"\xf3\x89\x9a\xc2"
_DIGEST_BYTES = 16
_VARINT = 0
_LENGTH_DELIMITED = 2

#: (partition key, explicit hash key or None, data)
BlobUserRecord = tuple[str, str | None, bytes]


class MalformedBlobError(ValueError):
    """The blob has the magic of an aggregated record but is not a valid one."""


def open_blob(blob: bytes) -> list[BlobUserRecord] | None:
    """Return the user records of an aggregated record, or None if `blob` is not one.

    Raises:
        MalformedBlobError: the magic is right, but the digest, the message or an index is wrong.
    """
    if not blob.startswith(MAGIC):
        return None
    message = blob[len(MAGIC) : -_DIGEST_BYTES]
    if md5(message, usedforsecurity=False).digest() != blob[-_DIGEST_BYTES:]:
        reason = "the MD5 at the end of the aggregated record is not that of its message"
        raise MalformedBlobError(reason)
    try:
        return _user_records(message)
    except (IndexError, UnicodeDecodeError) as error:
        reason = f"the message of the aggregated record is not well formed: {error}"
        raise MalformedBlobError(reason) from error


def _user_records(message: bytes) -> list[BlobUserRecord]:
    partition_keys: list[str] = []
    explicit_hash_keys: list[str] = []
    bodies: list[bytes] = []
    for number, value in _fields(message):
        if not isinstance(value, bytes):
            reason = f"field {number} of the message is a number; it must be a string or a record"
            raise MalformedBlobError(reason)
        if number == 1:
            partition_keys.append(value.decode())
        elif number == 2:
            explicit_hash_keys.append(value.decode())
        elif number == 3:
            bodies.append(value)
    return [_user_record(body, partition_keys, explicit_hash_keys) for body in bodies]


def _user_record(body: bytes, partition_keys: list[str], explicit_hash_keys: list[str]) -> BlobUserRecord:
    if body and body[0] == 0x08:
        # The usual case: the key index, then the data to the end.
        key_index, position = _varint(body, 1)
        if body[position] == 0x1A:
            length, position = _varint(body, position + 1)
            if position + length == len(body):
                return partition_keys[key_index], None, body[position:]
    partition_key: str | None = None
    explicit_hash_key: str | None = None
    data: bytes | None = None
    for number, value in _fields(body):
        if number == 1 and isinstance(value, int):
            partition_key = partition_keys[value]
        elif number == 2 and isinstance(value, int):
            explicit_hash_key = explicit_hash_keys[value]
        elif number == 3 and isinstance(value, bytes):
            data = value
    if partition_key is None or data is None:
        reason = "a record of the message lacks its partition key index or its data"
        raise MalformedBlobError(reason)
    return partition_key, explicit_hash_key, data


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    position, end = 0, len(message)
    while position < end:
        tag, position = message[position], position + 1
        if tag > 0x7F:
            tag, position = _varint(message, position - 1)
        value, position = message[position], position + 1
        if value > 0x7F:
            value, position = _varint(message, position - 1)
        if tag & 7 == _VARINT:
            yield tag >> 3, value
        elif tag & 7 == _LENGTH_DELIMITED and position + value <= end:
            yield tag >> 3, message[position : position + value]
            position += value
        else:
            reason = f"tag {tag} at byte {position} has another wire type, or its field passes the end of the message"
            raise MalformedBlobError(reason)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    byte = message[position]
    if byte < 0x80:  # the usual case
        return byte, position + 1
    value, shift = 0, 0
    while byte >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        byte = message[position]
    return value | byte << shift, position + 1
