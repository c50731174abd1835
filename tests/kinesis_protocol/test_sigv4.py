"""SigV4 verification; the oracle is botocore, which signs for every AWS client in Python."""

import calendar
from datetime import UTC, datetime
from typing import NamedTuple

import botocore.auth
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, strategies as st

from kpl_integrations.kinesis_protocol.requests import RequestRefused
from kpl_integrations.kinesis_protocol.sigv4 import Credential, SignedRequest, named_credential, require_signature

NOW = float(calendar.timegm((2026, 11, 20, 12, 0, 0)))
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TARGET = {"X-Amz-Target": "Kinesis_20131202.PutRecords", "Content-Type": "application/x-amz-json-1.1"}


class Key(NamedTuple):
    secret: str
    session_token: str | None = None
    expires_at: float | None = None


KEYS = {"AKID": Key(SECRET), "TEMPORARY": Key(SECRET, "the-token", NOW + 60)}


def signed(
    body: bytes = b"{}",
    *,
    key: str = "AKID",
    secret: str = SECRET,
    token: str | None = None,
    at: float = NOW,
    region: str = "eu-west-1",
    service: str = "kinesis",
    url: str = "http://127.0.0.1:8080/",
    headers: dict[str, str] | None = None,
) -> SignedRequest:
    """Return a request that botocore signed at the instant `at`."""
    request = AWSRequest(method="POST", url=url, data=body, headers={**TARGET, **(headers or {})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            botocore.auth, "get_current_datetime", lambda: datetime.fromtimestamp(at, UTC).replace(tzinfo=None)
        )
        SigV4Auth(Credentials(key, secret, token), service, region).add_auth(request)
    names = [("host", "127.0.0.1:8080"), *((name.lower(), str(value)) for name, value in request.headers.items())]
    path, _, query = url.removeprefix("http://127.0.0.1:8080").partition("?")
    return SignedRequest("POST", path, query, names, body)


def outcome(request: SignedRequest, *, now: float = NOW) -> Key | tuple[str, int]:
    """Return the key that signed it, or the code and status of the error."""
    try:
        credential = named_credential(dict(request.headers).get("authorization"))
        return require_signature(request, credential, KEYS.get, now=now)
    except RequestRefused as refused:
        error = refused
    assert SECRET not in str(error)
    return (error.code, error.status)


def changed(request: SignedRequest, name: str, value: str | None) -> SignedRequest:
    others = [(each, text) for each, text in request.headers if each != name]
    return request._replace(headers=others if value is None else [*others, (name, value)])


def test_requests_signed_by_botocore_are_accepted():
    assert outcome(signed()) == KEYS["AKID"]
    assert outcome(signed(key="TEMPORARY", token="the-token")) == KEYS["TEMPORARY"]


@given(
    st.binary(max_size=300),
    st.sampled_from(["us-east-1", "ap-southeast-4", "local"]),
    st.sampled_from(["", "?", "?b=2&a=1", "?a=%20&a=%2F", "?x"]),
    st.dictionaries(
        st.sampled_from(["X-Amz-Meta", "X-Custom", "Accept"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(lambda text: f" {text}  {text} "),
    ),
    st.floats(-299, 299),
)
def test_any_request_signed_by_botocore_is_accepted_and_any_change_is_rejected(body, region, query, headers, skew):
    request = signed(body, region=region, url=f"http://127.0.0.1:8080/{query}", headers=headers, at=NOW + skew)
    assert outcome(request) == KEYS["AKID"]
    assert outcome(request._replace(body=body + b"x")) == ("InvalidSignatureException", 400)
    assert outcome(request._replace(method="PUT")) == ("InvalidSignatureException", 400)
    assert outcome(request._replace(path="/other")) == ("InvalidSignatureException", 400)
    assert outcome(request._replace(query="more=1")) == ("InvalidSignatureException", 400)
    for name in ("host", "x-amz-target", *(name.lower() for name in headers if name != "Accept")):
        assert outcome(changed(request, name, "other")) == ("InvalidSignatureException", 400)


# (fault, request, the service's error code); Kinesis answers all of them with status 400.
REFUSALS: list[tuple[str, SignedRequest, str]] = [
    ("wrong secret", signed(secret="another"), "InvalidSignatureException"),
    ("unknown key", signed(key="UNKNOWN"), "UnrecognizedClientException"),
    ("slow clock", signed(at=NOW - 301), "InvalidSignatureException"),
    ("fast clock", signed(at=NOW + 301), "InvalidSignatureException"),
    ("another service", signed(service="s3"), "InvalidSignatureException"),
    ("required token missing", signed(key="TEMPORARY"), "UnrecognizedClientException"),
    ("wrong token", signed(key="TEMPORARY", token="no"), "UnrecognizedClientException"),
    ("unexpected token", signed(token="no"), "UnrecognizedClientException"),
    ("not signed", changed(signed(), "authorization", None), "MissingAuthenticationTokenException"),
    ("empty", changed(signed(), "authorization", ""), "MissingAuthenticationTokenException"),
    ("another scheme", changed(signed(), "authorization", "Bearer x"), "IncompleteSignatureException"),
    ("incomplete", changed(signed(), "authorization", "AWS4-HMAC-SHA256 Credential=a"), "IncompleteSignatureException"),
    (
        "no scope",
        changed(signed(), "authorization", "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=0"),
        "IncompleteSignatureException",
    ),
    ("no date", changed(signed(), "x-amz-date", None), "IncompleteSignatureException"),
    ("no instant", changed(signed(), "x-amz-date", "20261120T250000Z"), "IncompleteSignatureException"),
    ("another date", changed(signed(), "x-amz-date", "20261121T000000Z"), "InvalidSignatureException"),
    ("not a date", changed(signed(), "x-amz-date", "yesterday"), "IncompleteSignatureException"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "code"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_every_fault_has_the_services_code_and_status(request_, code):
    assert outcome(request_) == (code, 400)


def test_an_expired_key_is_reported_only_to_a_client_with_its_secret():
    request = signed(key="TEMPORARY", token="the-token", at=NOW + 60)
    assert outcome(request, now=NOW + 59.9) == KEYS["TEMPORARY"]
    assert outcome(request, now=NOW + 60) == ("ExpiredTokenException", 400)
    forged = signed(key="TEMPORARY", token="the-token", secret="another", at=NOW + 60)
    assert outcome(forged, now=NOW + 60) == ("InvalidSignatureException", 400)


@pytest.mark.parametrize("between", [" ", "  ", "\t", " \t "])
def test_spaces_and_tabs_fold_in_a_signed_header(between):
    request = signed(headers={"X-Other": "a b"})
    assert outcome(changed(request, "x-other", f"\ta{between}b ")) == KEYS["AKID"]


@pytest.mark.parametrize("between", ["\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", " \xa0 ", ""])
def test_other_white_space_does_not_fold_in_a_signed_header(between):
    request = signed(headers={"X-Other": "a b"})
    assert outcome(changed(request, "x-other", f"a{between}b")) == ("InvalidSignatureException", 400)


def test_headers_that_decide_the_meaning_must_be_signed():
    request = signed()
    authorization = dict(request.headers)["authorization"]
    for name in ("host;", ";x-amz-target", ";x-amz-date"):
        assert name in authorization
        assert outcome(changed(request, "authorization", authorization.replace(name, ""))) == (
            "InvalidSignatureException",
            400,
        )
    assert outcome(changed(request, "x-amz-security-token", "slipped-in")) == ("InvalidSignatureException", 400)


@given(st.text(st.characters(max_codepoint=255), max_size=200), st.text(st.characters(max_codepoint=255), max_size=30))
def test_an_arbitrary_authorization_header_is_rejected_without_a_crash(authorization, date):
    for value in (authorization, f"AWS4-HMAC-SHA256 Credential=AKID/20261120/r/kinesis/aws4_request, {authorization}"):
        assert isinstance(outcome(changed(changed(signed(), "authorization", value), "x-amz-date", date)), tuple)


def test_the_reprs_of_a_request_and_its_credential_can_be_logged():
    request = SignedRequest("POST", "/a", "X-Amz-Signature=q-secret", [("authorization", "h-secret")], b"b-secret")
    assert repr(request) == "<SignedRequest POST /a, 8 bytes>"
    credential = Credential("AKID", "20261120", "eu-central-1", "kinesis", ("host",), "s-secret")
    assert repr(credential) == "<Credential AKID/20261120/eu-central-1/kinesis>"
