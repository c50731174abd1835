"""Which wire a request speaks, and what it asks for: the first two questions about every request.

A server asks in this order: `wire_of` its content type (so that even a refusal is spoken in it),
then, before anything in the body is believed, whoever authenticates requests looks at headers and
body, then `request_of` target and body.
"""

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Final, Protocol, TypeVar, cast

import msgspec

from kpl_integrations.kinesis_protocol.constraints import check_constraints
from kpl_integrations.kinesis_protocol.json_wire import JsonWire
from kpl_integrations.kinesis_protocol.put_results import PutResult
from kpl_integrations.kinesis_protocol.refusal import UNKNOWN_OPERATION, RequestRefused
from kpl_integrations.kinesis_protocol.requests import REQUEST_TYPES

__all__ = ["TARGET_PREFIX", "Wire", "error_body", "operation_of", "request_of", "wire_of"]

TARGET_PREFIX: Final = "Kinesis_20131202."
_CBOR_TYPES: Final = frozenset({"application/x-amz-cbor-1.1", "application/cbor"})

_Request = TypeVar("_Request", bound=msgspec.Struct)


class Wire(Protocol):
    """One encoding of requests and answers."""

    @property
    def content_type(self) -> str:
        """The media type of its bodies."""

    def decode(self, body: bytes, request_type: type[_Request]) -> _Request:
        """Return the request in `body`, or raise RequestRefused."""

    def encode(self, answer: Mapping[str, object]) -> bytes:
        """Return the body of an answer."""

    def encode_put_results(self, results: Iterable[PutResult]) -> bytes:
        """Return the body of a PutRecords answer."""


_JSON: Final = JsonWire()


def wire_of(content_type: str | None) -> Wire:
    """Return the wire of a content type; JSON for all but CBOR, so that a refusal can be read.

    CBOR needs the package `cbor2`, which is imported with the first such request.

    Raises:
        RequestRefused: CBOR is asked for and `cbor2` is not installed.
    """
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type not in _CBOR_TYPES:
        return _JSON
    try:
        return cast("Wire", import_module("kpl_integrations.kinesis_protocol.cbor_wire").CborWire())
    except ModuleNotFoundError:
        message = "CBOR needs the package cbor2: install kpl-integrations[cbor], or speak JSON."
        raise RequestRefused(UNKNOWN_OPERATION, message, status=415) from None


def operation_of(target: str | None, offered: Collection[str] = REQUEST_TYPES.keys()) -> str:
    """Return the operation an `X-Amz-Target` header names, one of those that this server has `offered`.

    Raises:
        RequestRefused: an UnknownOperationException, which names them.
    """
    prefix, _, operation = (target or "").partition(".")
    if f"{prefix}." != TARGET_PREFIX or operation not in offered:
        message = f"X-Amz-Target {(target or '')[:128]!r} is not one of {TARGET_PREFIX}{{{', '.join(offered)}}}."
        raise RequestRefused(UNKNOWN_OPERATION, message)
    return operation


def request_of(wire: Wire, operation: str, body: bytes) -> msgspec.Struct:
    """Return the decoded and checked request of an operation.

    Raises:
        RequestRefused: it cannot be decoded, or violates the API's constraints.
    """
    request = wire.decode(body, REQUEST_TYPES[operation])
    check_constraints(request)
    return request


def error_body(wire: Wire, code: str, message: str) -> bytes:
    """Return the body of an error answer."""
    return wire.encode({"__type": code, "message": message})
