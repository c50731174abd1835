"""Choose the decoder of a request by its content type, after a look at the size of its body."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding.cloud_events import (
    batched_events,
    binary_event,
    is_binary_mode,
    structured_event,
)
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
from kpl_integrations.ingest.decoding.inflate import declares_more, inflate
from kpl_integrations.ingest.decoding.json_records import (
    json_body,
    ndjson_body,
    pairs_of_json,
    pairs_of_ndjson,
    require_count,
)
from kpl_integrations.ingest.decoding.json_text import printable, require_content
from kpl_integrations.ingest.decoding.record_counts import aggregate_counts

_Decoder = Callable[[bytes, DecodeLimits, NeighbourKeys], Decoded]

_BY_MEDIA_TYPE: Final[dict[str, _Decoder]] = {
    "application/json": json_body,
    "application/x-ndjson": ndjson_body,
    "application/cloudevents+json": structured_event,
    "application/cloudevents-batch+json": batched_events,
}
# What the body of a request is, where it must not be empty. NDJSON has no records then.
_EXPECTED: Final = {
    "application/json": 'one record, or many as {"records": [...]}, in JSON',
    "application/cloudevents+json": "a CloudEvent in JSON",
    "application/cloudevents-batch+json": "an array of CloudEvents in JSON",
}
_PLAIN: Final[dict[str, Callable[[bytes, DecodeLimits, NeighbourKeys | None], Pairs | None]]] = {
    "application/json": pairs_of_json,
    "application/x-ndjson": pairs_of_ndjson,
}
# Each record has a key of its own, so requests can share this object.
_KEYS_OF_SINGLES: Final = NeighbourKeys(random_partition_key, records_per_key=1)
_OCTET_STREAM: Final = "application/octet-stream"
_KEY_HEADER: Final = "x-partition-key"
_HASH_KEY_HEADER: Final = "x-explicit-hash-key"
_UTF_8: Final = frozenset({"utf-8", "utf8", "us-ascii"})

# A body up to this size is decoded at once, unless it has many records.
SMALL_BYTES: Final = 131_072
_FEW_RECORDS_BYTES: Final = 32_768
_MOST_SMALL_RECORDS: Final = 1_000

# The accepted content types, for OpenAPI and for error messages.
CONTENT_TYPES: Final = (*_BY_MEDIA_TYPE, _OCTET_STREAM)


def small_body(content_encoding: bytes | None, body: bytes, max_inflated_bytes: int) -> bytes | None:
    """Return a body, decompressed, if it can be decoded at once; None if it is large.

    Raises:
        DecodeRefusal: it cannot be decompressed.
    """
    if len(body) > SMALL_BYTES:
        return None
    if content_encoding is not None:
        most, encoding = min(SMALL_BYTES, max_inflated_bytes), content_encoding.decode("latin-1")
        if most < max_inflated_bytes and declares_more(encoding, body, most):
            return None
        try:
            body = inflate(encoding, body, max_inflated_bytes=most)
        except DecodeRefusal as refusal:
            if refusal.code == "too-large" and most < max_inflated_bytes:
                return None
            raise
    return None if len(body) > _FEW_RECORDS_BYTES and body.count(b"{") > _MOST_SMALL_RECORDS else body


def decode_plain(
    content_type: str, body: bytes, limits: DecodeLimits, keys: NeighbourKeys | None = None
) -> Pairs | None:
    """Return the pairs of partition key and data of a request whose records are in an ordinary form.

    Records without a partition key get one from `keys`, by default as in `decode`.
    If all records are texts with an explicit hash key, it is the third item of each pair. Returns None if only some
    have one, if the request is invalid, or if it is large. Then call `decode` with `is_plain=False`.

    Raises:
        DecodeRefusal: it has no records or too many.
    """
    decoder = _PLAIN.get(content_type)
    # A body within the size limit of one record cannot contain a record above it. Pairs do not say whether data was an
    # object or opaque bytes, and only an object can carry a trace.
    if decoder is None or len(body) > limits.max_record_bytes or limits.trace_members:
        return None
    pairs = decoder(body, limits, keys)
    if pairs is not None:
        require_count(len(pairs), limits)
    return pairs


def decode_singles(bodies: Sequence[bytes], limits: DecodeLimits) -> Pairs | None:
    """Return the pair of each body as `decode_plain`; None: decode each alone.

    Each body starts with an opening brace, ends with a closing one, has no line break and is within the size limit of
    one record. No text of JSON contains a line break, so no record reaches from one body into the next.
    """
    pairs = pairs_of_ndjson(b"\n".join(bodies), limits, _KEYS_OF_SINGLES)
    return None if pairs is None or len(pairs) != len(bodies) else pairs


def decode(
    content_type: str,
    body: bytes,
    *,
    limits: DecodeLimits,
    headers: Mapping[str, str],
    new_key: Callable[[], str] = random_partition_key,
    is_plain: bool = True,
) -> Decoded:
    """Return the user records of a request's body. The body is already decompressed.

    `headers` has lower-case names and values decoded as Latin-1. Records without a partition key get one from
    `new_key`; up to 100 successive records share it. Pass `is_plain=False` if `decode_plain` returned None.

    Raises:
        DecodeRefusal: the content type is unknown, or the body is malformed, empty or too large.
    """
    keys = NeighbourKeys(new_key)
    if is_binary_mode(content_type, headers):
        return binary_event(content_type, body, limits, headers, keys)
    # Most clients send this exact spelling, so one lookup finds it.
    if content_type in _BY_MEDIA_TYPE:
        return _decoded(content_type, body, limits, keys, is_plain=is_plain)
    media_type = media_type_of(content_type)
    if media_type == _OCTET_STREAM:
        return _octet_stream_body(body, limits, headers, keys)
    return _decoded(media_type, body, limits, keys, is_plain=is_plain)


def media_type_of(content_type: str) -> str:
    """Return the media type of a body whose records are not in the headers.

    Raises:
        DecodeRefusal: it is unknown, or the charset is.
    """
    media_type, _, parameters = content_type.partition(";")
    media_type = media_type.strip().lower()
    if media_type != _OCTET_STREAM and media_type not in _BY_MEDIA_TYPE:
        said = f"Content-Type is {printable(content_type)!r}" if content_type else "there is no Content-Type"
        detail = f"{said}; send one of {', '.join(CONTENT_TYPES)}"
        raise DecodeRefusal(415, "unsupported-media-type", detail)
    if media_type != _OCTET_STREAM:
        _require_charset(parameters)
    return media_type


def _decoded(media_type: str, body: bytes, limits: DecodeLimits, keys: NeighbourKeys, *, is_plain: bool) -> Decoded:
    pairs = decode_plain(media_type, body, limits, keys) if is_plain else None
    if pairs is not None:
        return Decoded([UserRecord(*pair) for pair in pairs], [])
    if media_type in _EXPECTED:
        require_content(body, _EXPECTED[media_type])
    return _BY_MEDIA_TYPE[media_type](body, limits, keys)


def _require_charset(parameters: str) -> None:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in _UTF_8:
            detail = f"the charset is {printable(value.strip())!r}; send JSON as UTF-8"
            raise DecodeRefusal(415, "unsupported-media-type", detail)


def _octet_stream_body(body: bytes, limits: DecodeLimits, headers: Mapping[str, str], keys: NeighbourKeys) -> Decoded:
    """Return the one record of application/octet-stream; `X-Partition-Key` (UTF-8) has its key.

    Raises:
        DecodeRefusal: the header is not UTF-8.
    """
    key = headers.get(_KEY_HEADER)
    try:
        # The server decodes header values as Latin-1, which loses no bytes.
        partition_key = keys.deal() if key is None else key.encode("latin-1").decode()
    except UnicodeError:
        detail = "X-Partition-Key is not UTF-8; encode it as UTF-8"
        raise DecodeRefusal(400, "encoding", detail, index=0, field="X-Partition-Key") from None
    record = UserRecord(partition_key, body, headers.get(_HASH_KEY_HEADER))
    made = checked_record(record, 0, limits, key_field="X-Partition-Key")
    if isinstance(made, RecordProblem):
        return Decoded([], [made])
    return Decoded([made], [], aggregate_counts([made]))
