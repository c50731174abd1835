"""Decodes Kinesis requests and encodes answers: which wire format a request uses and which operation it names.

A server calls, in this order: `wire_of` with the content type (errors are answered in the same format), its own
authentication, and then `operation_of` and `request_of`. The JSON format, `application/x-amz-json-1.1` with blobs
in base64, is in this file, because almost every SDK uses it; CBOR is in `cbor_wire`.
"""

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Final, Protocol, TypeVar, cast

import msgspec

from kpl_integrations.kinesis_protocol.requests import (
    REQUEST_TYPES,
    SERIALIZATION,
    UNKNOWN_OPERATION,
    RequestRefused,
    check_constraints,
)

JSON_CONTENT_TYPE: Final = "application/x-amz-json-1.1"
TARGET_PREFIX: Final = "Kinesis_20131202."
# Of a JSON body. Partition keys may contain 500 times 256 braces; every other object beyond 501 is invalid or ignored.
_MAX_OBJECTS: Final = 1 << 17
_CBOR_TYPES: Final = frozenset({"application/x-amz-cbor-1.1", "application/cbor"})

_Request = TypeVar("_Request", bound=msgspec.Struct)


class Timestamp:
    """An instant in an answer: milliseconds since 1970. JSON encodes it as seconds, CBOR as tagged milliseconds."""

    __slots__ = ("milliseconds",)

    def __init__(self, milliseconds: int) -> None:
        self.milliseconds = milliseconds

    def __repr__(self) -> str:
        return f"Timestamp({self.milliseconds})"


class PutResult(Protocol):
    """The result of one record of PutRecords: shard and sequence number, or error code and message."""

    @property
    def shard_id(self) -> str | None:
        """The shard that stored the record; None for an error."""

    @property
    def sequence_number(self) -> str | None:
        """The sequence number; None for an error."""

    @property
    def error_code(self) -> str | None:
        """The error code; None for a stored record."""

    @property
    def error_message(self) -> str | None:
        """The error message; None for a stored record."""


class Wire(Protocol):
    """One format of requests and answers."""

    @property
    def content_type(self) -> str:
        """The media type of request and answer bodies."""

    def decode(self, body: bytes, request_type: type[_Request]) -> _Request:
        """Return the request in `body`.

        Raises:
            RequestRefused: a SerializationException; the format is wrong, or a member has another type.
        """

    def encode(self, answer: Mapping[str, object]) -> bytes:
        """Return the body of an answer; members may be `Timestamp` and bytes."""

    def encode_put_results(self, results: Iterable[PutResult]) -> bytes:
        """Return the body of a PutRecords answer."""


def _encode_timestamp(value: object) -> object:
    if isinstance(value, Timestamp):
        return value.milliseconds / 1000
    message = f"an answer cannot contain a {type(value).__name__}"
    raise TypeError(message)


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_encode_timestamp)


class JsonWire:
    """The JSON format; see `Wire`."""

    content_type = JSON_CONTENT_TYPE

    def decode(self, body: bytes, request_type: type[_Request]) -> _Request:
        """Return the request in `body`."""
        if len(body) > 2 * _MAX_OBJECTS and body.count(b"{") > _MAX_OBJECTS:
            raise RequestRefused(SERIALIZATION, f"The body has more than {_MAX_OBJECTS:,} objects.")
        try:
            return msgspec.json.decode(body, type=request_type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRefused(SERIALIZATION, str(error)) from None

    def encode(self, answer: Mapping[str, object]) -> bytes:
        """Return the body of an answer."""
        return _ENCODER.encode(answer)

    def encode_put_results(self, results: Iterable[PutResult]) -> bytes:
        """Return the body of a PutRecords answer. Formatted by hand, because a server mostly encodes these."""
        failed = 0
        parts = []
        for result in results:
            if result.error_code is None:
                parts.append(f'{{"SequenceNumber":"{result.sequence_number}","ShardId":"{result.shard_id}"}}')
            else:
                failed += 1
                entry = {"ErrorCode": result.error_code, "ErrorMessage": result.error_message}
                parts.append(_ENCODER.encode(entry).decode())
        return f'{{"FailedRecordCount":{failed},"Records":[{",".join(parts)}]}}'.encode()


_JSON: Final = JsonWire()


def wire_of(content_type: str | None) -> Wire:
    """Return the format of a content type: CBOR, or JSON for everything else, so that any client can read an error.

    CBOR needs the package `cbor2`, which is imported with the first such request.

    Raises:
        RequestRefused: the client uses CBOR and `cbor2` is not installed.
    """
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type not in _CBOR_TYPES:
        return _JSON
    try:
        return cast("Wire", import_module("kpl_integrations.kinesis_protocol.cbor_wire").CborWire())
    except ModuleNotFoundError:
        message = "CBOR needs the package cbor2: install kpl-integrations[cbor], or use JSON."
        raise RequestRefused(UNKNOWN_OPERATION, message, status=415) from None


def operation_of(target: str | None, offered: Collection[str] = REQUEST_TYPES.keys()) -> str:
    """Return the operation in an `X-Amz-Target` header, one of those that this server has `offered`.

    Raises:
        RequestRefused: an UnknownOperationException that lists them.
    """
    prefix, _, operation = (target or "").partition(".")
    if f"{prefix}." != TARGET_PREFIX or operation not in offered:
        message = f"X-Amz-Target {(target or '')[:128]!r} is not one of {TARGET_PREFIX}{{{', '.join(offered)}}}."
        raise RequestRefused(UNKNOWN_OPERATION, message)
    return operation


def request_of(wire: Wire, operation: str, body: bytes) -> msgspec.Struct:
    """Return the decoded and validated request of an operation.

    Raises:
        RequestRefused: the body cannot be decoded, or violates the API's constraints.
    """
    request = wire.decode(body, REQUEST_TYPES[operation])
    check_constraints(request)
    return request


def present(members: Mapping[str, object]) -> dict[str, object]:
    """Return the members that have a value, as the service and its clients send them."""
    return {
        name: present(value) if isinstance(value, Mapping) else value
        for name, value in members.items()
        if value is not None
    }


def error_body(wire: Wire, code: str, message: str) -> bytes:
    """Return the body of an error answer."""
    return wire.encode({"__type": code, "message": message})
