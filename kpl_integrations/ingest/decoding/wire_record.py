"""One record as clients write it in JSON, and the user record it stands for.

    {"partition_key": "42", "data": <any JSON but null>, "explicit_hash_key": "0"}
    {"partition_key": "42", "data_base64": "aGVsbG8="}

`data` that is a string becomes its UTF-8 bytes; any other value stays the JSON text it is, byte for byte.
A member of another name is refused: a misspelt partition key must not become a random one.
"""

import binascii
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import pybase64

from kpl_core import UserRecord
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_integrations.ingest.decoding.checked_record import checked_record
from kpl_integrations.ingest.decoding.decoded import DecodeLimits, RecordProblem
from kpl_integrations.ingest.decoding.json_text import is_deeper_than
from kpl_integrations.ingest.decoding.partition_keys import NeighbourKeys

__all__ = ["PlainRecord", "WireRecord", "plain_pairs", "user_records"]

_UTF8_BYTES_PER_CHARACTER: Final = 4
_STRING: Final = msgspec.json.Decoder(str)
_QUOTE: Final = ord('"')
_BRACE: Final = ord("{")


class PlainRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What nearly all records are: a key and a text, both checked by the decoder itself."""

    partition_key: Annotated[str, msgspec.Meta(min_length=1, max_length=PARTITION_KEY_CHARACTERS)]
    data: str


class WireRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The members a client may write."""

    partition_key: str | None = None
    data: msgspec.Raw = msgspec.Raw()
    data_base64: str | None = None
    explicit_hash_key: str | None = None


def user_records(
    wire_records: Sequence[WireRecord], indexes: Sequence[int], limits: DecodeLimits, keys: NeighbourKeys
) -> tuple[list[UserRecord], list[RecordProblem]]:
    """Return the user records that wire records stand for, and what is wrong with the others."""
    records: list[UserRecord] = []
    problems: list[RecordProblem] = []
    most = limits.max_record_bytes
    for wire, index in zip(wire_records, indexes, strict=True):
        key = wire.partition_key
        raw = bytes(wire.data)
        # Nearly all are a short key and a short string without escapes, or a shallow object; written out, for
        # the calls below cost as much again.
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


def plain_pairs(plain_records: list[PlainRecord]) -> list[tuple[str, bytes]]:
    """Return plain records as pairs of partition key and data: a tenth of a microsecond each."""
    return [(plain.partition_key, plain.data.encode()) for plain in plain_records]


def _user_record(
    wire: WireRecord, raw: bytes, index: int, limits: DecodeLimits, keys: NeighbourKeys
) -> UserRecord | RecordProblem:
    if wire.data_base64 is not None:
        if raw:
            return RecordProblem(index, "data_base64", "the record has data and data_base64; send one of them")
        try:
            data = pybase64.b64decode(wire.data_base64, validate=True)
        except (binascii.Error, ValueError):
            return RecordProblem(index, "data_base64", "data_base64 is no base64 (RFC 4648, section 4, with padding)")
    elif not raw or raw == b"null":
        return RecordProblem(index, "data", "the record has no data; send data or data_base64")
    elif raw[0] == _QUOTE:
        data = _STRING.decode(raw).encode()
    # A size that is refused anyway is not worth the look.
    elif len(raw) <= limits.max_record_bytes and is_deeper_than(limits.max_depth, raw):
        return RecordProblem(
            index, "data", f"data stands more than {limits.max_depth} deep; flatten it or send a string"
        )
    else:
        data = raw
    key = keys.deal() if wire.partition_key is None else wire.partition_key
    return checked_record(UserRecord(key, data, wire.explicit_hash_key), index, limits)
