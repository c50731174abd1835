"""Which decoder a request's content type asks for."""

from collections.abc import Callable, Mapping
from typing import Final

from kpl_integrations.ingest.decoding.cloud_events import (
    batched_events,
    binary_event,
    is_binary_mode,
    structured_event,
)
from kpl_integrations.ingest.decoding.decoded import Decoded, DecodeLimits, DecodeRefusal
from kpl_integrations.ingest.decoding.json_records import json_body, ndjson_body
from kpl_integrations.ingest.decoding.json_text import printable
from kpl_integrations.ingest.decoding.partition_keys import NeighbourKeys, random_partition_key
from kpl_integrations.ingest.decoding.raw_bytes import octet_stream_body

__all__ = ["CONTENT_TYPES", "decode"]

_Decoder = Callable[[bytes, DecodeLimits, NeighbourKeys], Decoded]

_BY_MEDIA_TYPE: Final[dict[str, _Decoder]] = {
    "application/json": json_body,
    "application/x-ndjson": ndjson_body,
    "application/cloudevents+json": structured_event,
    "application/cloudevents-batch+json": batched_events,
}
_OCTET_STREAM: Final = "application/octet-stream"
_UTF_8: Final = frozenset({"utf-8", "utf8", "us-ascii"})

# What a request may be, for OpenAPI and for refusals.
CONTENT_TYPES: Final = (*_BY_MEDIA_TYPE, _OCTET_STREAM)


def decode(
    content_type: str,
    body: bytes,
    *,
    limits: DecodeLimits,
    headers: Mapping[str, str],
    new_key: Callable[[], str] = random_partition_key,
) -> Decoded:
    """Return the user records of a request's body, inflated already.

    `headers` are by lower-case name, their values decoded as Latin-1. Records without a partition key get
    one of `new_key`, which up to 100 neighbours in a request share.

    Raises:
        DecodeRefusal: the request as a whole is of another type, no text of its type, empty or too large.
    """
    keys = NeighbourKeys(new_key)
    if is_binary_mode(content_type, headers):
        return binary_event(content_type, body, limits, headers, keys)
    # A lookup for the one spelling nearly all clients use.
    decoder = _BY_MEDIA_TYPE.get(content_type)
    if decoder is not None:
        return decoder(body, limits, keys)
    media_type, _, parameters = content_type.partition(";")
    media_type = media_type.strip().lower()
    if media_type == _OCTET_STREAM:
        return octet_stream_body(body, limits, headers, keys)
    decoder = _BY_MEDIA_TYPE.get(media_type)
    if decoder is None:
        detail = f"Content-Type is {printable(content_type)!r}; send one of {', '.join(CONTENT_TYPES)}"
        raise DecodeRefusal(415, "unsupported-media-type", detail)
    _require_charset(parameters)
    return decoder(body, limits, keys)


def _require_charset(parameters: str) -> None:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in _UTF_8:
            detail = f"the charset is {printable(value.strip())!r}; send JSON as UTF-8"
            raise DecodeRefusal(415, "unsupported-media-type", detail)
