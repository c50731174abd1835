"""The transport without botocore's client: when it is used, what it sends, and the answers that it understands."""

import asyncio
import gzip
import re
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import CredentialRetrievalError
from botocore.session import Session
from msgspec.structs import replace

from benchmarks.sink_process import make_certificate
from kpl_core import Config, Producer
from kpl_core.transport import PutRecordsEntry, RequestFailure, put_records_wire
from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport
from kpl_core.transport.default_transport import default_transport
from kpl_core.transport.direct_transport import DirectTransport, Resolved, resolved
from kpl_core.version import producer_version
from kpl_integrations.kinesis_protocol.sigv4 import SignedRequest, named_credential, require_signature
from kpl_integrations.local_kinesis import LocalKinesis
from tests.transport.test_aiobotocore_transport import THREE, config, request_of

ANSWER = b'{"Records":[{"SequenceNumber":"1","ShardId":"a"}]}'
# Without the time, which would be in the names of the tests: all workers must collect the same.
PACKED = gzip.compress(ANSWER, mtime=0)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
STORED = [PutRecordsEntry("1", "a")]


def framed(body: bytes, coding: str = "identity") -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (coding.encode(), len(body)) + body
    )


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# When it is used


@pytest.mark.anyio
async def test_it_is_used_unless_a_session_is_given():
    assert isinstance(await default_transport(Config()), DirectTransport)
    chosen = await default_transport(Config(), AiobotocoreTransport(Config())._session)  # noqa: SLF001
    assert isinstance(chosen, AiobotocoreTransport)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, {"wire_path": "stock"}),
        ({}, {"botocore": {"user_agent_extra": "mine"}}),
        ({}, {"aws_access_key_id": "only the key"}),
        ({"AWS_DEFAULT_REGION": "no region at all"}, {}),
        ({}, {"region": "fips-us-east-1"}),
        ({"REQUESTS_CA_BUNDLE": "/no/such/bundle.pem"}, {}),
        ({}, {"verify_ssl": "/no/such/bundle.pem"}),
        ({"AWS_ACCESS_KEY_ID": ""}, {}),
        ({"AWS_DEFAULT_REGION": ""}, {}),
        ({"AWS_PROFILE": "unknown"}, {}),
        ({"AWS_USE_FIPS_ENDPOINT": "true"}, {"endpoint_url": "http://127.0.0.1:1"}),
        ({"AWS_USE_DUALSTACK_ENDPOINT": "true", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, {}),
        ({"AWS_ENDPOINT_URL_KINESIS": "no URL"}, {}),
        ({"AWS_CSM_ENABLED": "true"}, {}),
        ({"HTTPS_PROXY": "https://127.0.0.1:1"}, {}),
    ],
)
def test_botocores_client_is_used_for_what_only_it_understands(environment, options, monkeypatch):
    # Else it comes before REQUESTS_CA_BUNDLE.
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    assert not isinstance(resolved(Config()), str)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert isinstance(resolved(Config(**options)), str)


def test_why_the_resolvers_failed_is_logged_with_the_traceback(caplog, monkeypatch):
    caplog.set_level("DEBUG", logger="kpl_core")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "no region at all")
    assert resolved(Config()) == "AWS' configuration cannot be read (InvalidRegionError)"
    (record,) = [record for record in caplog.records if "its resolvers failed" in record.message]
    assert record.exc_info is not None
    assert "no region at all" in str(record.exc_info[1])


def test_a_profile_with_settings_of_the_client_is_left_to_it(monkeypatch, tmp_path):
    profiles = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profiles))
    profiles.write_text("[default]\nkinesis =\n  signature_version = v4\n")
    assert resolved(Config()) == "AWS' configuration has options of clients"
    profiles.write_text("[default]\nregion = eu-west-1\n")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    found = resolved(Config())
    assert not isinstance(found, str)
    assert found.region == "eu-west-1"


def test_a_proxy_does_not_count_for_an_address_of_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert not isinstance(resolved(config("http://127.0.0.1:4567")), str)
    assert resolved(config("http://kinesis.example")) == "a proxy is configured that is not an HTTP proxy for https"
    monkeypatch.setenv("no_proxy", "kinesis.example")
    assert not isinstance(resolved(config("http://kinesis.example")), str)


