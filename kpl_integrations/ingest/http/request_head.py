"""The head of a request: which heads are refused, header fields by name, and the options `ack` and `partial`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

import httptools
import msgspec

from kpl_integrations.asgi.protocol import Scope
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.http.correlation import CORRELATING, Correlation
from kpl_integrations.ingest.tenants import ACKS, Ack, Tenant

# The path of a stream's records.
PREFIX: Final = "/v1/streams/"
SUFFIX: Final = "/records"
_PREFIX: Final = PREFIX.encode()
_SUFFIX: Final = SUFFIX.encode()
_LONGEST_TARGET: Final = 512
# A target with one of these needs a parser.
_NOT_PLAIN: Final = (b"%", b"#")
ACK_HEADER: Final = b"x-ack"
FORWARDED_FOR: Final = b"x-forwarded-for"
# The ASGI extension of the gateway's own server; its one member is a `Server`.
SERVER: Final = "kpl_integrations.server"
# Content types for which no other header field is read, in the spelling of nearly all clients.
PLAIN_CONTENT_TYPES: Final = frozenset({"application/json", "application/x-ndjson"})
_PLAIN_TYPES: Final = {name.encode(): name for name in PLAIN_CONTENT_TYPES}
# The fields that the gateway reads and that are not lists; attributes of CloudEvents belong to them too.
_ONCE: Final = frozenset(
    {
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"x-ack",
        b"x-amz-date",
        b"x-amz-security-token",
        b"x-amz-target",
        b"x-explicit-hash-key",
        b"x-partition-key",
    }
)
_ATTRIBUTE: Final = b"ce-"
_VERSIONS: Final = ("1.1", "1.0")
_LONGEST_NAME: Final = 100
_FLAGS: Final = {"true": True, "1": True, "": True, "false": False, "0": False}
_MOST_PARAMETERS: Final = 8
_MOST_QUERY_BYTES: Final = 256

FieldsByName = Mapping[bytes, bytes]


class RequestOptions(NamedTuple):
    """`ack` None: the tenant's default. `partial`: accept the valid records and name the others."""

    ack: Ack | None = None
    partial: bool = False


_NO_OPTIONS: Final = RequestOptions()
_NO_TEXTS: Final[Mapping[str, str]] = {}
_UNCORRELATED: Final = [None] * len(CORRELATING)


class Server(NamedTuple):
    """What the gateway's own server does for one request.

    `claim` notes the tenant of the request (None: its credentials are not verified), and returns False if the tenant
    has used more than its share of CPU time and the request cannot wait. `verified` keeps the connection. `watch_body`
    keeps pauses of reading out of the time limit of the body. `whole_body` returns the body if all of it has arrived,
    else None.
    """

    claim: Callable[[Tenant | None], bool]
    verified: Callable[[], object]
    watch_body: Callable[[Any], Callable[[], object]]
    whole_body: Callable[[], bytes | None]


def server_of(scope: Scope) -> Server | None:
    """Return what the gateway's own server does for this request; None: another server received it."""
    extensions = scope.get("extensions")
    return extensions[SERVER]["request"] if extensions is not None and SERVER in extensions else None


def target_of(url: bytes, root_path: str) -> Scope:
    """Return what a scope has of a request's target.

    Raises:
        ValueError: it is not a URL.
    """
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError as error:
        raise ValueError(str(error)) from None
    path = parsed.path.decode("ascii")
    return {
        "path": root_path + (unquote(path) if "%" in path else path),
        "raw_path": root_path.encode("ascii") + parsed.path,
        "query_string": parsed.query or b"",
    }


def _address(transport: asyncio.Transport, end: str) -> tuple[str, int] | None:
    """Return host and port of the "peername" or the "sockname" of a connection; None without them."""
    found = transport.get_extra_info(end)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple | list) else None


def connection_scope(transport: asyncio.Transport, root_path: str) -> Scope:
    """Return what the scopes of all requests of a connection have, besides a copy of the server's state."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "server": _address(transport, "sockname"),
        "client": _address(transport, "peername"),
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "root_path": root_path,
    }


def head_without(
    left_out: bytes, parser: httptools.HttpRequestParser, url: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> bytes:
    """Return the bytes of the head that this parser has read, without one field."""
    fields = [b"%b: %b\r\n" % field for field in headers if field[0] != left_out]
    version = parser.get_http_version().encode()
    return b"%b %b HTTP/%b\r\n%b\r\n" % (parser.get_method(), url, version, b"".join(fields))


def refused_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    """Return why the server refuses a request because of its head, else None.

    505: it is neither HTTP/1.0 nor HTTP/1.1. HTTP/0.9 has no header fields. 400: HTTP/1.1 without Host, or several
    Host fields (RFC 9112, section 3.2). Health checks of load balancers send HTTP/1.0 without Host. 501: a transfer
    coding other than chunked (RFC 9112, section 6.1).
    """
    if version not in _VERSIONS:
        return Refusal.HTTP_VERSION
    hosts = 0
    codings: list[bytes] = []
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings.append(value.strip(b" \t").lower())
    if hosts > 1 or (not hosts and version == "1.1"):
        return Refusal.BAD_HTTP
    return Refusal.TRANSFER_CODING if codings and codings != [b"chunked"] else None


class RecordsHead(msgspec.Struct, frozen=True, gc=False):
    """The head of a request for records. It depends neither on the tenant nor on the body.

    `headers` and `texts` may be those of an earlier request on the connection, which had other credentials and another
    id and trace (`fast_path/head_cache.py`). So read `authorization` and `correlation`.
    """

    stream: str
    query: bytes
    authorization: str | None
    # One of `PLAIN_CONTENT_TYPES` if no other field determines the format of the decompressed body, else None.
    plain_type: str | None
    # The content type, and the fields as texts, unless it is plain.
    content_type: str
    texts: Mapping[str, str]
    # None: they are invalid, and `options_of` says why.
    options: RequestOptions | None
    headers: FieldsByName
    # None: the request has none of its fields.
    correlation: Correlation | None = None

    def __repr__(self) -> str:
        """Leave out the credentials."""
        return f"<RecordsHead of {self.stream!r}>"


def header_fields(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the fields by name (lower case, as the server passes them).

    Repeated fields are joined to one list (RFC 9110, section 5.3). A field that is not a list must not be
    repeated with another value: a proxy in front may have used the other one.

    Raises:
        Refused: a field that is not a list has two values.
    """
    fields = dict(headers)
    return fields if len(fields) == len(headers) else _joined(headers)


