"""Split OTLP/HTTP bodies into records without changing their bytes.

An export request of any signal is a list of resource data: field 1 in protobuf, one array in JSON. A body that
fits into one Kinesis record becomes one record, byte for byte. A larger body is split between resources; each
part is again an export request that any OTLP decoder reads. (opentelemetry-proto 1.x, collector/*/v1; OTLP
specification 1.x, "OTLP/HTTP".)
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Final

import msgspec

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding.decoded import DecodeLimits, DecodeRefusal, RecordProblem, checked_record
from kpl_integrations.ingest.decoding.json_text import (
    ABSENT,
    MALFORMED,
    SkippedObject,
    has_many_elements,
    json_pattern,
    malformed,
    mismatch,
    printable,
    require_content,
    require_depth,
    require_text,
    too_deep,
)
from kpl_integrations.ingest.decoding.record_counts import result_of
from kpl_integrations.ingest.decoding.steps import STEP_RECORDS, ArrayRuns, elements_in_steps, gathered, uncut

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
    whole = msgspec.structs.replace(limits, max_uncut_bytes=max(len(body), limits.max_uncut_bytes))
    return result_of(otlp_in_steps(signal, media_type, iter((body,)), limits=whole, partition_key=partition_key))


def otlp_in_steps(
    signal: str, media_type: str, pieces: Iterator[bytes], *, limits: DecodeLimits, partition_key: str
) -> Generator[None, None, list[UserRecord]]:
    """Return the records of an export request as `otlp_records` does. `pieces` is the body."""
    # Check the key first: an invalid key is an error for an empty request too.
    _checked(UserRecord(partition_key, b""), limits)
    room = limits.max_record_bytes - len(partition_key.encode())
    # The first pieces, up to one that makes the body too large for one record.
    start: list[bytes] = []
    noted = _noted(pieces, start, room)
    parts = yield from (_protobuf_parts if media_type == PROTOBUF else partial(_json_parts, signal))(noted, limits)
    if not parts:
        return []
    body = b"".join(start)
    if len(body) <= room:
        return [_checked(UserRecord(partition_key, body), limits)]
    records: list[UserRecord] = []
    for text in _joined(parts, room, _in_envelope(signal, media_type)):
        records.append(_checked(UserRecord(partition_key, text), limits))
        yield
    return records


def _noted(pieces: Iterable[bytes], start: list[bytes], most_bytes: int) -> Iterator[bytes]:
    """Return the pieces, and add the first ones to `start` until they have more than `most_bytes`."""
    size = 0
    for piece in pieces:
        if size <= most_bytes:
            start.append(piece)
            size += len(piece)
        yield piece


def _checked(record: UserRecord, limits: DecodeLimits) -> UserRecord:
    made = checked_record(record, 0, limits, key_field="X-Partition-Key")
    if isinstance(made, RecordProblem):
        status, code = (413, "too-large") if made.field == "data" else (400, "malformed")
        raise DecodeRefusal(status, code, made.detail, field=made.field)
    return made


def _protobuf_parts(pieces: Iterable[bytes], limits: DecodeLimits) -> Generator[None, None, list[bytes]]:
    """Return the fields with resource data, each with its tag."""
    parts: list[bytes] = []
    text = b""
    before = fields = 0
    for piece in chain(pieces, (None,)):
        text = text if piece is None else text + piece
        at = 0
        while at < len(text) and (piece is None or len(text) - at >= 2 * _LONGEST_VARINT):
            start = at
            tag, at = _field(text, at, before)
            if at > len(text) and piece is not None:
                # The rest of the field is in the next piece.
                at = start
                break
            if at > len(text) or tag >> 3 == 0:
                raise _no_protobuf(before + start)
            if tag >> 3 == _RESOURCE_FIELD:
                if tag & 7 != _LENGTH_DELIMITED:
                    raise _no_protobuf(before + start)
                parts.append(text[start:at])
            fields += 1
            _require_count(fields, limits, is_whole=False)
            if not fields % STEP_RECORDS:
                yield
        text, before = text[at:], before + at
        if len(text) > limits.max_uncut_bytes:
            raise uncut(limits.max_uncut_bytes)
        yield
    return parts


def _field(body: bytes, at: int, before: int) -> tuple[int, int]:
    """Return the tag of the field that starts at `at`, and the position after the field."""
    start = at
    tag, at = _varint(body, at, before)
    wire_type = tag & 7
    if wire_type == _LENGTH_DELIMITED:
        length, at = _varint(body, at, before)
        at += length
    elif wire_type == _VARINT:
        _, at = _varint(body, at, before)
    elif wire_type in _FIXED_BYTES:
        at += _FIXED_BYTES[wire_type]
    else:
        raise _no_protobuf(before + start)
    return tag, at


def _varint(body: bytes, at: int, before: int) -> tuple[int, int]:
    """Return the varint that starts at `at`, and the position after it; `before` bytes precede `body`."""
    value = shift = 0
    for position in range(at, min(at + _LONGEST_VARINT, len(body))):
        value |= (body[position] & 0x7F) << shift
        if body[position] < 0x80:  # noqa: PLR2004 - the bit that says there is more
            return value, position + 1
        shift += 7
    raise _no_protobuf(before + at)


def _no_protobuf(at: int) -> DecodeRefusal:
    detail = f"the body is not an export request in protobuf: no complete field starts at byte {at}"
    return DecodeRefusal(400, "malformed", detail, field="$")


def _json_parts(signal: str, pieces: Iterator[bytes], limits: DecodeLimits) -> Generator[None, None, list[bytes]]:
    """Return the text of each element of the request's array."""
    name, first = RESOURCES[signal], next(pieces, b"")
    rest = next(pieces, None)
    head = None if rest is None else _HEADS[signal].match(first)
    pieces = pieces if rest is None else chain((rest,), pieces)
    if head is None:
        body = yield from gathered(chain((first,), pieces), limits.max_uncut_bytes)
        return (yield from _whole_json_parts(signal, body, limits))
    parts: list[bytes] = []
    # The request is an object with an array.
    runs = ArrayRuns(limits.max_uncut_bytes, limits.max_depth - 2, too_deep("the JSON", limits.max_depth))
    for run in elements_in_steps(head, pieces, runs, tail=None, most_tail_bytes=limits.max_uncut_bytes):
        if run:
            require_text(run)
            try:
                texts = _TEXTS.decode(run)
            except MALFORMED as error:
                raise malformed(error) from None
            _require_count(len(parts) + len(texts), limits)
            parts += _objects(name, texts, len(parts))
        yield
    yield from _require_other_members(signal, runs.tail, limits)
    return parts


