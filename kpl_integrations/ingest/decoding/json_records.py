"""Decode application/json and application/x-ndjson.

A JSON body is one record or {"records": [...]}. NDJSON has one record per line; blank lines are skipped.
A record is one of:

    {"partition_key": "42", "data": <any JSON but null>, "explicit_hash_key": "0"}
    {"partition_key": "42", "data_base64": "aGVsbG8="}

`data` that is a string becomes its UTF-8 bytes. Any other value keeps its JSON text, byte for byte.
An unknown member is rejected, because a misspelt `partition_key` would otherwise become a random key.

All records are decoded in one call. If that fails, each record is decoded alone to name the bad ones.
"""

import binascii
import re
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
import pybase64

from kpl_core import UserRecord
from kpl_core.options.kinesis_limits import MAX_HASH_KEY, PARTITION_KEY_CHARACTERS
from kpl_core.records.aggregated_record import MAGIC
from kpl_core.records.hash_key import are_explicit_hash_keys
from kpl_integrations.ingest.decoding.decoded import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    NeighbourKeys,
    Pairs,
    RecordProblem,
    checked_record,
    random_partition_key,
)
from kpl_integrations.ingest.decoding.json_text import (
    ABSENT,
    BLANKS,
    MALFORMED,
    STRING,
    SkippedObject,
    has_many_elements,
    is_deeper_than,
    malformed,
    mismatch,
    require_text,
    string_in_steps,
)
from kpl_integrations.ingest.decoding.record_counts import aggregate_counts, aggregate_counts_in_steps
from kpl_integrations.ingest.decoding.trace_members import with_trace

# For OpenAPI. Some numbers of 39 digits are below 2**128 too; this pattern leaves them out.
HASH_KEY_PATTERN: Final = "^(0|[1-9][0-9]{0,37})$"

_UTF8_BYTES_PER_CHARACTER: Final = 4
_SHORT_HASH_KEY: Final = 38
_QUOTE: Final = ord('"')
_BRACE: Final = ord("{")
_NOTHING: Final = b""
_KEY_SCHEMA: Final = {"minLength": 1, "maxLength": PARTITION_KEY_CHARACTERS}


_MOST_DIGITS: Final = len(str(MAX_HASH_KEY))
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=PARTITION_KEY_CHARACTERS)]


class TextRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The most frequent form: a key and a text. msgspec checks both."""

    partition_key: _Key
    data: str


class KeylessRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A text without a key."""

    data: str


class JsonRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A key, and a JSON value whose text is put as it is."""

    partition_key: _Key
    data: msgspec.Raw


class Base64Record(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A key and bytes."""

    partition_key: _Key
    data_base64: bytes


class HashKeyRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A key, a text and an explicit hash key."""

    partition_key: _Key
    data: str
    explicit_hash_key: Annotated[str, msgspec.Meta(min_length=1, max_length=_MOST_DIGITS)]


class PairRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Any record without an explicit hash key."""

    partition_key: _Key | None = None
    data: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    data_base64: bytes | None = None


class WireRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The members of a record.

    `Meta(extra_json_schema=...)` is for OpenAPI; it checks nothing.
    """

    partition_key: Annotated[str, msgspec.Meta(extra_json_schema=_KEY_SCHEMA)] | None = None
    data: Annotated[
        msgspec.Raw,
        msgspec.Meta(
            description="A string's UTF-8 bytes; of anything else, its JSON text.",
            extra_json_schema={"not": {"type": "null"}},
        ),
    ] = msgspec.field(default_factory=lambda: ABSENT)
    data_base64: Annotated[str, msgspec.Meta(extra_json_schema={"contentEncoding": "base64"})] | None = None
    explicit_hash_key: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": HASH_KEY_PATTERN})] | None = None


class _Body(WireRecord, forbid_unknown_fields=True, gc=False):
    """One record or many."""

    records: list[WireRecord] | msgspec.UnsetType = msgspec.UNSET


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """Many records, each decoded on its own later."""

    records: list[msgspec.Raw]


class _CountedEnvelope(msgspec.Struct):
    """Many records, only counted."""

    records: list[SkippedObject]


_RECORD: Final = msgspec.json.Decoder(WireRecord)
_RECORDS_OF_ARRAY: Final = msgspec.json.Decoder(list[WireRecord])
_BODY: Final = msgspec.json.Decoder(_Body)
_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_COUNTED_ENVELOPE: Final = msgspec.json.Decoder(_CountedEnvelope)
_RECORDS: Final = b'"records"'
_HEAD_BYTES: Final = 32
_LINE: Final = re.compile(rb"[^ \t\r\n][^\n]*")


def pairs_of_json(body: bytes, limits: DecodeLimits, keys: NeighbourKeys | None) -> Pairs | None:
    """Return keys and data of a JSON body, or None if a record needs `json_body`."""
    # Guess which of the two forms it is. A wrong guess costs only time.
    is_envelope = _RECORDS in body[:_HEAD_BYTES]
    for form in _FORMS:
        try:
            records = form.in_envelope.decode(body).records if is_envelope else [form.alone.decode(body)]
        except MALFORMED:
            continue
        return form.pairs(records, body, limits, keys)
    return None


def pairs_of_ndjson(body: bytes, limits: DecodeLimits, keys: NeighbourKeys | None) -> Pairs | None:
    """Return keys and data of NDJSON, or None if a record needs `ndjson_body`."""
    array, lines = _array_of_lines(body)
    for form in _FORMS:
        try:
            records = form.in_array.decode(array)
        except MALFORMED:
            continue
        return form.pairs(records, body, limits, keys) if len(records) == lines else None
    return None


def _array_of_lines(body: bytes) -> tuple[bytes, int]:
    """Return a JSON array of the lines, and their number. It is valid and has so many records if each line is one.

    A comma stands before each line break. Inside a record no comma is valid there, and no line break in a string. The
    decoder's own `decode_lines` takes any blanks between records.
    """
    text = body.strip(BLANKS)
    array = text.replace(b"\n", b",\n")
    return b"[%b]" % array, len(array) - len(text) + 1


def _text_pairs(records: list[TextRecord], *_: object) -> Pairs:
    return [(each.partition_key, each.data.encode()) for each in records]


def _keyless_pairs(
    records: list[KeylessRecord], _body: bytes, _limits: DecodeLimits, keys: NeighbourKeys | None
) -> Pairs:
    dealt = (keys or NeighbourKeys(random_partition_key)).deal_many(len(records))
    return [(key, each.data.encode()) for key, each in zip(dealt, records, strict=True)]


def _base64_pairs(records: list[Base64Record], *_: object) -> Pairs | None:
    pairs = [(each.partition_key, each.data_base64) for each in records]
    return None if _has_aggregates(pairs) else pairs


def _json_pairs(
    records: list[JsonRecord], body: bytes, limits: DecodeLimits, keys: NeighbourKeys | None
) -> Pairs | None:
    # A concatenation costs half as much as `bytes`.
    pairs = [(each.partition_key, _NOTHING + each.data) for each in records]
    are_objects = {data[0] for _, data in pairs} <= {_BRACE}
    # The brackets that one object can have: each record and its object have one of their own.
    most = _brackets(body) - 2 * len(pairs) + 1
    if most > limits.max_depth:
        most = max([_brackets(data) for _, data in pairs], default=0)
    if not are_objects or most > limits.max_depth:
        return _any_pairs([PairRecord(each.partition_key, each.data) for each in records], body, limits, keys)
    return pairs if _is_utf_8(body) else None


def _brackets(text: bytes) -> int:
    """Count the opening brackets. To remove one kind costs a quarter of `count`, which compares byte by byte."""
    return 2 * len(text) - len(text.replace(b"{", b"")) - len(text.replace(b"[", b""))


def _hash_key_pairs(records: list[HashKeyRecord], *_: object) -> Pairs | None:
    hash_keys = [each.explicit_hash_key for each in records]
    if not are_explicit_hash_keys(hash_keys):
        return None
    return [(each.partition_key, each.data.encode(), each.explicit_hash_key) for each in records]


def _any_pairs(
    records: list[PairRecord], body: bytes, limits: DecodeLimits, keys: NeighbourKeys | None
) -> Pairs | None:
    if not _is_utf_8(body):
        return None
    pairs: list[tuple[str | None, bytes]] = []
    depth = limits.max_depth
    for record in records:
        data = bytes(record.data)
        if (not data) is (record.data_base64 is None):
            return None
        if record.data_base64 is not None:
            data = record.data_base64
        elif data[0] == _QUOTE:
            data = STRING.decode(data).encode()
        elif data[0] != _BRACE or data.count(b"{") + data.count(b"[") > depth:
            return None
        pairs.append((record.partition_key, data))
    if _has_aggregates(pairs):
        return None
    keys = keys or NeighbourKeys(random_partition_key)
    return [(keys.deal() if key is None else key, data) for key, data in pairs]


def _has_aggregates(pairs: Sequence[tuple[str | None, bytes]]) -> bool:
    """Return True if data is an aggregated record, which must not be aggregated again."""
    return MAGIC in {data[:4] for _, data in pairs}


def _is_utf_8(body: bytes) -> bool:
    """Return True if all bytes are UTF-8: msgspec does not look at data that stays JSON."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            return False
    return True


