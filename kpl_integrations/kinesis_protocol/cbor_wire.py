"""The CBOR format, `application/x-amz-cbor-1.1`, which the Java and C++ SDKs use; blobs are not encoded.

The AWS SDK for Java writes and expects timestamps as tag 1 with milliseconds, although tag 1 of CBOR means
seconds. A number too large to be seconds is read as milliseconds.

A body is scanned before it is decoded, because an object costs up to 72 bytes and may be declared by one. The other
tags of CBOR have decoders that compile regular expressions, parse mail or share objects; they are refused.
"""

from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import repeat
from typing import Final, TypeVar

import cbor2
import msgspec

from kpl_integrations.kinesis_protocol.requests import SERIALIZATION, RequestRefused
from kpl_integrations.kinesis_protocol.wire import PutResult, Timestamp

CBOR_CONTENT_TYPE: Final = "application/x-amz-cbor-1.1"

_EPOCH_TAG: Final = 1
# The year 5138 in seconds, March 1973 in milliseconds.
_MAX_SECONDS: Final = 1e11
# No request of the API nests deeper than 3; deeper input attacks the stack.
_MAX_DEPTH: Final = 16
# A PutRecords request has about 3,500 items; 8,192 are scanned in 4 ms at most.
_MAX_ITEMS: Final = 8_192

_Request = TypeVar("_Request", bound=msgspec.Struct)

# The major types (the high 3 bits of an item's first byte) and the widths of numbers (the low 5 bits; RFC 8949, 3).
_BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(2, 8)
_DIRECT: Final = 24
_WIDTHS: Final = {24: 1, 25: 2, 26: 4, 27: 8}
_INDEFINITE: Final = 31
# The first bytes of blobs of 24 to 255 and of 256 to 65,535 bytes. Most data is one of them.
_MEDIUM_BLOB: Final = 0x58
_LARGE_BLOB: Final = 0x59


def _step(first: int) -> int:
    """Return the size of an item that begins with this byte, without its children; 0: see `_after`."""
    major, low = divmod(first, 32)
    if major == _TAG:
        return 1 if low == _EPOCH_TAG else 0
    if low < _DIRECT:
        return 1 + low if major in (_BYTES, _TEXT) else 1
    if low in _WIDTHS:
        return 0 if _BYTES <= major <= _MAP else 1 + _WIDTHS[low]
    return 1 if low == _INDEFINITE and major >= _BYTES else 0


_STEPS: Final = tuple(_step(first) for first in range(256))


def _require_bounded(body: bytes) -> None:
    """Check the number of items, their declared lengths and their tags, in one pass and without building objects.

    Raises:
        RequestRefused: there are too many items, one is longer than the body, or has another tag than 1.
    """
    at, steps = 0, _STEPS
    try:
        for _ in repeat(None, _MAX_ITEMS):
            first = body[at]
            if step := steps[first]:
                at += step
            elif first == _MEDIUM_BLOB:
                at += 2 + body[at + 1]
            elif first == _LARGE_BLOB:
                at += 3 + (body[at + 1] << 8) + body[at + 2]
            else:
                at = _after(body, at, first)
    except IndexError:
        if at > len(body):
            raise RequestRefused(SERIALIZATION, "An item of the body is longer than the body.") from None
        return
    raise RequestRefused(SERIALIZATION, f"The body has more than {_MAX_ITEMS:,} items.")


def _after(body: bytes, at: int, first: int) -> int:
    """Return the position after an item whose length follows its first byte, without its children."""
    major, low = divmod(first, 32)
    if low not in _WIDTHS or not _BYTES <= major <= _MAP:
        raise RequestRefused(SERIALIZATION, f"Byte {at} of the body is a tag other than 1, or not CBOR: 0x{first:02x}.")
    end = at + 1 + _WIDTHS[low]
    length = int.from_bytes(body[at + 1 : end], "big")
    # Each child has at least one byte.
    if length > len(body) - end:
        raise RequestRefused(SERIALIZATION, "An item of the body is longer than the body.")
    return end + length if major in (_BYTES, _TEXT) else end


def _seconds(value: object, _immutable: bool) -> float:  # noqa: FBT001 - cbor2's signature
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"a timestamp must be a number, not {type(value).__name__}"
        raise TypeError(message)
    return value / 1000 if value > _MAX_SECONDS else float(value)


def _write_timestamp(encoder: cbor2.CBOREncoder, timestamp: Timestamp) -> None:
    encoder.encode(cbor2.CBORTag(_EPOCH_TAG, timestamp.milliseconds))


class CborWire:
    """The CBOR format; see `Wire`."""

    content_type = CBOR_CONTENT_TYPE

    def decode(self, body: bytes, request_type: type[_Request]) -> _Request:
        """Return the request in `body`."""
        _require_bounded(body)
        try:
            decoder = cbor2.CBORDecoder(
                BytesIO(body),
                semantic_decoders={_EPOCH_TAG: _seconds},
                max_depth=_MAX_DEPTH,
                strict_hashable_types=True,
            )
            request = msgspec.convert(decoder.decode(), request_type, builtin_types=(bytes,))
        except (cbor2.CBORDecodeError, msgspec.ValidationError) as error:
            raise RequestRefused(SERIALIZATION, str(error)) from None
        try:
            decoder.read(1)
        except cbor2.CBORDecodeEOF:
            return request
        raise RequestRefused(SERIALIZATION, "Bytes follow the item that is the request; send one item.")

    def encode(self, answer: Mapping[str, object]) -> bytes:
        """Return the body of an answer."""
        return cbor2.dumps(answer, encoders={Timestamp: _write_timestamp})

    def encode_put_results(self, results: Iterable[PutResult]) -> bytes:
        """Return the body of a PutRecords answer. Records that were aggregated share one encoded entry."""
        encoded: dict[tuple[str | None, str | None], bytes] = {}
        entries: list[bytes] = []
        failed = 0
        for result in results:
            code = result.error_code
            shown = (result.sequence_number, result.shard_id) if code is None else (code, result.error_message)
            failed += code is not None
            entry = encoded.get(shown)
            if entry is None:
                names = ("SequenceNumber", "ShardId") if code is None else ("ErrorCode", "ErrorMessage")
                entry = encoded[shown] = cbor2.dumps(dict(zip(names, shown, strict=True)))
            entries.append(entry)
        start = b"".join(map(cbor2.dumps, ("FailedRecordCount", failed, "Records")))
        return b"\xa2%b\x9a%b%b" % (start, len(entries).to_bytes(4, "big"), b"".join(entries))
