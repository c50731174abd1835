"""Split OTLP/HTTP bodies into records without changing their bytes.

An export request of any signal is a list of resource data: field 1 in protobuf, one array in JSON. A body that
fits into one Kinesis record becomes one record, byte for byte. A larger body is split between resources; each
part is again an export request that any OTLP decoder reads. (opentelemetry-proto 1.x, collector/*/v1; OTLP
specification 1.x, "OTLP/HTTP".)
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding.decoded import DecodeLimits, DecodeRefusal, RecordProblem, checked_record
from kpl_integrations.ingest.decoding.json_text import (
    ABSENT,
    MALFORMED,
    SkippedObject,
    has_many_elements,
    is_deeper_than,
    malformed,
    mismatch,
    printable,
    require_text,
)

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

# The JSON name of field 1, by signal.
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
    """Return the user records of an export request, all with the same partition key; none for an empty request.

    `media_type` is "application/x-protobuf" or "application/json", `signal` "logs", "metrics" or "traces".

    Raises:
        DecodeRefusal: 400 if it cannot be decoded, 413 if the data of a single resource is too large.
    """
    # Check the key first: an invalid key is an error for an empty request too.
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
    """Return the fields with resource data, each with its tag."""
    parts: list[bytes] = []
    at = fields = 0
    while at < len(body):
        fields += 1
        _require_count(fields, limits, is_whole=False)
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
    """Return the varint that starts at `at`, and the position after it."""
    value = shift = 0
    for position in range(at, min(at + _LONGEST_VARINT, len(body))):
        value |= (body[position] & 0x7F) << shift
        if body[position] < 0x80:  # noqa: PLR2004 - the bit that says there is more
            return value, position + 1
        shift += 7
    raise _no_protobuf(at)


def _no_protobuf(at: int) -> DecodeRefusal:
    detail = f"the body is not an export request in protobuf: no complete field starts at byte {at}"
    return DecodeRefusal(400, "malformed", detail, field="$")


def _json_parts(signal: str, body: bytes, limits: DecodeLimits) -> list[bytes]:
    """Return the text of each element of the request's array."""
    require_text(body)
    name = RESOURCES[signal]
    try:
        resources = bytes(getattr(_REQUESTS[signal].decode(body), name))
        if has_many_elements(resources):
            _require_count(len(_COUNTED.decode(resources)), limits)
        texts = _TEXTS.decode(resources) if resources else []
    except msgspec.ValidationError as error:
        detail = f"the body is not an export request in JSON: {mismatch(error)[1]}"
        raise DecodeRefusal(400, "malformed", detail, field="$") from None
    except MALFORMED as error:
        raise malformed(error) from None
    _require_count(len(texts), limits)
    if is_deeper_than(limits.max_depth, body):
        raise DecodeRefusal(400, "too-deep", f"the JSON is nested more than {limits.max_depth} deep; flatten it")
    if not resources and _NO_MEMBERS.fullmatch(body) is None:
        # Another signal, or names in another spelling. Consumers would never find this data.
        others = sorted(_MEMBERS.decode(body)) if body.count(b",") < _MOST_NAMED else ["other members"]
        detail = f"{name} is missing; the body has {printable(', '.join(others))}"
        raise DecodeRefusal(400, "malformed", detail, field=name)
    parts = [bytes(text) for text in texts]
    for index, part in enumerate(parts):
        if not part.startswith(b"{"):
            raise DecodeRefusal(400, "malformed", f"{name}[{index}] is not an object", index=index, field=name)
    return parts


# Members of other names are skipped.
_REQUESTS: Final = {
    signal: msgspec.json.Decoder(msgspec.defstruct("Request", [(name, msgspec.Raw, ABSENT)]))
    for signal, name in RESOURCES.items()
}
_COUNTED: Final = msgspec.json.Decoder(list[SkippedObject])
_NO_MEMBERS: Final = re.compile(rb"\s*\{\s*\}\s*")
_MOST_NAMED: Final = 1_000
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS: Final = msgspec.json.Decoder(list[msgspec.Raw])


def _require_count(count: int, limits: DecodeLimits, *, is_whole: bool = True) -> None:
    if count > limits.max_records:
        has = f"{count:,} resources" if is_whole else f"more than {count - 1:,} resources"
        detail = f"the request has the data of {has}; send at most {limits.max_records:,} at once"
        raise DecodeRefusal(413, "too-many-records", detail)


def _in_envelope(signal: str, media_type: str) -> Callable[[Sequence[bytes]], bytes]:
    if media_type == PROTOBUF:
        # A protobuf message is a concatenation of fields.
        return b"".join
    opening = f'{{"{RESOURCES[signal]}":['.encode()
    return lambda parts: opening + b",".join(parts) + b"]}"


def _joined(parts: list[bytes], room: int, in_envelope: Callable[[Sequence[bytes]], bytes]) -> Iterator[bytes]:
    """Join successive parts as long as they fit into `room` bytes."""
    envelope_bytes = len(in_envelope([]))
    taken: list[bytes] = []
    size = envelope_bytes
    for part in parts:
        # One byte for the comma between two parts.
        if taken and size + len(part) + 1 > room:
            yield in_envelope(taken)
            taken, size = [], envelope_bytes
        taken.append(part)
        size += len(part) + 1
    yield in_envelope(taken)