class _Form:
    """An ordinary form of records: its decoders, and how they become pairs; None if `_user_record` must look at it."""

    def __init__(self, record_type: Any, pairs: Callable[..., Pairs | None]) -> None:  # noqa: ANN401 - a struct
        envelope = msgspec.defstruct("Envelope", [("records", list[record_type])], forbid_unknown_fields=True)
        self.alone: msgspec.json.Decoder[Any] = msgspec.json.Decoder(record_type)
        self.in_array: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[record_type])
        self.in_envelope: msgspec.json.Decoder[Any] = msgspec.json.Decoder(envelope)
        self.pairs = pairs


# The most frequent form first. A decoder of another form fails at the first record.
_FORMS: Final = (
    _Form(TextRecord, _text_pairs),
    _Form(JsonRecord, _json_pairs),
    _Form(KeylessRecord, _keyless_pairs),
    _Form(HashKeyRecord, _hash_key_pairs),
    _Form(Base64Record, _base64_pairs),
    _Form(PairRecord, _any_pairs),
)


def json_body(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    """Decode a JSON body.

    Raises:
        DecodeRefusal: it is not JSON in UTF-8, is neither one record nor an object of records, or has too many.
    """
    require_text(body)
    try:
        decoded = _BODY.decode(body)
    except msgspec.ValidationError as error:
        return _each_of_envelope(body, error, limits, keys)
    except MALFORMED as error:
        raise malformed(error) from None
    if decoded.records is msgspec.UNSET:
        return _decoded([decoded], limits, keys)
    if decoded.data or decoded.partition_key or decoded.data_base64 or decoded.explicit_hash_key:
        detail = "the body has records and also members of a single record; send one of the two"
        raise DecodeRefusal(400, "malformed", detail, field="records")
    require_count(len(decoded.records), limits)
    return _decoded(decoded.records, limits, keys)


def ndjson_body(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    """Decode NDJSON. An invalid line is a problem of that line only.

    Raises:
        DecodeRefusal: the body is not UTF-8, or has no records or too many.
    """
    require_text(body)
    array, lines = _array_of_lines(body)
    try:
        records = _RECORDS_OF_ARRAY.decode(array)
    except MALFORMED:
        return _each_line(body, limits, keys)
    if len(records) != lines:
        return _each_line(body, limits, keys)
    require_count(lines, limits)
    return _decoded(records, limits, keys)


def record_in_steps(
    text: bytes, limits: DecodeLimits, keys: NeighbourKeys, *, is_line: bool = False
) -> Generator[None, None, Decoded]:
    """Decode one long record. If a line is not JSON, that is a problem of this line only.

    Raises:
        DecodeRefusal: it is not UTF-8, or not JSON and not a line.
    """
    require_text(text)
    yield
    try:
        wire = _RECORD.decode(text)
    except msgspec.ValidationError as error:
        return Decoded([], [RecordProblem(0, *mismatch(error))])
    except MALFORMED as error:
        refusal = malformed(error)
        if is_line:
            return Decoded([], [RecordProblem(0, "$", refusal.detail)])
        raise refusal from None
    yield
    raw = bytes(wire.data)
    if raw[:1] == b'"' and wire.data_base64 is None:
        made = _keyed(wire, (yield from string_in_steps(raw)), 0, limits, keys)
    else:
        made = _user_record(wire, raw, 0, limits, keys)
    if isinstance(made, RecordProblem):
        return Decoded([], [made])
    return Decoded([made], [], (yield from aggregate_counts_in_steps([made])))


def require_count(count: int, limits: DecodeLimits, *, is_whole: bool = True) -> None:
    """Check how many records a request has; not `is_whole`: counting stopped above the bound.

    Raises:
        DecodeRefusal: it has none or too many.
    """
    if not 1 <= count <= limits.max_records:
        if count:
            has = f"{count:,} records" if is_whole else f"more than {count - 1:,} records"
            detail = f"the request has {has}; send at most {limits.max_records:,} at once"
            raise DecodeRefusal(413, "too-many-records", detail)
        raise DecodeRefusal(400, "malformed", "the request has no records; send at least one", field="records")


def _decoded(wire_records: Sequence[WireRecord], limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    records, problems = _user_records(wire_records, range(len(wire_records)), limits, keys)
    return Decoded(records, problems, aggregate_counts(records))


def _each_of_envelope(
    body: bytes, error: msgspec.ValidationError, limits: DecodeLimits, keys: NeighbourKeys
) -> Decoded:
    """Decode a body that has records of the wrong shape, or has the wrong shape itself."""
    field, detail = mismatch(error)
    try:
        if has_many_elements(body):
            require_count(len(_COUNTED_ENVELOPE.decode(body).records), limits)
        texts = _ENVELOPE.decode(body).records
    except MALFORMED:
        if field.startswith("records"):
            raise DecodeRefusal(400, "malformed", f"{field}: {detail}", field=field) from None
        if body.lstrip(BLANKS)[:1] != b"{":
            detail = 'the body is not an object; send one record, or {"records": [...]}'
            raise DecodeRefusal(400, "malformed", detail, field="$") from None
        return Decoded([], [RecordProblem(0, field, detail)])
    require_count(len(texts), limits)
    return _each_text([bytes(text) for text in texts], limits, keys)


def _each_line(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    texts = [line.group() for line in islice(_LINE.finditer(body), limits.max_records + 1)]
    require_count(len(texts), limits, is_whole=False)
    return _each_text(texts, limits, keys)


def _each_text(texts: list[bytes], limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    wire_records: list[WireRecord] = []
    indexes: list[int] = []
    misshapen: list[RecordProblem] = []
    for index, text in enumerate(texts):
        try:
            wire_records.append(_RECORD.decode(text))
            indexes.append(index)
        except msgspec.ValidationError as error:
            misshapen.append(RecordProblem(index, *mismatch(error)))
        except MALFORMED as error:
            refusal = malformed(error)
            misshapen.append(RecordProblem(index, "$", refusal.detail))
    records: list[UserRecord]
    records, problems = _user_records(wire_records, indexes, limits, keys)
    in_order = sorted(problems + misshapen, key=lambda problem: problem.index)
    return Decoded(records, in_order, aggregate_counts(records))


def _user_records(
    wire_records: Sequence[WireRecord], indexes: Sequence[int], limits: DecodeLimits, keys: NeighbourKeys
) -> tuple[list[UserRecord], list[RecordProblem]]:
    """Return the user records of valid wire records, and the problems of the others."""
    records: list[UserRecord] = []
    problems: list[RecordProblem] = []
    most = limits.max_record_bytes
    for wire, index in zip(wire_records, indexes, strict=True):
        key = wire.partition_key
        raw = bytes(wire.data)
        # Most records are a short key and a short string without escapes, or a shallow object. They are handled
        # inline, because the calls below would double the cost.
        if (
            key
            and raw
            and wire.data_base64 is None
            and (wire.explicit_hash_key is None or _is_short_hash_key(wire.explicit_hash_key))
            and len(key) <= PARTITION_KEY_CHARACTERS
            and len(key) * _UTF8_BYTES_PER_CHARACTER + len(raw) <= most
        ):
            if raw[0] == _QUOTE:
                if b"\\" not in raw:
                    records.append(UserRecord(key, raw[1:-1], wire.explicit_hash_key))
                    continue
            elif raw[0] == _BRACE and raw.count(b"{") + raw.count(b"[") <= limits.max_depth:
                records.append(UserRecord(key, with_trace(raw, limits, key), wire.explicit_hash_key))
                continue
        made = _user_record(wire, raw, index, limits, keys)
        if isinstance(made, RecordProblem):
            problems.append(made)
        else:
            records.append(made)
    return records, problems


def _is_short_hash_key(text: str) -> bool:
    """Return True for a canonical decimal that is below 2**128 because of its length."""
    return 0 < len(text) <= _SHORT_HASH_KEY and text.isascii() and text.isdigit() and (text[0] != "0" or text == "0")


def _user_record(
    wire: WireRecord, raw: bytes, index: int, limits: DecodeLimits, keys: NeighbourKeys
) -> UserRecord | RecordProblem:
    if wire.data_base64 is not None:
        if raw:
            return RecordProblem(index, "data_base64", "the record has data and data_base64; send one of them")
        try:
            data = pybase64.b64decode(wire.data_base64, validate=True)
        except (binascii.Error, ValueError):
            return RecordProblem(index, "data_base64", "data_base64 is not base64 (RFC 4648, section 4, with padding)")
    elif not raw or raw == b"null":
        return RecordProblem(index, "data", "the record has no data; send data or data_base64")
    elif raw[0] == _QUOTE:
        data = STRING.decode(raw).encode()
    # Skip the depth check for data that is rejected for its size anyway.
    elif len(raw) <= limits.max_record_bytes and is_deeper_than(limits.max_depth, raw):
        return RecordProblem(
            index, "data", f"data is nested more than {limits.max_depth} deep; flatten it or send a string"
        )
    else:
        data = with_trace(raw, limits, wire.partition_key or "")
    return _keyed(wire, data, index, limits, keys)


def _keyed(
    wire: WireRecord, data: bytes, index: int, limits: DecodeLimits, keys: NeighbourKeys
) -> UserRecord | RecordProblem:
    key = keys.deal() if wire.partition_key is None else wire.partition_key
    return checked_record(UserRecord(key, data, wire.explicit_hash_key), index, limits)