def _require_other_members(signal: str, tail: bytes, limits: DecodeLimits) -> Generator[None, None, None]:
    """Check what follows the array: any members, as in a small body, but not a second array, whose data would be lost.

    Raises:
        DecodeRefusal: it is not the rest of a JSON object, is nested too deep, or has the array again.
    """
    if _TAIL.fullmatch(tail):
        return
    rest = b'{"":0' + tail
    require_text(rest)
    yield
    try:
        again = getattr(_REQUESTS[signal].decode(rest), RESOURCES[signal])
    except MALFORMED as error:
        raise malformed(error) from None
    if again:
        raise _two_arrays(RESOURCES[signal])
    yield from require_depth(limits.max_depth, rest, too_deep("the JSON", limits.max_depth))


def _two_arrays(name: str) -> DecodeRefusal:
    return DecodeRefusal(400, "malformed", f"{name} is there twice; send one array", field=name)


def _objects(name: str, texts: Sequence[msgspec.Raw], count: int) -> list[bytes]:
    """Return the elements of an array, which follow `count` others, if they are objects."""
    parts = [bytes(text) for text in texts]
    for index, part in enumerate(parts, count):
        if not part.startswith(b"{"):
            raise DecodeRefusal(400, "malformed", f"{name}[{index}] is not an object", index=index, field=name)
    return parts


def _whole_json_parts(signal: str, body: bytes, limits: DecodeLimits) -> Generator[None, None, list[bytes]]:
    name = RESOURCES[signal]
    require_content(body, f'an export request in JSON, {{"{name}": [...]}}')
    require_text(body)
    yield
    try:
        resources = bytes(getattr(_REQUESTS[signal].decode(body), name))
        yield
        if has_many_elements(resources):
            _require_count(len(_COUNTED.decode(resources)), limits)
        texts = _TEXTS.decode(resources) if resources else []
        yield
    except msgspec.ValidationError as error:
        detail = f"the body is not an export request in JSON: {mismatch(error)[1]}"
        raise DecodeRefusal(400, "malformed", detail, field="$") from None
    except MALFORMED as error:
        raise malformed(error) from None
    _require_count(len(texts), limits)
    yield from require_depth(limits.max_depth, body, too_deep("the JSON", limits.max_depth))
    # msgspec returns the last array only. Requests have no other members whose data could have its name.
    quoted = f'"{name}"'.encode()
    if body.count(quoted) - resources.count(quoted) > 1:
        raise _two_arrays(name)
    parts = _objects(name, texts, 0)
    if not resources and _NO_MEMBERS.fullmatch(body) is None:
        # Another signal, or names in another spelling. Consumers would never find this data.
        others = sorted(_MEMBERS.decode(body)) if body.count(b",") < _MOST_NAMED else ["other members"]
        detail = f"{name} is missing; the body has {printable(', '.join(others))}"
        raise DecodeRefusal(400, "malformed", detail, field=name)
    return parts


_HEADS: Final = {signal: json_pattern(rb' \{ "%b" : \[' % name.encode()) for signal, name in RESOURCES.items()}
_TAIL: Final = json_pattern(rb" \} ")
# Members of other names are skipped.
_REQUESTS: Final = {
    signal: msgspec.json.Decoder(msgspec.defstruct("Request", [(name, msgspec.Raw, ABSENT)]))
    for signal, name in RESOURCES.items()
}
_COUNTED: Final = msgspec.json.Decoder(list[SkippedObject])
_NO_MEMBERS: Final = json_pattern(rb" \{ \} ")
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
