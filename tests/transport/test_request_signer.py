import time
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import botocore.auth
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import HealthCheck, given, settings, strategies as st

from kpl_core.transport import request_signer
from kpl_core.transport.request_signer import RequestSigner

NOON = datetime(2026, 2, 28, 12, tzinfo=UTC)
JSON = "application/x-amz-json-1.1"
KEYS = ReadOnlyCredentials("AKIA", "secret", None)
URL = urlsplit("https://kinesis.us-east-1.amazonaws.com")
texts = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs", "Cc", "Zl", "Zp"]))
regions = st.sampled_from(["us-east-1", "eu-central-1", "cn-north-1", "us-gov-west-1", "us-iso-east-1"])
hosts = st.sampled_from(
    [
        "kinesis.{}.amazonaws.com",
        "kinesis-fips.{}.amazonaws.com",
        "kinesis.{}.api.aws",
        "kinesis-fips.{}.api.aws",
        "123456789012.data-kinesis.{}.amazonaws.com",
        "user:password@localhost:4567",
        "[::1]:443",
        "localhost:80",
    ]
)
paths = st.sampled_from(["", "/", "/path", "/a//b/../c/./d", "/a%20b/~c", "/ä/=", "/a+b:c*"])
bodies = st.binary(max_size=200)


class Clock:
    """The clock of the signer and of botocore."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = NOON
        monkeypatch.setattr(time, "time", self.read)
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: self.now)

    def read(self) -> float:
        return self.now.timestamp()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def times_asked(monkeypatch):
    """The times at which botocore signed a request for the signer."""
    times: list[str] = []

    class Counted(SigV4Auth):
        def add_auth(self, request: AWSRequest) -> None:
            super().add_auth(request)
            times.append(request.context["timestamp"])

    monkeypatch.setattr(request_signer, "SigV4Auth", Counted)
    return times


def by_botocore(url: str, region: str, agent: str, body: bytes, keys: ReadOnlyCredentials) -> str:
    """Return the head that botocore signs."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].removesuffix(":443" if parts.scheme == "https" else ":80")
    headers = {
        "Host": host,
        "X-Amz-Target": "Kinesis_20131202.PutRecords",
        "Content-Type": JSON,
        "User-Agent": agent,
    }
    request = AWSRequest("POST", f"{parts.scheme}://{host}{parts.path or '/'}", headers, body)
    SigV4Auth(keys, "kinesis", region).add_auth(request)
    lines = [f"{name}: {value}\r\n" for name, value in request.headers.items()]
    return f"POST {parts.path or '/'} HTTP/1.1\r\n{''.join(lines)}"


def signed(signer: RequestSigner, body: bytes = b"{}", keys: Any = KEYS, **changed: Any) -> str:
    return signer.signed_head(
        **{"url": URL, "operation": "PutRecords", "content_type": JSON} | changed, body=body, credentials=keys
    )


@given(
    place=st.tuples(st.sampled_from(["http", "https"]), hosts, paths, regions),
    agent=texts,
    key=st.tuples(texts, texts, st.none() | texts),
    first=bodies,
    second=bodies,
    seconds=st.integers(0, 43_199),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_every_signature_is_botocores(clock, place, agent, key, first, second, seconds):
    scheme, host, path, region = place
    url = f"{scheme}://{host.format(region)}{path}"
    keys = ReadOnlyCredentials(*key)
    signer = RequestSigner(region, agent)
    clock.now = NOON
    assert signed(signer, first, keys, url=urlsplit(url)) == by_botocore(url, region, agent, first, keys)
    clock.now = NOON + timedelta(seconds=seconds)
    assert signed(signer, second, keys, url=urlsplit(url)) == by_botocore(url, region, agent, second, keys)


def test_botocore_signs_the_first_request_of_each_operation_day_and_key(clock, times_asked):
    signer = RequestSigner("us-east-1", "agent")
    renewed = ReadOnlyCredentials("AKIA", "secret", "token")
    calls: list[tuple[timedelta, dict[str, Any], bool]] = [
        (timedelta(), {}, True),
        (timedelta(seconds=1), {}, False),
        (timedelta(seconds=1), {"operation": "ListShards"}, True),
        (timedelta(seconds=2), {"url": urlsplit("https://123456789012.data-kinesis.us-east-1.amazonaws.com")}, True),
        (timedelta(hours=11), {"keys": renewed}, True),
        (timedelta(hours=11), {"keys": renewed}, False),
        (timedelta(hours=12), {"keys": renewed}, True),
        (timedelta(hours=13), {"keys": renewed}, False),
        (timedelta(hours=11), {"keys": renewed}, True),  # a clock that was set back
    ]
    for after, changed, is_asked in calls:
        clock.now = NOON + after
        times_asked.clear()
        signed(signer, **changed)
        assert bool(times_asked) is is_asked, (after, changed)


def test_botocore_signs_every_request_if_it_adds_a_field_that_depends_on_the_body(clock, monkeypatch):
    before = SigV4Auth._modify_request_before_signing  # type: ignore[attr-defined] # noqa: SLF001 - botocore's

    def with_body_hash(self: SigV4Auth, request: AWSRequest) -> None:
        before(self, request)
        request.headers["X-Amz-Content-SHA256"] = self.payload(request)

    monkeypatch.setattr(SigV4Auth, "_modify_request_before_signing", with_body_hash)
    signer = RequestSigner("us-east-1", "agent")
    for body in (b"1", b"2"):
        assert signed(signer, body) == by_botocore(URL.geturl(), "us-east-1", "agent", body, KEYS)


def test_botocore_signs_every_request_if_its_rules_have_changed(clock, monkeypatch):
    rule = SigV4Auth.signature
    monkeypatch.setattr(SigV4Auth, "signature", lambda *args: rule(*args)[::-1])
    signer = RequestSigner("us-east-1", "agent")
    for body in (b"1", b"2"):
        assert signed(signer, body) == by_botocore(URL.geturl(), "us-east-1", "agent", body, KEYS)
