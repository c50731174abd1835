"""Cross-origin requests (Fetch standard, "CORS protocol"): which web pages may call the gateway from a browser."""

from collections.abc import Iterable
from typing import Final

from kpl_integrations.asgi.protocol import Scope, Send, adding
from kpl_integrations.ingest.http.answers import Headers, send_answer

_ANY: Final = "*"
_METHODS: Final = b"GET, POST"
# Authorization has to be named: "*" does not include it.
_HEADERS: Final = (
    b"authorization, content-type, content-encoding, idempotency-key, x-ack, x-partition-key, x-explicit-hash-key, "
    b"x-amz-date, x-amz-target, x-amz-security-token, x-amz-content-sha256, x-amz-user-agent, amz-sdk-invocation-id, "
    b"amz-sdk-request, traceparent, tracestate, x-request-id"
)
_EXPOSED: Final = b"retry-after, ratelimit, ratelimit-policy, x-amzn-requestid, x-request-id"
_MAX_AGE_SECONDS: Final = b"3600"


def _as_sent(origin: str) -> str:
    """Return an origin as browsers send it: without a slash at the end and without the default port."""
    text = origin.strip().rstrip("/").lower()
    return text.removesuffix(":443" if text.startswith("https:") else ":80" if text.startswith("http:") else "")


class CrossOrigin:
    """The allowed origins; "*" allows every page. Credentials are header fields, never cookies."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(map(_as_sent, origins))

    def allowed(self, headers: Headers) -> bytes | None:
        """Return the origin of a request if it is allowed, None for another one or a request without one."""
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None or not (_ANY in self._origins or origin.decode("latin-1").lower() in self._origins):
            return None
        return origin

    async def answer_preflight(self, scope: Scope, send: Send) -> bool:
        """Answer a CORS preflight request; return False for another request."""
        names = {name for name, _ in scope["headers"]}
        if scope["method"] != "OPTIONS" or not names >= {b"origin", b"access-control-request-method"}:
            return False
        headers = [(b"content-length", b"0"), (b"vary", b"origin")]
        origin = self.allowed(scope["headers"])
        if origin is not None:
            headers += [
                (b"access-control-allow-origin", origin),
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", _HEADERS),
                (b"access-control-max-age", _MAX_AGE_SECONDS),
            ]
        await send_answer(send, 204 if origin is not None else 403, headers, b"")
        return True

    def allowing(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that lets the page read the answer, if its origin is allowed."""
        origin = self.allowed(scope["headers"])
        if origin is None:
            return send
        fields = [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]
        return adding(fields, send)