def _joined(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    fields: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values = fields.setdefault(name, [])
        if not values or (name not in _ONCE and not name.startswith(_ATTRIBUTE)):
            values.append(value)
        elif value != values[0]:
            # A name is a token and safe in a log line. The values may be secrets, so they are not repeated.
            printed = name.decode("latin-1")[:_LONGEST_NAME]
            detail = f"the header field {printed} is repeated with different values; send it once"
            raise Refused(Refusal.BAD_PARAMETER, detail, extensions={"field": printed})
    return {name: b", ".join(values) for name, values in fields.items()}


def authorization_of(headers: FieldsByName) -> str | None:
    """Return the value of Authorization, None without one."""
    value = headers.get(b"authorization")
    return None if value is None else value.decode("latin-1")


def correlation_of(headers: FieldsByName) -> Correlation | None:
    """Return the fields that name a request elsewhere; None without any of them."""
    values = [headers.get(name) for name in CORRELATING]
    return None if values == _UNCORRELATED else Correlation(*values)


def records_head(stream: str, query: bytes, headers: FieldsByName) -> RecordsHead:
    """Return the parsed head of a request for records."""
    plain_type = None if b"ce-specversion" in headers else _PLAIN_TYPES.get(headers.get(b"content-type", b""))
    texts = _NO_TEXTS
    if plain_type is None:
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
    try:
        options = _options(query, headers.get(ACK_HEADER))
    except Refused:
        options = None
    return RecordsHead(
        stream=stream,
        query=query,
        authorization=authorization_of(headers),
        plain_type=plain_type,
        content_type=plain_type or texts.get("content-type", ""),
        texts=texts,
        options=options,
        headers=headers,
        correlation=correlation_of(headers),
    )


def records_head_of(target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> RecordsHead | None:
    """Return the parsed head of a request for records in its plain form, else None: the application handles it."""
    place = _place(target) if len(target) <= _LONGEST_TARGET else None
    if place is None:
        return None
    fields = dict(headers)
    return records_head(*place, fields) if len(fields) == len(headers) else None


@lru_cache(maxsize=1_024)
def _place(target: bytes) -> tuple[str, bytes] | None:
    """Return the stream and the query of a target in its plain form, without percent-encoding."""
    path, _, query = target.partition(b"?")
    if not (path.startswith(_PREFIX) and path.endswith(_SUFFIX) and path.isascii()):
        return None
    if len(path) <= len(_PREFIX) + len(_SUFFIX) or any(part in target for part in _NOT_PLAIN):
        return None
    return path[len(_PREFIX) : -len(_SUFFIX)].decode(), query


def options_of(head: RecordsHead) -> RequestOptions:
    """Return the options of a request for records.

    Raises:
        Refused: the query or X-Ack is invalid.
    """
    return _options(head.query, head.headers.get(ACK_HEADER))


def _options(query: bytes, ack: bytes | None) -> RequestOptions:
    if not query and ack is None:
        return _NO_OPTIONS
    if len(query) + len(ack or b"") > _MOST_QUERY_BYTES:
        detail = f"query and X-Ack have more than {_MOST_QUERY_BYTES} bytes; they may contain ack and partial"
        raise Refused(Refusal.BAD_PARAMETER, detail)
    return request_options(query, ack)


@lru_cache(maxsize=256)
def request_options(query: bytes, ack_header: bytes | None) -> RequestOptions:
    """Return the options; the query has precedence over the header.

    Raises:
        Refused: a parameter is unknown or has an invalid value.
    """
    ack: str | None = None if ack_header is None else ack_header.decode("latin-1").strip().lower()
    field, partial = "X-Ack", False
    try:
        parameters = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)
    except ValueError:
        detail = "the query cannot be parsed; it may contain ack and partial"
        raise Refused(Refusal.BAD_PARAMETER, detail) from None
    for name, value in parameters:
        if name == "ack":
            ack, field = value, "ack"
        elif name == "partial" and value.lower() in _FLAGS:
            partial = _FLAGS[value.lower()]
        elif name == "partial":
            raise _invalid(name, "true or false")
        else:
            detail = "the query has an unknown parameter; it may contain ack and partial"
            raise Refused(Refusal.BAD_PARAMETER, detail)
    if ack is not None and ack not in ACKS:
        raise _invalid(field, ", ".join(ACKS))
    return RequestOptions(ack, partial)


def _invalid(field: str, allowed: str) -> Refused:
    # The value is not repeated, because it may be a secret.
    return Refused(Refusal.BAD_PARAMETER, f"{field} must be one of {allowed}", extensions={"field": field})
