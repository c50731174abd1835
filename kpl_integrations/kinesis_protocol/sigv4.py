"""AWS Signature Version 4 for servers: verifies that a request was signed with the secret of its access key.

Source: AWS, "Signature Version 4 signing process" (create a canonical request, a string to sign, the signing
key, the signature). Errors are those of Kinesis, all with status 400. Pure: keys come from a function, time is
an argument.

It is stricter than some services: the signature always covers the actual hash of the body, even if
X-Amz-Content-Sha256 differs, and the headers that decide the request's meaning must be signed (Host, X-Amz-Date,
X-Amz-Target, the session token).
"""

import calendar
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest, digest
from typing import Final, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

from kpl_integrations.kinesis_protocol.requests import RequestRefused

ALLOWED_SKEW_SECONDS: Final = 300
SERVICE: Final = "kinesis"
ALGORITHM: Final = "AWS4-HMAC-SHA256"
_TERMINATOR: Final = "aws4_request"
_SCOPE_PARTS: Final = 5
_TIMESTAMP: Final = re.compile(r"\d{8}T\d{6}Z", re.ASCII)
_TIME_FORMAT: Final = "%Y%m%dT%H%M%SZ"
_PARAMETERS: Final = ("Credential", "Signature", "SignedHeaders")
_HOST: Final = "host"
# What clients that speak HTTP/2 sign in place of Host (RFC 9113, section 8.3.1).
_AUTHORITY: Final = ":authority"
_SIGNED_IF_PRESENT: Final = ("x-amz-target", "x-amz-security-token")
_MAX_AUTHORIZATION_CHARACTERS: Final = 4096

MISSING: Final = "MissingAuthenticationTokenException"
INCOMPLETE: Final = "IncompleteSignatureException"
INVALID: Final = "InvalidSignatureException"
UNKNOWN: Final = "UnrecognizedClientException"
EXPIRED: Final = "ExpiredTokenException"
# All error codes for rejected credentials.
REFUSED_CREDENTIALS: Final = frozenset({MISSING, INCOMPLETE, INVALID, UNKNOWN, EXPIRED})

_WRONG: Final = (
    "The request signature we calculated does not match the signature you provided. Check your AWS Secret Access Key "
    "and signing method. Consult the service documentation for details."
)
_INVALID_TOKEN: Final = "The security token included in the request is invalid."  # noqa: S105 - no token
_EXPIRED_TOKEN: Final = "The security token included in the request is expired"  # noqa: S105


class SigningKey(Protocol):
    """A key pair and its session token."""

    @property
    def secret(self) -> str:
        """The secret access key."""

    @property
    def session_token(self) -> str | None:
        """The session token that requests must carry; None if there is none."""

    @property
    def expires_at(self) -> float | None:
        """The expiration in seconds since 1970; None if the key does not expire."""


_Key = TypeVar("_Key", bound=SigningKey)


class SignedRequest(NamedTuple):
    """A request as received: `path` and `query` as on the wire, `headers` in order with names in lower case.

    `body_hash` is the SHA-256 of the body in hexadecimal, if it is known already.
    """

    method: str
    path: str
    query: str
    headers: Iterable[tuple[str, str]]
    body: bytes
    body_hash: str | None = None

    def __repr__(self) -> str:
        """Leave out the query, the header fields and the body, which contain credentials or data."""
        return f"<SignedRequest {self.method} {self.path}, {len(self.body)} bytes>"


class Credential(NamedTuple):
    """The content of an `Authorization` header: access key, day, region, service and signature."""

    access_key_id: str
    date: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    signature: str

    def __repr__(self) -> str:
        """Leave out the signature."""
        return f"<Credential {self.access_key_id}/{self.date}/{self.region}/{self.service}>"


def named_credential(authorization: str | None) -> Credential:
    """Parse the value of an `Authorization` header without verifying it.

    Raises:
        RequestRefused: the header is missing, incomplete, or names another algorithm.
    """
    if not authorization:
        raise RequestRefused(MISSING, "Missing Authentication Token")
    algorithm, _, rest = authorization[:_MAX_AUTHORIZATION_CHARACTERS].strip().partition(" ")
    if algorithm != ALGORITHM:
        raise RequestRefused(INCOMPLETE, f"The signing algorithm must be {ALGORITHM}.")
    given = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    missing = [name for name in _PARAMETERS if not given.get(name)]
    if missing:
        message = " ".join(f"Authorization header requires '{name}' parameter." for name in missing)
        raise RequestRefused(INCOMPLETE, message)
    scope = given["Credential"].rsplit("/", _SCOPE_PARTS - 1)
    if len(scope) != _SCOPE_PARTS or scope[4] != _TERMINATOR:
        message = (
            f"Credential must have exactly {_SCOPE_PARTS} slash-delimited elements, e.g. keyid/date/region/service/term"
        )
        raise RequestRefused(INCOMPLETE, message)
    access_key_id, date, region, service, _ = scope
    signed_headers = tuple(given["SignedHeaders"].split(";"))
    if len(set(signed_headers)) < len(signed_headers):
        # The canonical request repeats the value of each name.
        raise RequestRefused(INCOMPLETE, "SignedHeaders must name each header once.")
    return Credential(access_key_id, date, region, service, signed_headers, given["Signature"])


