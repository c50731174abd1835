"""What docs/howto/aws.md says: each kind of credentials and each endpoint, with botocore's own resolvers.

One server of this file plays STS, IAM Identity Center, the metadata of a container and of an instance, and Kinesis.
"""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from botocore.credentials import SSOProvider
from botocore.utils import ContainerMetadataFetcher

from kpl_core import Config, Producer
from kpl_core.transport.direct_transport import resolved

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "aws.md"
KEY, SECRET, TOKEN = "AKIATHEROLE", "secret", "the token"
HALF_AN_HOUR = timedelta(minutes=30)
STS = """<{0}Response><{0}Result><Credentials><AccessKeyId>{1}</AccessKeyId><SecretAccessKey>{2}</SecretAccessKey>
<SessionToken>{3}</SessionToken><Expiration>{4}</Expiration></Credentials></{0}Result></{0}Response>"""
SHARDS = {"Shards": [{"ShardId": "a", "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)},
                      "SequenceNumberRange": {"StartingSequenceNumber": "1"}}]}  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Aws:
    """Answers as the services do, and notes the credentials and streams of the requests to Kinesis."""

    def __init__(self) -> None:
        self.url = ""
        self.keys: set[str] = set()
        self.tokens: set[str | None] = set()
        self.streams: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        """Return the answer to any request."""
        ends = datetime.now(UTC) + HALF_AN_HOUR
        expiration, path = f"{ends:%Y-%m-%dT%H:%M:%SZ}", request.path
        given = {"AccessKeyId": KEY, "SecretAccessKey": SECRET, "Token": TOKEN, "Expiration": expiration}
        if "X-Amz-Target" in request.headers:
            return await self._kinesis(request)
        if request.method == "POST":
            action = (await request.post())["Action"]
            return web.Response(text=STS.format(action, KEY, SECRET, TOKEN, expiration), content_type="text/xml")
        if path == "/federation/credentials":
            names = ("accessKeyId", "secretAccessKey", "sessionToken", "expiration")
            role = dict(zip(names, (KEY, SECRET, TOKEN, 1e3 * ends.timestamp()), strict=True))
            return web.json_response({"roleCredentials": role})
        if path in {"/v1/credentials", "/v2/credentials/task"}:
            assert request.headers.get("Authorization") == (None if "v2" in path else "the pod")
            return web.json_response(given)
        return self._instance(request, given)

    @staticmethod
    def _instance(request: web.Request, given: dict[str, str]) -> web.Response:
        if request.path == "/latest/api/token":
            return web.Response(text="metadata token")
        assert request.headers["x-aws-ec2-metadata-token"] == "metadata token"
        if request.path.endswith("/role"):
            return web.json_response({"Code": "Success", **given})
        return web.Response(text="role")

    async def _kinesis(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["Authorization"].partition("Credential=")[2].partition("/")[0])
        self.tokens.add(request.headers.get("X-Amz-Security-Token"))
        body: dict[str, Any] = json.loads(await request.read())
        self.streams.append(body.get("StreamARN") or body["StreamName"])
        operation = request.headers["X-Amz-Target"].partition(".")[2]
        if operation == "ListShards":
            return web.json_response(SHARDS)
        if operation != "PutRecords":
            return web.json_response({"__type": "AccessDeniedException"}, status=400)
        return web.json_response({"Records": [{"SequenceNumber": "1", "ShardId": "a"}] * len(body["Records"])})


