"""The head of an HTTP/2 request as ASGI has it (RFC 9113, section 8.3)."""

from urllib.parse import unquote

import httptools

from kpl_integrations.asgi.protocol import Receive, Scope, Send

Fields = list[tuple[bytes, bytes]]


def scope_of(headers: Fields, root_path: str) -> Scope:
    """Return what the scope of one request has besides that of its connection.

    Raises:
        ValueError: its target is not a path.
    """
    fields = dict(headers)
    target = fields.get(b":path", b"")
    if not target.startswith(b"/") and target != b"*":
        message = "the target is not a path"
        raise ValueError(message)
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError as error:
        raise ValueError(str(error)) from None
    path = url.path.decode("ascii")
    return {
        "http_version": "2",
        "method": fields[b":method"].decode("ascii"),
        "path": root_path + (unquote(path) if "%" in path else path),
        "raw_path": root_path.encode("ascii") + url.path,
        "query_string": url.query or b"",
        "headers": _as_in_http_1(headers, fields),
    }


def has_missing_body(fields: dict[bytes, bytes]) -> bool:
    """Return True if a request without a body has a Content-Length that says otherwise (RFC 9113, section 8.1.1)."""
    return fields.get(b"content-length", b"0").strip(b"0") != b""


def _as_in_http_1(headers: Fields, fields: dict[bytes, bytes]) -> Fields:
    """Return the fields with Host and one Cookie (RFC 9113, sections 8.2.3 and 8.3.1)."""
    found = [field for field in headers if not field[0].startswith(b":") and field[0] != b"cookie"]
    if b"host" not in fields and b":authority" in fields:
        found.insert(0, (b"host", fields[b":authority"]))
    if b"cookie" in fields:
        found.append((b"cookie", b"; ".join([value for name, value in headers if name == b"cookie"])))
    return found


async def bad_target(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer 400: the target of the request is not a path."""
    body = b"the target of the request is not a path"
    fields = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": fields})
    await send({"type": "http.response.body", "body": body})
