"""Every fault switch, as an SDK sees it over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
)

from kpl_core.testing import (
    BadBody,
    Effect,
    ErrorAnswer,
    Hang,
    Latency,
    MergeDuringRequest,
    RecordError,
    ResetAfterCommit,
    ResetBeforeCommit,
    SplitDuringRequest,
    When,
    WrongCount,
)
from kpl_integrations.local_kinesis import LocalKinesis
from tests.local_kinesis.kinesis_clients import SDKS, Call, client_of
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

# The SDKs raise one of these when a connection is reset, depending on the moment.
CONNECTION_LOST = (ConnectionClosedError, EndpointConnectionError, HTTPClientError)
RECORDS = [{"PartitionKey": "k", "Data": b"%d" % number, "ExplicitHashKey": "0"} for number in range(10)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Service(NamedTuple):
    """A running server and one SDK's function to call it."""

    server: LocalKinesis
    call: Call

    @property
    def stored(self) -> int:
        return self.server.fake.statistics("orders").records_stored

    async def put(self) -> dict[str, Any]:
        return await self.call("put_records", StreamName="orders", Records=RECORDS)


@pytest.fixture(params=SDKS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with (
        LocalKinesis({"orders": 2, "other": 1}) as server,
        client_of(request.param, server.endpoint_url) as call,
    ):
        yield Service(server, call)


ANSWERED: list[tuple[str, int]] = [
    ("InternalFailure", 500),
    ("ServiceUnavailable", 503),
    ("AccessDeniedException", 400),
    ("ExpiredTokenException", 400),
    ("ProvisionedThroughputExceededException", 400),
    ("LimitExceededException", 400),
    ("KMSThrottlingException", 400),
]


@pytest.mark.parametrize(("code", "status"), ANSWERED)
async def test_a_request_can_be_rejected_with_any_error(service: Service, code: str, status: int) -> None:
    service.server.faults.add(ErrorAnswer(code), When(operation="PutRecords", times=1))
    with pytest.raises(ClientError) as refusal:
        await service.put()
    assert refusal.value.response["Error"]["Code"] == code
    assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert service.stored == 0
    assert (await service.put())["FailedRecordCount"] == 0


async def test_records_can_be_throttled_inside_a_good_answer(service: Service) -> None:
    service.server.faults.add(RecordError(), When(every=5, once_per_record=True))
    answer = await service.put()
    failed = [number for number, result in enumerate(answer["Records"]) if "ErrorCode" in result]
    assert (answer["FailedRecordCount"], failed) == (2, [4, 9])
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    again = [RECORDS[number] for number in failed]
    assert (await service.call("put_records", StreamName="orders", Records=again))["FailedRecordCount"] == 0
    assert service.stored == 10


async def test_all_records_can_be_throttled_at_http_200(service: Service) -> None:
    service.server.faults.add(RecordError())
    assert (await service.put())["FailedRecordCount"] == 10
    with pytest.raises(ClientError, match="ProvisionedThroughputExceededException"):
        await service.call("put_record", StreamName="orders", PartitionKey="k", Data=b"")


RESETS: list[tuple[Effect, int]] = [(ResetBeforeCommit(), 0), (ResetAfterCommit(), 10)]


@pytest.mark.parametrize(("effect", "stored"), RESETS)
async def test_a_connection_can_be_reset_before_or_after_the_records_are_stored(
    service: Service, effect: Effect, stored: int
) -> None:
    service.server.faults.add(effect, When(operation="PutRecords", times=1))
    with pytest.raises(CONNECTION_LOST):
        await service.put()
    assert service.stored == stored
    assert (await service.put())["FailedRecordCount"] == 0


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_request_can_be_accepted_and_never_answered(sdk: str) -> None:
    async with LocalKinesis({"orders": 2}) as server:
        server.faults.add(Hang(), When(times=1))
        async with client_of(sdk, server.endpoint_url, read_timeout=0.2) as call:
            with pytest.raises(ReadTimeoutError):
                await call("put_records", StreamName="orders", Records=RECORDS)
        assert server.fake.statistics("orders").records_stored == 0


async def test_a_hanging_request_does_not_block_the_others(service: Service) -> None:
    hang = service.server.faults.add(Hang(), When(times=1))
    hanging = asyncio.create_task(service.put())
    await until(lambda: hang.fired)
    assert (await service.put())["FailedRecordCount"] == 0
    await service.server.aclose()
    with pytest.raises(CONNECTION_LOST):
        await hanging


COUNTS: list[tuple[WrongCount, int]] = [(WrongCount(), 9), (WrongCount(2), 12), (WrongCount(-10), 0)]


@pytest.mark.parametrize(("effect", "count"), COUNTS)
async def test_an_answer_can_have_the_wrong_number_of_results(service: Service, effect: WrongCount, count: int) -> None:
    service.server.faults.add(effect)
    assert len((await service.put())["Records"]) == count
    assert service.stored == 10


async def test_an_answer_can_be_broken_json(service: Service) -> None:
    service.server.faults.add(BadBody())
    answer = await service.put()  # botocore ignores a body that it cannot parse
    assert "Records" not in answer
    assert service.stored == 10


async def test_an_answer_can_be_delayed(service: Service) -> None:
    service.server.faults.add(Latency(0.05), When(times=1))
    service.server.faults.add(Latency(0.05, after_commit=True), When(times=1))
    before = service.server.now
    await service.put()
    assert service.server.now - before >= 0.1


@pytest.mark.parametrize("sdk", SDKS)
async def test_records_can_be_stored_after_the_client_timed_out(sdk: str) -> None:
    async with LocalKinesis({"orders": 2}) as server:
        server.faults.add(Latency(60.0, after_commit=True))
        async with client_of(sdk, server.endpoint_url, read_timeout=0.2) as call:
            with pytest.raises(ReadTimeoutError):
                await call("put_records", StreamName="orders", Records=RECORDS)
        await until(lambda: server.fake.statistics("orders").records_stored == 10)


async def test_a_shard_can_split_during_a_request(service: Service) -> None:
    service.server.faults.add(SplitDuringRequest("shardId-000000000000"), When(operation="PutRecords", times=1))
    answer = await service.put()
    assert {result["ShardId"] for result in answer["Records"]} == {"shardId-000000000002"}


async def test_shards_can_merge_during_a_request(service: Service) -> None:
    service.server.faults.add(MergeDuringRequest(), When(operation="PutRecords", times=1))
    answer = await service.put()
    assert {result["ShardId"] for result in answer["Records"]} == {"shardId-000000000002"}


async def test_a_listing_can_be_denied_for_one_stream_only(service: Service) -> None:
    service.server.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="ListShards", stream="orders"))
    for _ in range(2):
        with pytest.raises(ClientError, match="AccessDeniedException"):
            await service.call("list_shards", StreamName="orders")
    with pytest.raises(ClientError, match="AccessDeniedException"):
        await service.call("list_shards", StreamARN=service.server.fake.arn("orders"))
    assert (await service.call("list_shards", StreamName="other"))["Shards"]
    assert (await service.put())["FailedRecordCount"] == 0