def require_signature(
    request: SignedRequest, credential: Credential, key_of: Callable[[str], _Key | None], *, now: float
) -> _Key:
    """Return the key pair that signed `request` within 5 minutes of `now` (seconds since 1970).

    Raises:
        RequestRefused: UnrecognizedClientException for an unknown key id or session token,
            InvalidSignatureException for a wrong secret, a changed request or a skewed clock,
            IncompleteSignatureException for a missing part, ExpiredTokenException for an expired key.
    """
    key = key_of(credential.access_key_id)
    if key is None:
        raise RequestRefused(UNKNOWN, _INVALID_TOKEN)
    headers = _canonical_headers(request.headers)
    headers[_AUTHORITY] = headers.get(_HOST, "")
    _require_scope(credential, headers)
    timestamp = headers.get("x-amz-date", "")
    _require_fresh(timestamp, credential.date, now)
    canonical = _canonical_request(request, credential, headers)
    scope = f"{credential.date}/{credential.region}/{credential.service}/{_TERMINATOR}"
    to_sign = f"{ALGORITHM}\n{timestamp}\n{scope}\n{sha256(canonical.encode('latin-1', 'replace')).hexdigest()}"
    signing_key = _signing_key(key.secret, credential.date, credential.region, credential.service)
    expected = digest(signing_key, to_sign.encode(), "sha256").hex()
    if not compare_digest(expected.encode(), credential.signature.encode("utf-8", "replace")):
        raise RequestRefused(INVALID, _WRONG)
    # After the signature, so that a client without the secret learns nothing about tokens.
    token = headers.get("x-amz-security-token", "")
    if not compare_digest((key.session_token or "").encode(), token.encode("utf-8", "replace")):
        raise RequestRefused(UNKNOWN, _INVALID_TOKEN)
    if key.expires_at is not None and now >= key.expires_at:
        raise RequestRefused(EXPIRED, _EXPIRED_TOKEN)
    return key


def _canonical_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by name in canonical form: values of one name joined by commas, runs of white space collapsed."""
    canonical: dict[str, str] = {}
    for name, value in headers:
        collapsed = _collapsed(value)
        canonical[name] = f"{canonical[name]},{collapsed}" if name in canonical else collapsed
    return canonical


def _collapsed(value: str) -> str:
    """Return a value with one space for each run of white space, which in HTTP is SP and HTAB only."""
    if "\t" in value or "  " in value:
        value = " ".join([part for part in value.replace("\t", " ").split(" ") if part])
    return value.strip(" ")


def _require_scope(credential: Credential, headers: Mapping[str, str]) -> None:
    if credential.service != SERVICE:
        raise RequestRefused(INVALID, f"Credential should be scoped to correct service: '{SERVICE}'.")
    if "x-amz-date" not in headers:
        raise RequestRefused(INCOMPLETE, "Authorization header requires existence of a 'X-Amz-Date' header.")
    host = _AUTHORITY if _AUTHORITY in credential.signed_headers else _HOST
    needed = [host, "x-amz-date", *(name for name in _SIGNED_IF_PRESENT if name in headers)]
    unsigned = [name for name in needed if name not in credential.signed_headers]
    if unsigned:
        names = ", ".join(f"'{name}'" for name in unsigned)
        raise RequestRefused(INVALID, f"{names} must be a 'SignedHeader' in the AWS Authorization.")


def _require_fresh(timestamp: str, date: str, now: float) -> None:
    if _TIMESTAMP.fullmatch(timestamp) is None:
        raise RequestRefused(INCOMPLETE, "Date must be in ISO-8601 'basic format', such as 20130524T000000Z.")
    if timestamp[: len("YYYYMMDD")] != date:
        message = (
            f"Date in Credential scope does not match YYYYMMDD from ISO-8601 version of date from HTTP: {timestamp}."
        )
        raise RequestRefused(INVALID, message)
    try:
        signed_at = calendar.timegm(time.strptime(timestamp, _TIME_FORMAT))
    except ValueError:
        raise RequestRefused(INCOMPLETE, "Date must be a valid instant.") from None
    server_time = _text(now)
    if signed_at < now - ALLOWED_SKEW_SECONDS:
        earliest = _text(now - ALLOWED_SKEW_SECONDS)
        message = f"Signature expired: {timestamp} is now earlier than {earliest} ({server_time} - 5 min.)"
        raise RequestRefused(INVALID, message)
    if signed_at > now + ALLOWED_SKEW_SECONDS:
        latest = _text(now + ALLOWED_SKEW_SECONDS)
        message = f"Signature not yet current: {timestamp} is still later than {latest} ({server_time} + 5 min.)"
        raise RequestRefused(INVALID, message)


def _text(seconds: float) -> str:
    return time.strftime(_TIME_FORMAT, time.gmtime(seconds))


def _canonical_request(request: SignedRequest, credential: Credential, headers: Mapping[str, str]) -> str:
    lines = [f"{name}:{headers.get(name, '')}" for name in credential.signed_headers]
    return "\n".join(
        [
            request.method,
            # The encoded path is encoded again, as by all services except S3.
            quote(request.path or "/", safe="/~"),
            _canonical_query(request.query),
            *lines,
            "",
            ";".join(credential.signed_headers),
            request.body_hash or sha256(request.body).hexdigest(),
        ]
    )


def _canonical_query(query: str) -> str:
    if not query:
        return ""
    pairs = sorted(pair.partition("=")[::2] for pair in query.split("&"))
    return "&".join(f"{name}={value}" for name, value in pairs)


# A signing key is valid for one day and region, so caching it saves four of a request's five HMACs.
@lru_cache(maxsize=4096)
def _signing_key(secret: str, date: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, _TERMINATOR):
        key = digest(key, part.encode(), "sha256")
    return key
