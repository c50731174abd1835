"""Which decoder a request's content type asks for."""

from collections.abc import Callable, Mapping
from typing import Final

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding.cloud_events import (
    batched_events,
    binary_event,
    is_binary_mode,
    structured_event,
)
from kpl_integrations.ingest.decoding.decoded import Decoded, DecodeLimits, DecodeRefusal
from kpl_integrations.ingest.decoding.json_records import (
    json_body,
    ndjson_body,
    plain_json,
    plain_ndjson,
    require_count,
)
from kpl_integrations.ingest.decoding.json_text import printable
from kpl_integrations.ingest.decoding.partition_keys import NeighbourKeys, random_partition_key
from kpl_integrations.ingest.decoding.raw_bytes import octet_stream_body
from kpl_integrations.ingest.decoding.wire_record import PlainRecord, plain_pairs

__all__ = ["CONTENT_TYPES", "decode", "decode_plain"]

_Decoder = Callable[[bytes, DecodeLimits, NeighbourKeys], Decoded]

_BY_MEDIA_TYPE: Final[dict[str, _Decoder]] = {
    "application/json": json_body,
    "application/x-ndjson": ndjson_body,
    "application/cloudevents+json": structured_event,
    "application/cloudevents-batch+json": batched_events,
}
_PLAIN: Final[dict[str, Callable[[bytes], list[PlainRecord] | None]]] = {
    "application/json": plain_json,
    "application/x-ndjson": plain_ndjson,
}
_OCTET_STREAM: Final = "application/octet-stream"
_UTF_8: Final = frozenset({"utf-8", "utf8", "us-ascii"})

# What a request may be, for OpenAPI and for refusals.
CONTENT_TYPES: Final = (*_BY_MEDIA_TYPE, _OCTET_STREAM)


def decode_plain(content_type: str, body: bytes, limits: DecodeLimits) -> list[tuple[str, bytes]] | None:
    """Return the pairs of partition key and data of a request that holds nothing else, as nearly all do.

    None: it holds more, or something is wrong with it, or it is large; `decode` tells, with `is_plain` False.

    Raises:
        DecodeRefusal: it has no records, or too many.
    """
    decoder = _PLAIN.get(content_type)
    # A body that is no larger than a record may be has none that is.
    if decoder is None or len(body) > limits.max_record_bytes:
        return None
    plain = decoder(body)
    if plain is None:
        return None
    require_count(len(plain), limits)
    return plain_pairs(plain)


def decode(
    content_type: str,
    body: bytes,
    *,
    limits: DecodeLimits,
    headers: Mapping[str, str],
    new_key: Callable[[], str] = random_partition_key,
    is_plain: bool = True,
) -> Decoded:
    """Return the user records of a request's body, inflated already.

    `headers` are by lower-case name, their values decoded as Latin-1. Records without a partition key get
    one of `new_key`, which up to 100 neighbours in a request share. `is_plain` False: `decode_plain` was asked.

    Raises:
        DecodeRefusal: the request as a whole is of another type, no text of its type, empty or too large.
    """
    keys = NeighbourKeys(new_key)
    if is_binary_mode(content_type, headers):
        return binary_event(content_type, body, limits, headers, keys)
    # A lookup for the one spelling nearly all clients use.
    if content_type in _BY_MEDIA_TYPE:
        return _decoded(content_type, body, limits, keys, is_plain=is_plain)
    media_type, _, parameters = content_type.partition(";")
    media_type = media_type.strip().lower()
    if media_type == _OCTET_STREAM:
        return octet_stream_body(body, limits, headers, keys)
    if media_type not in _BY_MEDIA_TYPE:
        detail = f"Content-Type is {printable(content_type)!r}; send one of {', '.join(CONTENT_TYPES)}"
        raise DecodeRefusal(415, "unsupported-media-type", detail)
    _require_charset(parameters)
    return _decoded(media_type, body, limits, keys, is_plain=is_plain)


def _decoded(media_type: str, body: bytes, limits: DecodeLimits, keys: NeighbourKeys, *, is_plain: bool) -> Decoded:
    pairs = decode_plain(media_type, body, limits) if is_plain else None
    if pairs is not None:
        return Decoded([UserRecord(key, data) for key, data in pairs], [])
    return _BY_MEDIA_TYPE[media_type](body, limits, keys)


def _require_charset(parameters: str) -> None:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in _UTF_8:
            detail = f"the charset is {printable(value.strip())!r}; send JSON as UTF-8"
            raise DecodeRefusal(415, "unsupported-media-type", detail)
