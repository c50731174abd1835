"""application/json and application/x-ndjson: all records in one call, or each alone to name the bad ones.

A JSON body is one record, or {"records": [...]}; NDJSON is a record a line, blank lines not counted.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding.decoded import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    RecordProblem,
    is_aggregated,
)
from kpl_integrations.ingest.decoding.json_text import MALFORMED, malformed, mismatch, require_utf8
from kpl_integrations.ingest.decoding.partition_keys import NeighbourKeys
from kpl_integrations.ingest.decoding.wire_record import (
    PlainRecord,
    WireRecord,
    user_records,
)

__all__ = ["json_body", "ndjson_body", "plain_json", "plain_ndjson", "require_count"]


class _Body(WireRecord, forbid_unknown_fields=True, gc=False):
    """One record, or many."""

    records: list[WireRecord] | msgspec.UnsetType = msgspec.UNSET


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """Many records, each left for a look of its own."""

    records: list[msgspec.Raw]


class _PlainEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    """Many plain records."""

    records: list[PlainRecord]


_PLAIN_RECORD: Final = msgspec.json.Decoder(PlainRecord)
_PLAIN_ENVELOPE: Final = msgspec.json.Decoder(_PlainEnvelope)
_RECORD: Final = msgspec.json.Decoder(WireRecord)
_BODY: Final = msgspec.json.Decoder(_Body)
_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_RECORDS: Final = b'"records"'
_HEAD_BYTES: Final = 32
_BLANK: Final = b" \t\r"


def plain_json(body: bytes) -> list[PlainRecord] | None:
    """Return the records of a JSON body if each is a key and a text and no more; None: `json_body` tells."""
    try:
        # A guess which of the two it is; a wrong one costs time.
        is_envelope = _RECORDS in body[:_HEAD_BYTES]
        return _PLAIN_ENVELOPE.decode(body).records if is_envelope else [_PLAIN_RECORD.decode(body)]
    except MALFORMED:
        return None


def plain_ndjson(body: bytes) -> list[PlainRecord] | None:
    """Return the records of NDJSON if each is a key and a text and no more; None: `ndjson_body` tells."""
    try:
        return _PLAIN_RECORD.decode_lines(body)
    except MALFORMED:
        return None


def json_body(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    """Decode a JSON body.

    Raises:
        DecodeRefusal: it is no JSON in UTF-8, neither one record nor an object of records, or has too many.
    """
    require_utf8(body)
    try:
        decoded = _BODY.decode(body)
    except msgspec.ValidationError as error:
        return _each_of_envelope(body, error, limits, keys)
    except MALFORMED as error:
        raise malformed(error) from None
    if decoded.records is msgspec.UNSET:
        return _decoded([decoded], limits, keys)
    if decoded.data or decoded.partition_key or decoded.data_base64 or decoded.explicit_hash_key:
        detail = "the body has records and members of one record beside them; send one of the two"
        raise DecodeRefusal(400, "malformed", detail, field="records")
    require_count(len(decoded.records), limits)
    return _decoded(decoded.records, limits, keys)


def ndjson_body(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    """Decode NDJSON; a line that is no record is a problem of that line alone.

    (Where all are records, less than a line break between two of them passes too.)

    Raises:
        DecodeRefusal: the body is no UTF-8, or has no records or too many.
    """
    require_utf8(body)
    try:
        lines = _RECORD.decode_lines(body)
    except MALFORMED:
        return _each_line(body, limits, keys)
    require_count(len(lines), limits)
    return _decoded(lines, limits, keys)


def require_count(count: int, limits: DecodeLimits) -> None:
    """Check how many records a request has.

    Raises:
        DecodeRefusal: none, or too many.
    """
    if not 1 <= count <= limits.max_records:
        if count:
            detail = f"the request has {count:,} records; send at most {limits.max_records:,}"
            raise DecodeRefusal(413, "too-many-records", detail)
        raise DecodeRefusal(400, "malformed", "the request has no records; send at least one", field="records")


def _decoded(wire_records: Sequence[WireRecord], limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    records, problems = user_records(wire_records, range(len(wire_records)), limits, keys)
    return Decoded(records, problems, is_aggregated(records))


def _each_of_envelope(
    body: bytes, error: msgspec.ValidationError, limits: DecodeLimits, keys: NeighbourKeys
) -> Decoded:
    """Decode a body of which some records are not of the shape, or which is none itself."""
    field, detail = mismatch(error)
    try:
        texts = _ENVELOPE.decode(body).records
    except MALFORMED:
        if field.startswith("records"):
            raise DecodeRefusal(400, "malformed", detail, field=field) from None
        if body.lstrip()[:1] != b"{":
            detail = 'the body is no object; send one record, or {"records": [...]}'
            raise DecodeRefusal(400, "malformed", detail, field="$") from None
        return Decoded([], [RecordProblem(0, field, detail)])
    require_count(len(texts), limits)
    return _each_text([bytes(text) for text in texts], limits, keys)


def _each_line(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    texts = [line for line in body.split(b"\n") if line.strip(_BLANK)]
    require_count(len(texts), limits)
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
    records, problems = user_records(wire_records, indexes, limits, keys)
    in_order = sorted(problems + misshapen, key=lambda problem: problem.index)
    return Decoded(records, in_order, is_aggregated(records))
