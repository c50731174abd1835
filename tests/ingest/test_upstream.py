"""Questions that are passed on: what Kinesis says comes back, but nothing of whom it was said to."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from kpl_integrations.ingest.upstream import AiobotocoreUpstream
from kpl_integrations.kinesis_protocol import JsonWire, RequestRefused


class Client:
    """Stands for an aiobotocore client: answers, or raises."""

    def __init__(self, answer: Mapping[str, Any] | Exception) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    async def list_shards(self, **arguments: Any) -> Mapping[str, Any]:
        self.asked.append(arguments)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def error(code: str, message: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "ListShards",
    )


async def refusal(upstream: AiobotocoreUpstream, *, now: float = 0.0) -> RequestRefused:
    with pytest.raises(RequestRefused) as raised:
        await upstream.call("ListShards", {}, now=now)
    return raised.value


@pytest.mark.anyio
async def test_an_answer_comes_back_without_what_botocore_adds_and_with_instants_as_numbers():
    at = datetime(2026, 11, 20, 12, 0, 0, 250_000, tzinfo=UTC)
    client = Client({"Shards": [{"ShardId": "s", "At": at}], "ResponseMetadata": {"HTTPStatusCode": 200}})
    answer = await AiobotocoreUpstream(lambda: client).call("ListShards", {"StreamName": "orders"}, now=0.0)
    assert client.asked == [{"StreamName": "orders"}]
    assert JsonWire().encode(answer) == b'{"Shards":[{"ShardId":"s","At":1795176000.25}]}'


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("raised", "code", "status"),
    [
        (error("ResourceNotFoundException", "no such stream", 400), "ResourceNotFoundException", 400),
        (
            error("AccessDeniedException", "User: arn:aws:sts::1:role/gateway may not", 400),
            "AccessDeniedException",
            400,
        ),
        (error("ExpiredTokenException", "The token of role/gateway is expired", 400), "ServiceUnavailable", 503),
        (error("UnrecognizedClientException", "role/gateway is unknown", 400), "ServiceUnavailable", 503),
        (EndpointConnectionError(endpoint_url="http://inside.example"), "ServiceUnavailable", 503),
        (TimeoutError(), "ServiceUnavailable", 503),
        (ConnectionResetError(), "ServiceUnavailable", 503),
    ],
)
async def test_a_failure_has_a_code_of_kinesis_and_tells_nothing_of_the_gateway(raised, code, status):
    refused = await refusal(AiobotocoreUpstream(lambda: Client(raised)))
    assert (refused.code, refused.status) == (code, status)
    assert "role/gateway" not in str(refused)
    assert "inside.example" not in str(refused)


@pytest.mark.anyio
async def test_tenants_cannot_use_up_the_account_s_calls():
    client = Client({})
    upstream = AiobotocoreUpstream(lambda: client)
    for _ in range(16):
        await upstream.call("ListShards", {}, now=0.0)
    assert (await refusal(upstream)).code == "LimitExceededException"
    await upstream.call("ListShards", {}, now=0.125)
    assert len(client.asked) == 17


@pytest.mark.anyio
async def test_without_an_aws_client_nothing_can_be_passed_on():
    assert (await refusal(AiobotocoreUpstream(lambda: None))).code == "UnknownOperationException"