@pytest.mark.parametrize(
    ("region", "operation", "account", "host"),
    [
        ("eu-central-1", "PutRecords", None, "kinesis.eu-central-1.amazonaws.com"),
        ("cn-north-1", "ListShards", None, "kinesis.cn-north-1.amazonaws.com.cn"),
        ("us-east-1", "PutRecords", "123456789012", "123456789012.data-kinesis.us-east-1.amazonaws.com"),
        ("us-east-1", "ListShards", "123456789012", "123456789012.control-kinesis.us-east-1.amazonaws.com"),
    ],
)
def test_the_endpoint_is_the_one_of_botocores_rules(region, operation, account, host):
    found = resolved(Config(region=region))
    assert not isinstance(found, str)
    arn = account and f"arn:aws:kinesis:{region}:{account}:stream/s"
    assert found.endpoint(operation, arn).geturl() == f"https://{host}"


@pytest.mark.parametrize(
    ("environment", "profile", "url"),
    [
        ({"AWS_ENDPOINT_URL_KINESIS": "http://a:1", "AWS_ENDPOINT_URL": "http://b:1"}, "endpoint_url = http://c:1", "http://a:1"),
        ({"AWS_ENDPOINT_URL": "http://b:1"}, "services = mine", "http://b:1"),
        ({}, "endpoint_url = http://c:1\nservices = mine", "http://d:1/path"),
        ({}, "endpoint_url = http://c:1", "http://c:1"),
        ({"AWS_ENDPOINT_URL": "http://b:1", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, "",
         "https://kinesis.eu-west-1.amazonaws.com"),
        ({"AWS_USE_FIPS_ENDPOINT": "true"}, "", "https://kinesis-fips.eu-west-1.amazonaws.com"),
        ({"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "", "https://kinesis.eu-west-1.api.aws"),
        ({}, "use_fips_endpoint = true\nuse_dualstack_endpoint = true", "https://kinesis-fips.eu-west-1.api.aws"),
    ],
)  # fmt: skip
def test_the_endpoint_of_the_environment_or_the_profile_is_the_one_of_botocores_client(
    environment, profile, url, monkeypatch, tmp_path
):
    profiles = tmp_path / "config"
    profiles.write_text(f"[default]\n{profile}\n[services mine]\nkinesis =\n  endpoint_url = http://d:1/path\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profiles))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = resolved(Config())
    assert not isinstance(found, str)
    assert found.endpoint("PutRecords", None).geturl() == url
    client = Session().create_client("kinesis", aws_access_key_id="x", aws_secret_access_key="y")
    assert urlsplit(client.meta.endpoint_url).netloc == urlsplit(url).netloc


def test_the_endpoint_of_the_options_comes_first(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", "http://b:1")
    found = resolved(Config(endpoint_url="http://own:1"))
    assert not isinstance(found, str)
    assert found.endpoint("PutRecords", None).geturl() == "http://own:1"


# What it sends, to a server that answers with given bytes


class Server:
    """Answers each request of its connections with the next of `answers`; notes heads and bodies."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                answer = self.answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if not answer.startswith(b"HTTP/1.1") or not answer.endswith((ANSWER, b"\r\n\r\n")):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def talking_to(
    server: Server,
    tls: ssl.SSLContext | None = None,
    change: Callable[[Resolved], Resolved] = lambda found: found,
    **options: Any,
) -> AsyncIterator[DirectTransport]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    settings = config(f"http{'s' if tls else ''}://127.0.0.1:{port}/path", **options)
    found = resolved(settings)
    assert not isinstance(found, str)
    transport = DirectTransport(settings, change(found))
    async with listening, transport.open():
        yield transport


@pytest.mark.anyio
async def test_a_lack_of_memory_while_a_body_is_built_fails_one_request_of_the_producer(monkeypatch):
    buffer, failures = BytesIO, [MemoryError()]

    def buffer_or_failure() -> Any:
        if failures:
            raise failures.pop()
        return buffer()

    monkeypatch.setattr(put_records_wire, "BytesIO", buffer_or_failure)
    async with LocalKinesis({"orders": 1}) as local, Producer(config(local.endpoint_url)) as orders:
        # Of records so large that each request is written into one block of memory.
        deliveries = await orders.put_many("orders", [("k", bytes(2_000))] * 200)
        report = await orders.flush(30)
        assert (report.delivered, failures, orders.unready()) == (200, [], [])
    messages = {
        each.error_message for delivery in deliveries for each in delivery.result().attempts if not each.success
    }
    # A slow machine may be throttled, too.
    assert {text for text in messages if not str(text).startswith("Rate exceeded")} == {
        "the transport's put_records raised MemoryError()"
    }


@pytest.mark.anyio
async def test_a_request_is_signed_and_names_operation_host_and_token(monkeypatch):
    monkeypatch.setenv("AWS_SDK_UA_APP_ID", "orders")
    server = Server(HEAD + ANSWER)
    keys: dict[str, Any] = {
        "aws_access_key_id": "AKIA",
        "aws_secret_access_key": "secret",
        "aws_session_token": "token",
    }
    async with talking_to(server, **keys) as transport:
        assert await transport.put_records(request_of(*THREE)) == STORED
    ((head, body),) = server.requests
    line, *lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
    names = dict(line.split(": ", 1) for line in lines)
    assert line == "POST /path HTTP/1.1"
    assert names["X-Amz-Target"] == "Kinesis_20131202.PutRecords"
    assert names["Content-Type"] == "application/x-amz-json-1.1"
    assert names["User-Agent"].startswith("Botocore/")
    assert names["User-Agent"].endswith(f" kpl-integrations/{producer_version()} app/orders")
    assert names["Accept-Encoding"] == "identity"
    assert names["Host"].startswith("127.0.0.1:")

    class Key:
        secret, session_token, expires_at = "secret", "token", None

    request = SignedRequest("POST", "/path", "", [(name.lower(), value) for name, value in names.items()], body)
    now = datetime.now(UTC).timestamp()
    require_signature(request, named_credential(names["Authorization"]), lambda _: Key(), now=now)


@pytest.mark.anyio
async def test_one_connection_serves_many_requests_and_a_large_body_arrives_whole():
    server = Server(*[HEAD + ANSWER] * 3)
    big = request_of(*THREE, type(THREE[0])("k", bytes(range(256)) * 4_000))
    async with talking_to(server) as transport:
        for request in (request_of(*THREE), big, request_of(*THREE)):
            assert await transport.put_records(request) == STORED
    assert server.connections == 1
    assert len(server.requests[1][1]) > 1_000_000


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + ANSWER,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\n" + ANSWER[:5] + b"\r\n%x\r\n" % len(ANSWER[5:])
        + ANSWER[5:] + b"\r\n0\r\nTrailer: 1\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + ANSWER,
        framed(PACKED, "gzip"),
        b"HTTP/1.1 200\r\nConnection: close\r\ncontent-LENGTH:%d\r\n\r\n" % len(ANSWER) + ANSWER,
    ],
)  # fmt: skip
async def test_every_framing_of_http_is_understood_and_the_next_request_succeeds(answer):
    server = Server(answer, HEAD + ANSWER)
    async with talking_to(server) as transport:
        assert await transport.put_records(request_of(*THREE)) == STORED
        assert await transport.put_records(request_of(*THREE)) == STORED


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection before its answer was complete"),
        (HEAD + ANSWER[:10], "closed the connection before its answer was complete"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "cannot be parsed.*SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "more than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot hexadecimal\r\n", "cannot be parsed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n", "more than its 2 bytes"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + 3 * (b"X: " + b"x" * 30_000 + b"\r\n"),
            "trailers have more than 65536 bytes",
        ),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "Bad Gateway"),
        (framed(b'{"x":' + b"[" * 200_000), "the answer to put_records cannot be parsed: RecursionError"),
        (framed(b"x", "br"), "the Content-Encoding 'br', which was not asked for"),
        (framed(b"no gzip", "gzip"), "not the gzip that its Content-Encoding says"),
        (framed(PACKED[:-1], "gzip"), "not exactly one complete gzip"),
        (framed(PACKED * 2, "gzip"), "not exactly one complete gzip"),
        (framed(gzip.compress(bytes(17 * 1024 * 1024), mtime=0), "gzip"), "at most 16777216 are allowed"),
    ],
)
async def test_an_answer_that_is_cut_or_not_http_is_a_failure(answer, message):
    server = Server(answer, HEAD + ANSWER)
    async with talking_to(server) as transport:
        failure = await transport.put_records(request_of(*THREE))
        assert isinstance(failure, RequestFailure)
        assert failure.code == ("502" if b"502" in answer[:20] else "Internal")
        assert re.search(message, failure.message)
        assert await transport.put_records(request_of(*THREE)) == STORED


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b'{"__type":"com.amazon#Odd","message":"text"}', "Odd", "text"),
        (b'{"__type":"Odd","message":5}', "Odd", "HTTP status 400"),
        (b'{"__type":["Odd"],"message":{}}', "Internal", "HTTP status 400"),
        (b'{"__type":"Odd","message":"%s"}' % (b"x" * 1_000_000), "Odd", "x" * 2_000),
        (b"[1]", "400", "HTTP status 400"),
        (b'"text"', "400", "HTTP status 400"),
        (b"\xff", "400", "HTTP status 400"),
        (b'{"a":' + b"[" * 100_000, "400", "HTTP status 400"),
    ],
)
async def test_an_error_of_any_form_has_a_code_and_a_message_of_bounded_length(body, code, message):
    answer = b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with talking_to(Server(answer)) as transport:
        assert await transport.put_records(request_of(*THREE)) == RequestFailure(code, message)


@pytest.mark.anyio
async def test_a_connection_that_the_server_has_closed_or_that_was_idle_for_long_is_not_used_again(monkeypatch):
    server = Server(HEAD + ANSWER)
    async with talking_to(server) as transport:
        assert await transport.put_records(request_of(*THREE)) == STORED
        await asyncio.sleep(0.01)
        server.answers = [HEAD + ANSWER] * 2
        assert await transport.put_records(request_of(*THREE)) == STORED
        monkeypatch.setattr("kpl_core.transport.http_connections.IDLE_SECONDS", 0.0)
        assert await transport.put_records(request_of(*THREE)) == STORED
    assert server.connections == 3


@pytest.mark.anyio
async def test_no_more_connections_are_open_than_configured():
    server = Server(*[HEAD + ANSWER] * 20)
    async with talking_to(server, max_connections=2) as transport:
        answers = await asyncio.gather(*[transport.put_records(request_of(*THREE)) for _ in range(20)])
    assert answers == [STORED] * 20
    assert server.connections == 2


@pytest.mark.anyio
async def test_a_certificate_is_verified_unless_that_is_off(tmp_path):
    certificate = tmp_path / "server.pem"
    if reason := make_certificate(certificate):
        pytest.skip(reason)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    for verify, expected in ((str(certificate), STORED), (False, STORED), (True, None)):
        async with talking_to(Server(HEAD + ANSWER), tls, verify_ssl=verify) as transport:
            answer = await transport.put_records(request_of(*THREE))
        if expected is None:
            assert isinstance(answer, RequestFailure)
            assert "CERTIFICATE_VERIFY_FAILED" in answer.message
        else:
            assert answer == expected


@pytest.mark.anyio
async def test_expiring_credentials_are_refreshed_in_a_thread_and_again_after_an_error():
    threads: list[threading.Thread] = []

    def fetch() -> dict[str, str]:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise CredentialRetrievalError(provider="vault", error_msg="the vault is sealed")
        return {"access_key": "new", "secret_key": "s", "token": "t", "expiry_time": "2999-01-01T00:00:00Z"}

    expired = datetime.now(UTC) - timedelta(hours=1)
    credentials = RefreshableCredentials("old", "s", "t", expired, fetch, "vault")
    server = Server(*[HEAD + ANSWER] * 2)
    async with talking_to(server, change=lambda found: replace(found, credentials=credentials)) as transport:
        failure = await transport.put_records(request_of(*THREE))
        assert isinstance(failure, RequestFailure)
        assert "the vault is sealed" in failure.message
        for _ in range(2):
            assert await transport.put_records(request_of(*THREE)) == STORED
    assert len(threads) == 2
    assert threading.main_thread() not in threads
    assert b"Credential=new/" in server.requests[0][0]


@pytest.mark.anyio
async def test_requests_wait_for_one_refresh_and_block_neither_the_executor_nor_the_end():
    fetches: list[str] = []
    go_on = threading.Event()

    def fetch() -> dict[str, str]:
        fetches.append("fetch")
        go_on.wait(10)
        return {"access_key": "new", "secret_key": "s", "token": "t", "expiry_time": "2999-01-01T00:00:00Z"}

    credentials = RefreshableCredentials("old", "s", "t", datetime.now(UTC) - timedelta(hours=1), fetch, "vault")
    change = lambda found: replace(found, credentials=credentials)  # noqa: E731
    async with talking_to(Server(), change=change, request_timeout_ms=100, connect_timeout_ms=100) as transport:
        failures = await asyncio.gather(*[transport.put_records(request_of(*THREE)) for _ in range(40)])
        assert {type(each) for each in failures} == {RequestFailure}
        # The executor is free.
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 1.0) == "free"
    go_on.set()
    assert fetches == ["fetch"]


@pytest.mark.anyio
async def test_credentials_that_are_still_valid_are_used_while_a_refresh_hangs():
    go_on = threading.Event()

    def fetch() -> dict[str, str]:
        go_on.wait(10)
        raise CredentialRetrievalError(provider="vault", error_msg="the vault is sealed")

    credentials = RefreshableCredentials("old", "s", "t", datetime.now(UTC) + timedelta(minutes=14), fetch, "vault")
    server = Server(*[HEAD + ANSWER] * 2)
    async with talking_to(server, change=lambda found: replace(found, credentials=credentials)) as transport:
        for _ in range(2):
            assert await transport.put_records(request_of(*THREE)) == STORED
    go_on.set()
    assert b"Credential=old/" in server.requests[1][0]


@pytest.mark.anyio
async def test_a_line_break_in_a_credential_is_an_error_without_its_value():
    keys: dict[str, Any] = {
        "aws_access_key_id": "AKIA",
        "aws_secret_access_key": "s",
        "aws_session_token": "token\r\nX-Injected: 1\n",
    }
    server = Server(HEAD + ANSWER)
    async with talking_to(server, **keys) as transport:
        failure = await transport.put_records(request_of(*THREE))
    assert isinstance(failure, RequestFailure)
    assert "the header X-Amz-Security-Token has a line break" in failure.message
    assert "Injected" not in failure.message
    assert server.requests == []


@pytest.mark.anyio
async def test_a_function_of_lambda_passes_its_trace_on(monkeypatch):
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "orders")
    monkeypatch.setenv("_X_AMZN_TRACE_ID", "Root=1-2;Sampled=1\n")
    server = Server(HEAD + ANSWER)
    async with talking_to(server) as transport:
        assert await transport.put_records(request_of(*THREE)) == STORED
    assert b"X-Amzn-Trace-Id: Root=1-2;Sampled=1%0A\r\n" in server.requests[0][0]


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD + ANSWER[:5]], ids=["nothing", "head", "body"])
async def test_the_time_to_connect_is_not_added_to_that_of_an_answer(sent):
    async def is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await reader.read()
        writer.close()

    server = Server()
    server.serve = is_silent  # type: ignore[method-assign]
    began = asyncio.get_running_loop().time()
    async with talking_to(server, request_timeout_ms=100, connect_timeout_ms=5_000) as transport:
        failure = await transport.put_records(request_of(*THREE))
    assert isinstance(failure, RequestFailure)
    assert failure.message == "no answer to put_records within 100 ms"
    assert asyncio.get_running_loop().time() - began < 4.0
