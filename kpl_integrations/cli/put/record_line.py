"""What one line of `kpl put`'s input says: a user record, nothing, or something no record can be."""

from base64 import b64decode
from collections.abc import Callable
from typing import Any

import msgspec

from kpl_core import InvalidUserRecord, UserRecord
from kpl_integrations.cli.put.input_format import InputFormat

__all__ = ["ReadLine", "reader_of"]

# (line without its end, its number from 1) -> the record of that line.
# Raises InvalidUserRecord, without the number.
ReadLine = Callable[[bytes, int], UserRecord]


class _Envelope(msgspec.Struct):
    """A line that says it all; other fields, such as those of `kpl tail --json`, are passed over."""

    partition_key: str
    data: str | None = None
    data_base64: str | None = None
    explicit_hash_key: str | None = None
    # What only a dead letter has, as `kpl dlq export` writes it: there `data` is base64.
    reason: Any = None
    first_seen: Any = None
    producer_version: Any = None


_envelope = msgspec.json.Decoder(_Envelope)
_object = msgspec.json.Decoder(dict[str, Any])


def reader_of(input_format: InputFormat, *, key: str | None, key_field: str | None) -> ReadLine:
    """Return what reads a line. `key` is the key of all, `key_field` the field it stands in."""
    if key_field is not None:
        return lambda line, _: UserRecord(_key_in(line, key_field), line)
    if input_format is InputFormat.NDJSON:
        return _enveloped if key is None else lambda line, _: _checked_object(line, key)
    if key is not None:
        return lambda line, _: UserRecord(key, line)
    return lambda line, number: UserRecord(str(number), line)


def _key_in(line: bytes, key_field: str) -> str:
    fields = _decoded(_object, line)
    key = fields.get(key_field)
    if isinstance(key, bool) or not isinstance(key, str | int):
        found = "is missing" if key_field not in fields else f"is {str(key)[:40]!r}"
        message = f"field {key_field!r} {found}; the partition key must be a string or a whole number"
        raise InvalidUserRecord(message)
    return str(key)


def _checked_object(line: bytes, key: str) -> UserRecord:
    _decoded(_object, line)
    return UserRecord(key, line)


def _enveloped(line: bytes, _: int) -> UserRecord:
    envelope: _Envelope = _decoded(_envelope, line)
    if None not in (envelope.reason, envelope.first_seen, envelope.producer_version):
        envelope.data, envelope.data_base64 = envelope.data_base64, envelope.data
    if (envelope.data is None) == (envelope.data_base64 is None):
        message = "it must have either data (text) or data_base64; --key-field NAME sends the line as it is"
        raise InvalidUserRecord(message)
    if envelope.data is not None:
        data = envelope.data.encode()
    else:
        try:
            data = b64decode(envelope.data_base64 or "", validate=True)
        except ValueError as error:
            message = f"data_base64 is no base64: {error}"
            raise InvalidUserRecord(message) from error
    return UserRecord(envelope.partition_key, data, envelope.explicit_hash_key)


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:  # noqa: ANN401 - what the decoder's type says
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        message = (
            f'{error}; a line is an object like {{"partition_key": "42", "data": "text"}}, or use --key-field NAME'
        )
        raise InvalidUserRecord(message) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"it is no JSON ({error}); correct it, or send text with --format lines"
        raise InvalidUserRecord(message) from error
