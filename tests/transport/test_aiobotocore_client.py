"""The transport over a stub client: answers of other endpoints, and the options that reach aiobotocore."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiobotocore.session import AioSession

from kpl_core import Config
from kpl_core.records.put_records import RequestFailure
from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport
from kpl_core.transport.transport import KinesisTransport
from kpl_core.version import producer_version
from tests.support.material import shard_id


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """A client that answers as some emulators do."""

    def __init__(self, answers: dict[str, list[dict[str, Any]]]) -> None:
        self.answers = answers
        self.arguments: list[dict[str, Any]] = []
        self.meta = self
        self.events = self

    def register(self, *_: object) -> None: ...

    def __getattr__(self, operation: str) -> Any:
        async def call(**arguments: Any) -> dict[str, Any]:
            self.arguments.append(arguments)
            return self.answers[operation].pop(0)

        return call


class Session(AioSession):  # type: ignore[misc] # aiobotocore has no types
    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client
        self.options: dict[str, Any] = {}

    @asynccontextmanager
    async def create_client(self, *_: Any, **options: Any) -> AsyncIterator[Client]:
        self.options = options
        yield self.client


@asynccontextmanager
async def talking_to(client: Client, **options: Any) -> AsyncIterator[KinesisTransport]:
    transport = AiobotocoreTransport(Config(region="us-east-1", **options), session=Session(client))
    async with transport.open():
        yield transport


def listed(number: int, start: int, end: int, *, is_closed: bool = False) -> dict[str, Any]:
    ending = {"EndingSequenceNumber": "9"} if is_closed else {}
    return {
        "ShardId": shard_id(number),
        "HashKeyRange": {"StartingHashKey": str(start), "EndingHashKey": str(end)},
        "SequenceNumberRange": {"StartingSequenceNumber": "1", **ending},
    }


@pytest.mark.anyio
async def test_closed_shards_are_dropped_if_the_filter_is_ignored_and_a_token_is_sent_alone():
    client = Client(
        {
            "list_shards": [
                {"Shards": [listed(0, 0, 9, is_closed=True), listed(1, 0, 4)], "NextToken": "more"},
                {"Shards": [listed(2, 5, 9)], "NextToken": ""},
            ]
        }
    )
    async with talking_to(client) as transport:
        shards = await transport.list_shards("s")
    assert not isinstance(shards, RequestFailure)
    assert [(shard.shard_id, shard.starting_hash_key, shard.ending_hash_key) for shard in shards] == [
        (shard_id(1), 0, 4),
        (shard_id(2), 5, 9),
    ]
    assert client.arguments == [
        {"StreamName": "s", "MaxResults": 1_000, "ShardFilter": {"Type": "AT_LATEST"}},
        {"NextToken": "more"},
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"Shards": None},
        {"Shards": [{"ShardId": "s"}]},
        {"Shards": [listed(0, 0, 9) | {"HashKeyRange": {"StartingHashKey": "x", "EndingHashKey": "9"}}]},
    ],
)
async def test_a_listing_that_cannot_be_parsed_is_a_failure(answer):
    async with talking_to(Client({"list_shards": [answer]})) as transport:
        failure = await transport.list_shards("s")
    assert isinstance(failure, RequestFailure)
    assert failure.code == "Internal"
    assert "list_shards cannot be parsed" in failure.message


@pytest.mark.anyio
async def test_an_endpoint_that_does_not_know_record_limits_is_a_failure():
    client = Client({"describe_stream_summary": [{"StreamDescriptionSummary": {}}]})
    async with talking_to(client) as transport:
        failure = await transport.max_record_bytes("s")
    assert isinstance(failure, RequestFailure)
    assert "MaxRecordSizeInKiB" in failure.message


@pytest.mark.anyio
async def test_the_options_of_the_config_reach_the_client():
    client = Client({})
    transport = AiobotocoreTransport(
        Config(
            region="eu-west-1",
            endpoint_url="http://localhost:1",
            verify_ssl=False,
            aws_access_key_id="id",
            aws_secret_access_key="key",
            aws_session_token="token",
            max_connections=7,
            request_timeout_ms=1_500,
            connect_timeout_ms=2_500,
            botocore={"user_agent_extra": "mine"},
        ),
        session=(session := Session(client)),
    )
    async with transport.open():
        pass
    options = session.options
    assert (options["region_name"], options["endpoint_url"], options["verify"]) == (
        "eu-west-1",
        "http://localhost:1",
        False,
    )
    assert (options["aws_access_key_id"], options["aws_secret_access_key"], options["aws_session_token"]) == (
        "id",
        "key",
        "token",
    )
    settings = options["config"]
    assert (settings.max_pool_connections, settings.read_timeout, settings.connect_timeout) == (7, 1.5, 2.5)
    assert settings.retries["total_max_attempts"] == 1
    assert settings.user_agent_extra == "mine"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["a", "b", "a"], "the token 'a' came twice"),
        (["a", "b", "c", "d"], "more than 4 pages"),
    ],
    ids=["repeated", "endless"],
)
async def test_a_listing_without_an_end_is_a_failure(tokens, message, monkeypatch):
    monkeypatch.setattr("kpl_core.paging.MAX_PAGES", 4)
    client = Client({"list_shards": [{"Shards": [listed(0, 0, 9)], "NextToken": token} for token in tokens]})
    async with talking_to(client) as transport:
        failure = await transport.list_shards("s")
    assert isinstance(failure, RequestFailure)
    assert failure.code == "Internal"
    assert message in failure.message
    assert client.answers["list_shards"] == []


@pytest.mark.anyio
@pytest.mark.parametrize("token", [{"a": 1}, ["a"], 7])
async def test_a_token_that_is_no_string_is_a_failure(token):
    async with talking_to(Client({"list_shards": [{"Shards": [], "NextToken": token}]})) as transport:
        failure = await transport.list_shards("s")
    assert isinstance(failure, RequestFailure)
    assert "list_shards cannot be parsed" in failure.message


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("variable", "botocore", "ending"),
    [
        (None, {}, ""),
        ("orders app/1", {}, " app/orders-app-1"),
        ("orders", {"user_agent_appid": "mine"}, " app/mine"),
    ],
)
async def test_the_user_agent_names_the_product_and_the_application(variable, botocore, ending, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("AWS_SDK_UA_APP_ID", variable)
    config = Config(region="us-east-1", botocore=botocore)
    session = Session(Client({}))
    async with AiobotocoreTransport(config, session=session).open():
        pass
    assert session.options["config"].user_agent.endswith(f" kpl-integrations/{producer_version()}{ending}")