@asynccontextmanager
async def aws() -> AsyncIterator[Aws]:
    """Run the server on a free port."""
    services, application = Aws(), web.Application()
    application.router.add_route("*", "/{path:.*}", services.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    services.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield services
    finally:
        await runner.cleanup()


class Setup(NamedTuple):
    """The environment and the files of one kind of credentials."""

    environment: dict[str, str]
    profiles: str = ""
    keys: str = ""


def static_keys(_: str, __: Path) -> Setup:
    return Setup({"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN})


def profile(_: str, __: Path) -> Setup:
    keys = f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
    return Setup({"AWS_PROFILE": "mine"}, keys=keys)


def sso(_: str, home: Path) -> Setup:
    start = "https://example.awsapps.com/start"
    cache = home / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True)
    login = {"startUrl": start, "region": "eu-west-1", "accessToken": "x", "expiresAt": "2099-01-01T00:00:00Z"}
    (cache / f"{sha1(start.encode()).hexdigest()}.json").write_text(json.dumps(login))  # noqa: S324 - AWS' name of the file
    found = f"sso_start_url = {start}\nsso_region = eu-west-1\nsso_account_id = 123456789012\nsso_role_name = Writer\n"
    return Setup({"AWS_PROFILE": "mine"}, f"[profile mine]\n{found}")


def assume_role(_: str, __: Path) -> Setup:
    role = "[profile mine]\nrole_arn = arn:aws:iam::123456789012:role/writer\nsource_profile = base\n"
    return Setup({"AWS_PROFILE": "mine"}, role, "[base]\naws_access_key_id = AKIABASE\naws_secret_access_key = x\n")


def web_identity(_: str, home: Path) -> Setup:
    token = home / "token"
    token.write_text("signed by the cluster")
    role = "arn:aws:iam::123456789012:role/writer"
    return Setup({"AWS_ROLE_ARN": role, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_SESSION_NAME": "pod"})


def pod_identity(url: str, home: Path) -> Setup:
    token = home / "token"
    token.write_text("the pod")
    names = "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
    return Setup(dict(zip(names, (f"{url}/v1/credentials", str(token)), strict=True)))


def container(_: str, __: Path) -> Setup:
    return Setup({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/task"})


def instance(url: str, _: Path) -> Setup:
    return Setup({"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{url}/"})


def process(_: str, home: Path) -> Setup:
    helper = home / "helper.py"
    found = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET, "SessionToken": TOKEN}
    helper.write_text(f"print({json.dumps(found)!r})")
    return Setup({"AWS_PROFILE": "mine"}, f"[profile mine]\ncredential_process = {sys.executable} {helper}\n")


SETUPS: dict[str, Callable[[str, Path], Setup]] = {
    "static keys": static_keys,
    "profile": profile,
    "SSO": sso,
    "AssumeRole": assume_role,
    "web identity": web_identity,
    "Pod Identity": pod_identity,
    "container": container,
    "IMDSv2": instance,
    "process": process,
}


def use(setup: Setup, url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a setup, and nothing else of AWS."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    # Named when botocore was imported, and HOME was another one.
    monkeypatch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(home / ".aws" / "sso" / "cache"))
    # The address that only a task of ECS can reach.
    monkeypatch.setattr(ContainerMetadataFetcher, "IP_ADDRESS", url.removeprefix("http://"))
    (home / "config").write_text(setup.profiles)
    (home / "credentials").write_text(setup.keys)
    services = {f"AWS_ENDPOINT_URL_{service}": url for service in ("KINESIS", "STS", "SSO")}
    files = {"AWS_CONFIG_FILE": str(home / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(home / "credentials")}
    for name, value in {**services, **files, "HOME": str(home), **setup.environment}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", SETUPS)
async def test_a_record_is_sent_with_credentials_of_each_kind(kind, tmp_path, monkeypatch):
    async with aws() as services:
        use(SETUPS[kind](services.url, tmp_path), services.url, tmp_path, monkeypatch)
        async with Producer(Config(region="eu-central-1", record_max_buffered_time_ms=1)) as producer:
            result = await (await producer.put("orders", partition_key="42", data=b"hello"))
        assert result.successful, result
        assert services.keys == {KEY}
        assert services.tokens == {TOKEN}


@pytest.mark.anyio
async def test_a_stream_of_another_account_is_named_by_its_arn(tmp_path, monkeypatch):
    arn = "arn:aws:kinesis:eu-central-1:123456789012:stream/orders"
    async with aws() as services:
        use(static_keys("", tmp_path), services.url, tmp_path, monkeypatch)
        async with Producer(Config(region="eu-central-1", record_max_buffered_time_ms=1)) as producer:
            assert (await (await producer.put(arn, partition_key="42", data=b"hello"))).successful
        assert {*services.streams} == {arn}


@pytest.mark.anyio
async def test_where_sts_cannot_be_reached_a_record_is_retried_and_says_why(tmp_path, monkeypatch):
    async with aws() as services:
        use(web_identity("", tmp_path), services.url, tmp_path, monkeypatch)
        # Nothing listens there.
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        config = Config(region="eu-central-1", record_max_buffered_time_ms=1, record_ttl_ms=500)
        async with Producer(config) as producer:
            result = await (await producer.put("orders", partition_key="42", data=b"hello"))
        assert (result.successful, result.error_code) == (False, "Expired")
        first = str(result.attempts[0].error_message)
        assert "credentials cannot be fetched (EndpointConnectionError: Could not connect to the endpoint" in first
        assert services.streams == []


@pytest.mark.parametrize(
    ("environment", "region", "host"),
    [
        ({}, "eu-central-1", "kinesis.eu-central-1.amazonaws.com"),
        ({"AWS_USE_FIPS_ENDPOINT": "true"}, "us-east-1", "kinesis-fips.us-east-1.amazonaws.com"),
        ({"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "eu-central-1", "kinesis.eu-central-1.api.aws"),
        (
            {"AWS_ENDPOINT_URL_KINESIS": "https://vpce-0abc.kinesis.eu-central-1.vpce.amazonaws.com"},
            "eu-central-1",
            "vpce-0abc.kinesis.eu-central-1.vpce.amazonaws.com",
        ),
    ],
)
def test_the_endpoints_of_the_page_are_those_that_requests_go_to(environment, region, host, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
        assert f"{name}={value}" in PAGE.read_text(encoding="utf-8")
    found = resolved(Config(region=region))
    assert not isinstance(found, str)
    assert found.endpoint("PutRecords", None).netloc == host
    assert host in PAGE.read_text(encoding="utf-8")


def test_each_row_of_the_page_has_a_test():
    table = PAGE.read_text(encoding="utf-8").partition("## Credentials")[2].partition("\n## ")[0]
    kinds = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("| ")]
    assert kinds[2:] == [*SETUPS]
