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
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Final

import msgspec
import pybase64

from kpl_core import UserRecord
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_core.records.aggregated_record import MAGIC
from kpl_integrations.ingest.decoding.decoded import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    NeighbourKeys,
    RecordProblem,
    checked_record,
    is_aggregated,
)
from kpl_integrations.ingest.decoding.json_text import (
    ABSENT,
    MALFORMED,
    SkippedObject,
    has_many_elements,
    is_deeper_than,
    malformed,
    mismatch,
    require_text,
)

# For OpenAPI. Some numbers of 39 digits are below 2**128 too; this pattern leaves them out.
HASH_KEY_PATTERN: Final = "^(0|[1-9][0-9]{0,37})$"
_UTF8_BYTES_PER_CHARACTER: Final = 4
_STRING: Final = msgspec.json.Decoder(str)
_QUOTE: Final = ord('"')
_BRACE: Final = ord("{")
_KEY_SCHEMA: Final = {"minLength": 1, "maxLength": PARTITION_KEY_CHARACTERS}


class PlainRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The most frequent form: a key and a text. msgspec checks both."""

    partition_key: Annotated[str, msgspec.Meta(min_length=1, max_length=PARTITION_KEY_CHARACTERS)]
    data: str


class PairRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Any record without an explicit hash key; its data is checked later."""

    partition_key: Annotated[str, msgspec.Meta(min_length=1, max_length=PARTITION_KEY_CHARACTERS)] | None = None
    data: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    data_base64: str | None = None


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


class _PlainEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    """Many plain records."""

    records: list[PlainRecord]


class _PairEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    """Many records without explicit hash keys."""

    records: list[PairRecord]


_PLAIN_RECORD: Final = msgspec.json.Decoder(PlainRecord)
_PLAIN_ENVELOPE: Final = msgspec.json.Decoder(_PlainEnvelope)
_PAIR_RECORD: Final = msgspec.json.Decoder(PairRecord)
_PAIR_ENVELOPE: Final = msgspec.json.Decoder(_PairEnvelope)
_RECORD: Final = msgspec.json.Decoder(WireRecord)
_BODY: Final = msgspec.json.Decoder(_Body)
_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_COUNTED_ENVELOPE: Final = msgspec.json.Decoder(_CountedEnvelope)
_RECORDS: Final = b'"records"'
_HEAD_BYTES: Final = 32
_LINE: Final = re.compile(rb"[^ \t\r\n][^\n]*")


def pairs_of_json(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> list[tuple[str, bytes]] | None:
    """Return keys and data of a JSON body, or None if a record needs `json_body`."""
    # Guess which of the two forms it is. A wrong guess costs only time.
    is_envelope = _RECORDS in body[:_HEAD_BYTES]
    try:
        return _plain_pairs(_PLAIN_ENVELOPE.decode(body).records if is_envelope else [_PLAIN_RECORD.decode(body)])
    except MALFORMED:
        pass
    try:
        pairs = _PAIR_ENVELOPE.decode(body).records if is_envelope else [_PAIR_RECORD.decode(body)]
        _require_utf_8(body)
    except MALFORMED:
        return None
    return _pairs(pairs, limits, keys)


def pairs_of_ndjson(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> list[tuple[str, bytes]] | None:
    """Return keys and data of NDJSON, or None if a record needs `ndjson_body`."""
    try:
        return _plain_pairs(_PLAIN_RECORD.decode_lines(body))
    except MALFORMED:
        pass
    try:
        pairs = _PAIR_RECORD.decode_lines(body)
        _require_utf_8(body)
    except MALFORMED:
        return None
    return _pairs(pairs, limits, keys)


def _plain_pairs(plain_records: list[PlainRecord]) -> list[tuple[str, bytes]]:
    """Return plain records as pairs of partition key and data; about 0.1 us each."""
    return [(plain.partition_key, plain.data.encode()) for plain in plain_records]


def _require_utf_8(body: bytes) -> None:
    """Raise one of `MALFORMED` if a byte is not UTF-8: msgspec does not look at data that stays JSON."""
    if not body.isascii():
        body.decode()


def _pairs(records: list[PairRecord], limits: DecodeLimits, keys: NeighbourKeys) -> list[tuple[str, bytes]] | None:
    """Return keys and data of records, or None if one is invalid or in a rare form."""
    pairs: list[tuple[str | None, bytes]] = []
    depth, has_all_keys = limits.max_depth, True
    for record in records:
        data, encoded = bytes(record.data), record.data_base64
        if (not data) is (encoded is None):
            return None
        if encoded is not None:
            data = _from_base64(encoded)
        elif data[0] == _QUOTE:
            data = data[1:-1] if b"\\" not in data else _STRING.decode(data).encode()
        elif data[0] != _BRACE or data.count(b"{") + data.count(b"[") > depth:
            return None
        if data.startswith(MAGIC):
            return None
        key = record.partition_key
        if key is None:
            has_all_keys = False
        pairs.append((key, data))
    if has_all_keys:
        return pairs  # type: ignore[return-value] # none of the keys is None
    return [(keys.deal() if key is None else key, data) for key, data in pairs]


def _from_base64(encoded: str) -> bytes:
    """Return the decoded bytes. Bytes that are not base64 are returned as ones that need `json_body`."""
    try:
        return pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return MAGIC


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

    If all lines are valid, two records without a line break between them pass too.

    Raises:
        DecodeRefusal: the body is not UTF-8, or has no records or too many.
    """
    require_text(body)
    try:
        lines = _RECORD.decode_lines(body)
    except MALFORMED:
        return _each_line(body, limits, keys)
    require_count(len(lines), limits)
    return _decoded(lines, limits, keys)


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
    return Decoded(records, problems, is_aggregated(records))


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
            raise DecodeRefusal(400, "malformed", detail, field=field) from None
        if body.lstrip()[:1] != b"{":
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
    return Decoded(records, in_order, is_aggregated(records))


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
            and wire.explicit_hash_key is None
            and len(key) <= PARTITION_KEY_CHARACTERS
            and len(key) * _UTF8_BYTES_PER_CHARACTER + len(raw) <= most
        ):
            if raw[0] == _QUOTE:
                if b"\\" not in raw:
                    records.append(UserRecord(key, raw[1:-1]))
                    continue
            elif raw[0] == _BRACE and raw.count(b"{") + raw.count(b"[") <= limits.max_depth:
                records.append(UserRecord(key, raw))
                continue
        made = _user_record(wire, raw, index, limits, keys)
        if isinstance(made, RecordProblem):
            problems.append(made)
        else:
            records.append(made)
    return records, problems


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
        data = _STRING.decode(raw).encode()
    # Skip the depth check for data that is rejected for its size anyway.
    elif len(raw) <= limits.max_record_bytes and is_deeper_than(limits.max_depth, raw):
        return RecordProblem(
            index, "data", f"data is nested more than {limits.max_depth} deep; flatten it or send a string"
        )
    else:
        data = raw
    key = keys.deal() if wire.partition_key is None else wire.partition_key
    return checked_record(UserRecord(key, data, wire.explicit_hash_key), index, limits)
