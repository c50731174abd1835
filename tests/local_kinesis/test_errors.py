"""Requests that the local service rejects, through both SDKs; other emulators accept them or crash."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import ClientError

from kpl_core.options.kinesis_limits import MIB
from kpl_integrations.local_kinesis import LocalKinesis
from tests.local_kinesis.kinesis_clients import SDKS, Call, client_of

pytestmark = [
    pytest.mark.anyio,
    # aiohttp's client warns about every body above 1 MiB that aiobotocore sends.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

HASH_KEYS = 2**128


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Service(NamedTuple):
    """A running server and one SDK's function to call it."""

    server: LocalKinesis
    call: Call


@pytest.fixture(params=SDKS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with LocalKinesis({"orders": 2}) as server, client_of(request.param, server.endpoint_url) as call:
        yield Service(server, call)


def entry(key: str = "k", data: bytes = b"", **more: str) -> dict[str, Any]:
    return {"PartitionKey": key, "Data": data, **more}


LONG = "k" * 257
PATTERN = r"Member must satisfy regular expression pattern: 0|([1-9]\d{0,38})"

REJECTED: list[tuple[str, str, dict[str, Any], str, str]] = [
    (
        "501 records",
        "put_records",
        {"StreamName": "orders", "Records": [entry()] * 501},
        "ValidationException",
        (
            "1 validation error detected: Value at 'records' failed to satisfy constraint: "
            "Member must have length less than or equal to 500"
        ),
    ),
    (
        "no record",
        "put_records",
        {"StreamName": "orders", "Records": []},
        "ValidationException",
        (
            "1 validation error detected: Value '[]' at 'records' failed to satisfy constraint: "
            "Member must have length greater than or equal to 1"
        ),
    ),
    (
        "empty key in PutRecords",
        "put_records",
        {"StreamName": "orders", "Records": [entry(), entry("")]},
        "ValidationException",
        (
            "1 validation error detected: Value '' at 'records.2.member.partitionKey' failed to satisfy constraint: "
            "Member must have length greater than or equal to 1"
        ),
    ),
    (
        "empty key in PutRecord",
        "put_record",
        {"StreamName": "orders", **entry("")},
        "ValidationException",
        (
            "1 validation error detected: Value '' at 'partitionKey' failed to satisfy constraint: "
            "Member must have length greater than or equal to 1"
        ),
    ),
    (
        "long key",
        "put_records",
        {"StreamName": "orders", "Records": [entry(LONG)]},
        "ValidationException",
        (
            f"1 validation error detected: Value '{LONG}' at 'records.1.member.partitionKey' failed to satisfy "
            "constraint: Member must have length less than or equal to 256"
        ),
    ),
    (
        "data of 1 MiB and a key",
        "put_records",
        {"StreamName": "orders", "Records": [entry(data=b"small"), entry(data=bytes(MIB))]},
        "ValidationException",
        (
            "1 validation error detected: Value at 'records.2.member.data' failed to satisfy constraint: "
            "Member must have length less than or equal to 1048576"
        ),
    ),
    (
        "data of 1 MiB and a key in PutRecord",
        "put_record",
        {"StreamName": "orders", **entry(data=bytes(MIB))},
        "ValidationException",
        (
            "1 validation error detected: Value at 'data' failed to satisfy constraint: "
            "Member must have length less than or equal to 1048576"
        ),
    ),
    (
        "12 MiB in one request",
        "put_records",
        {"StreamName": "orders", "Records": [entry(data=bytes(MIB - 1))] * 11},
        "InvalidArgumentException",
        "Records size exceeds 10 MB limit",
    ),
    (
        "hash key of 129 bits",
        "put_records",
        {"StreamName": "orders", "Records": [entry(ExplicitHashKey=str(HASH_KEYS))]},
        "InvalidArgumentException",
        f"Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. Specified value was {HASH_KEYS}",
    ),
    (
        "hash key of letters",
        "put_records",
        {"StreamName": "orders", "Records": [entry(ExplicitHashKey="abc")]},
        "ValidationException",
        (
            f"1 validation error detected: Value 'abc' at 'records.1.member.explicitHashKey' failed to satisfy "
            f"constraint: {PATTERN}"
        ),
    ),
    (
        "empty hash key",
        "put_record",
        {"StreamName": "orders", **entry(ExplicitHashKey="")},
        "ValidationException",
        f"1 validation error detected: Value '' at 'explicitHashKey' failed to satisfy constraint: {PATTERN}",
    ),
    (
        "unknown stream",
        "put_records",
        {"StreamName": "nowhere", "Records": [entry()]},
        "ResourceNotFoundException",
        "Stream nowhere under account 000000000000 not found.",
    ),
    (
        "no stream",
        "describe_stream_summary",
        {},
        "ValidationException",
        "1 validation error detected: Value null at 'streamName' failed to satisfy constraint: Member must not be null",
    ),
    (
        "two streams",
        "describe_stream_summary",
        {"StreamName": "orders", "StreamARN": "arn:aws:kinesis:us-east-1:000000000000:stream/other"},
        "InvalidArgumentException",
        "StreamName orders does not match StreamARN arn:aws:kinesis:us-east-1:000000000000:stream/other.",
    ),
    (
        "unknown filter",
        "list_shards",
        {"StreamName": "orders", "ShardFilter": {"Type": "SOME"}},
        "ValidationException",
        (
            "1 validation error detected: Value 'SOME' at 'shardFilter.type' failed to satisfy constraint: Member must "
            "satisfy enum value set: [AFTER_SHARD_ID, AT_TRIM_HORIZON, FROM_TRIM_HORIZON, AT_LATEST, AT_TIMESTAMP, "
            "FROM_TIMESTAMP]"
        ),
    ),
    (
        "an invalid iterator",
        "get_records",
        {"ShardIterator": "nonsense"},
        "InvalidArgumentException",
        "Invalid ShardIterator.",
    ),
]


@pytest.mark.parametrize(
    ("operation", "members", "code", "message"), [pytest.param(*row[1:], id=row[0]) for row in REJECTED]
)
async def test_a_bad_request_is_rejected_with_the_services_message(
    service: Service, operation: str, members: dict[str, Any], code: str, message: str
) -> None:
    with pytest.raises(ClientError) as refusal:
        await service.call(operation, **members)
    assert refusal.value.response["Error"] == {"Code": code, "Message": message}
    assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    assert service.server.fake.records("orders") == []