async def test_a_listing_can_fail_on_one_page(service: Service) -> None:
    when = When(operation="ListShards", stream="orders", page=2, times=1)
    service.server.faults.add(ErrorAnswer("LimitExceededException"), when)
    page = await service.call("list_shards", StreamName="orders", MaxResults=1)
    with pytest.raises(ClientError, match="LimitExceededException"):
        await service.call("list_shards", NextToken=page["NextToken"])
    assert (await service.call("list_shards", NextToken=page["NextToken"]))["Shards"]


async def test_all_operations_can_fail_then_connections_are_refused_then_all_recovers() -> None:
    now = 0.0
    async with (
        LocalKinesis({"orders": 2}, clock=lambda: now) as server,
        client_of("aiobotocore", server.endpoint_url) as call,
    ):
        url = server.endpoint_url
        server.faults.add(ErrorAnswer("InternalFailure"), When(ends_at=10.0))
        for operation in ("list_streams", "put_records", "list_shards"):
            members = {"StreamName": "orders"} if operation != "list_streams" else {}
            members |= {"Records": RECORDS} if operation == "put_records" else {}  # type: ignore[dict-item]
            with pytest.raises(ClientError, match="InternalFailure"):
                await call(operation, **members)
        now = 10.0
        server.refuse_connections()
        for _ in range(2):
            with pytest.raises(CONNECTION_LOST):
                await call("list_streams")
        assert server.endpoint_url == url
        await server.accept_connections()
        await server.accept_connections()
        assert (await call("put_records", StreamName="orders", Records=RECORDS))["FailedRecordCount"] == 0
