"""OTLP/HTTP bodies: what was sent is what is stored, looked into only as far as it must be.

An export request of any signal is a list of resources' data: field 1 in protobuf, one array in JSON. A body
that fits one Kinesis record becomes one, byte for byte. A larger one is cut between resources, and each part is an
export request again, which any OTLP decoder reads. (opentelemetry-proto 1.x, collector/*/v1; OTLP
specification 1.x, "OTLP/HTTP".)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding.checked_record import checked_record
from kpl_integrations.ingest.decoding.decoded import DecodeLimits, DecodeRefusal, RecordProblem
from kpl_integrations.ingest.decoding.json_text import (
    MALFORMED,
    is_deeper_than,
    malformed,
    mismatch,
    printable,
    require_utf8,
)

__all__ = ["JSON", "PROTOBUF", "RESOURCES", "otlp_records"]

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

# Signal, and the JSON name of field 1.
RESOURCES: Final = {"logs": "resourceLogs", "metrics": "resourceMetrics", "traces": "resourceSpans"}

# Wire types: varint, 64 bits, length-delimited, 32 bits (protobuf, "Encoding").
_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_RESOURCE_FIELD: Final = 1
_LONGEST_VARINT: Final = 10


def otlp_records(
    signal: str, media_type: str, body: bytes, *, limits: DecodeLimits, partition_key: str
) -> list[UserRecord]:
    """Return the user records of an export request, none for an empty one; all have the same partition key.

    `media_type` is "application/x-protobuf" or "application/json", `signal` "logs", "metrics" or "traces".

    Raises:
        DecodeRefusal: 400 if it cannot be decoded, 413 if the data of one resource alone is too large.
    """
    # The key first: it is wrong with nothing to store too.
    _checked(UserRecord(partition_key, b""), limits)
    room = limits.max_record_bytes - len(partition_key.encode())
    parts = _protobuf_parts(body, limits) if media_type == PROTOBUF else _json_parts(signal, body, limits)
    if not parts:
        return []
    texts = [body] if len(body) <= room else list(_joined(parts, room, _in_envelope(signal, media_type)))
    return [_checked(UserRecord(partition_key, text), limits) for text in texts]


def _checked(record: UserRecord, limits: DecodeLimits) -> UserRecord:
    made = checked_record(record, 0, limits, key_field="X-Partition-Key")
    if isinstance(made, RecordProblem):
        status, code = (413, "too-large") if made.field == "data" else (400, "malformed")
        raise DecodeRefusal(status, code, made.detail, field=made.field)
    return made


def _protobuf_parts(body: bytes, limits: DecodeLimits) -> list[bytes]:
    """Return the fields that are resources' data, each with its tag."""
    parts: list[bytes] = []
    at = fields = 0
    while at < len(body):
        fields += 1
        _require_count(fields, limits)
        start = at
        tag, at = _varint(body, at)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            length, at = _varint(body, at)
            at += length
        elif wire_type == _VARINT:
            _, at = _varint(body, at)
        elif wire_type in _FIXED_BYTES:
            at += _FIXED_BYTES[wire_type]
        else:
            raise _no_protobuf(start)
        if at > len(body) or tag >> 3 == 0:
            raise _no_protobuf(start)
        if tag >> 3 == _RESOURCE_FIELD:
            if wire_type != _LENGTH_DELIMITED:
                raise _no_protobuf(start)
            parts.append(body[start:at])
    return parts


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where it ends."""
    value = shift = 0
    for position in range(at, min(at + _LONGEST_VARINT, len(body))):
        value |= (body[position] & 0x7F) << shift
        if body[position] < 0x80:  # noqa: PLR2004 - the bit that says there is more
            return value, position + 1
        shift += 7
    raise _no_protobuf(at)


def _no_protobuf(at: int) -> DecodeRefusal:
    detail = f"the body is no export request in protobuf: byte {at} begins no whole field"
    return DecodeRefusal(400, "malformed", detail, field="$")


def _json_parts(signal: str, body: bytes, limits: DecodeLimits) -> list[bytes]:
    """Return the texts of the elements of the one array there is."""
    require_utf8(body)
    try:
        members = _MEMBERS.decode(body)
        name = RESOURCES[signal]
        texts = _TEXTS.decode(members[name]) if name in members else []
    except msgspec.ValidationError as error:
        detail = f"the body is no export request in JSON: {mismatch(error)[1]}"
        raise DecodeRefusal(400, "malformed", detail, field="$") from None
    except MALFORMED as error:
        raise malformed(error) from None
    _require_count(len(texts), limits)
    if is_deeper_than(limits.max_depth, body):
        raise DecodeRefusal(400, "too-deep", f"the JSON stands more than {limits.max_depth} deep; flatten it")
    if members and name not in members:
        # Of another signal, or with names of another spelling: it would be stored and never found.
        detail = f"{name} is missing; the body has {printable(', '.join(sorted(members)))}"
        raise DecodeRefusal(400, "malformed", detail, field=name)
    parts = [bytes(text) for text in texts]
    for index, part in enumerate(parts):
        if not part.startswith(b"{"):
            raise DecodeRefusal(400, "malformed", f"{name}[{index}] is no object", index=index, field=name)
    return parts


_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS: Final = msgspec.json.Decoder(list[msgspec.Raw])


def _require_count(count: int, limits: DecodeLimits) -> None:
    if count > limits.max_records:
        detail = f"the request has the data of more than {limits.max_records:,} resources; send fewer at once"
        raise DecodeRefusal(413, "too-many-records", detail)


def _in_envelope(signal: str, media_type: str) -> Callable[[Sequence[bytes]], bytes]:
    if media_type == PROTOBUF:
        # Fields stand beside one another: a message is as many of them as one likes.
        return b"".join
    opening = f'{{"{RESOURCES[signal]}":['.encode()
    return lambda parts: opening + b",".join(parts) + b"]}"


def _joined(parts: list[bytes], room: int, in_envelope: Callable[[Sequence[bytes]], bytes]) -> Iterator[bytes]:
    """Join successive parts as long as they fit."""
    envelope_bytes = len(in_envelope([]))
    taken: list[bytes] = []
    size = envelope_bytes
    for part in parts:
        # A comma at most between two.
        if taken and size + len(part) + 1 > room:
            yield in_envelope(taken)
            taken, size = [], envelope_bytes
        taken.append(part)
        size += len(part) + 1
    yield in_envelope(taken)
