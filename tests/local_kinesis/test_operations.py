"""The operations of the local service through both SDKs, with the details that other emulators get wrong."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import ClientError

from kpl_core.options.kinesis_limits import MIB
from kpl_core.records.hash_key import hash_key_of
from kpl_core.testing import ServiceDurations, ServiceLimits
from kpl_integrations.local_kinesis import LocalKinesis
from tests.local_kinesis.kinesis_clients import SDKS, Call, client_of

pytestmark = [
    pytest.mark.anyio,
    # aiohttp's client warns about every body above 1 MiB that aiobotocore sends.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

ZERO, ONE, TWO = (f"shardId-{index:012d}" for index in range(3))
HASH_KEYS = 2**128


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Service(NamedTuple):
    """A running server, one SDK's function to call it, and its clock.

    The clock stands still, so that throttling does not depend on the machine's speed.
    """

    server: LocalKinesis
    call: Call
    clock: SimpleNamespace


@pytest.fixture(params=SDKS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    clock = SimpleNamespace(now=1_000.0)
    async with (
        LocalKinesis({"orders": 2}, clock=lambda: clock.now) as server,
        client_of(request.param, server.endpoint_url) as call,
    ):
        yield Service(server, call, clock)


def entry(key: str = "k", data: bytes = b"", **more: str) -> dict[str, Any]:
    return {"PartitionKey": key, "Data": data, **more}


async def read_all(call: Call, stream: str = "orders") -> dict[str, list[dict[str, Any]]]:
    """Return the records of every shard of a stream."""
    content: dict[str, list[dict[str, Any]]] = {}
    shards = await call("list_shards", StreamName=stream)
    for shard in shards["Shards"]:
        name = shard["ShardId"]
        arguments = {"StreamName": stream, "ShardId": name, "ShardIteratorType": "TRIM_HORIZON"}
        iterator = (await call("get_shard_iterator", **arguments))["ShardIterator"]
        content[name] = []
        while iterator is not None:
            page = await call("get_records", ShardIterator=iterator)
            content[name] += page["Records"]
            iterator = page.get("NextShardIterator") if page["MillisBehindLatest"] else None
    return content


def all_records(content: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [record for records in content.values() for record in records]


async def test_records_are_read_back_byte_for_byte(service: Service) -> None:
    keys = ["a", "ключ", "鍵", "🔑" * 256, "\x00\n\"'\\", "e\u0301"]
    data = [bytes(range(256)), b"", b"\xff" * 1000, b"text", bytes.fromhex("f3899ac2"), b"x"]
    answer = await service.call(
        "put_records",
        StreamName="orders",
        Records=[entry(key, datum) for key, datum in zip(keys, data, strict=True)],
    )
    assert answer["FailedRecordCount"] == 0
    content = await read_all(service.call)
    read = {(record["PartitionKey"], record["Data"], record["SequenceNumber"]) for record in all_records(content)}
    numbers = [result["SequenceNumber"] for result in answer["Records"]]
    assert read == set(zip(keys, data, numbers, strict=True))


async def test_success_entries_have_no_error_members(service: Service) -> None:
    answer = await service.call("put_records", StreamName="orders", Records=[entry()])
    assert answer["Records"][0].keys() == {"ShardId", "SequenceNumber"}
    assert len(answer["Records"][0]["SequenceNumber"]) == 56


async def test_put_record_answers_shard_and_sequence_number(service: Service) -> None:
    answer = await service.call("put_record", StreamName="orders", **entry("a", b"1"))
    assert answer["ShardId"] == ZERO
    (record,) = (await read_all(service.call))[ZERO]
    assert record["SequenceNumber"] == answer["SequenceNumber"]


async def test_keys_are_routed_by_md5_and_hash_keys_by_inclusive_ranges(service: Service) -> None:
    keys = [f"key-{number}" for number in range(100)]
    answer = await service.call("put_records", StreamName="orders", Records=[entry(key) for key in keys])
    wanted = [ZERO if hash_key_of(key) < HASH_KEYS // 2 else ONE for key in keys]
    assert [result["ShardId"] for result in answer["Records"]] == wanted
    edges = {"0": ZERO, str(HASH_KEYS // 2 - 1): ZERO, str(HASH_KEYS // 2): ONE, str(HASH_KEYS - 1): ONE}
    answer = await service.call(
        "put_records", StreamName="orders", Records=[entry(ExplicitHashKey=edge) for edge in edges]
    )
    assert [result["ShardId"] for result in answer["Records"]] == list(edges.values())


async def test_every_operation_accepts_an_arn_instead_of_the_name(service: Service) -> None:
    arn = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
    await service.call("put_record", StreamARN=arn, **entry())
    await service.call("put_records", StreamARN=arn, Records=[entry()])
    assert (await service.call("describe_stream", StreamARN=arn))["StreamDescription"]["StreamName"] == "orders"
    await service.call("update_max_record_size", StreamARN=arn, MaxRecordSizeInKiB=2048)
    summary = await service.call("describe_stream_summary", StreamARN=arn, StreamName="orders")
    assert summary["StreamDescriptionSummary"]["MaxRecordSizeInKiB"] == 2048
    await service.call("split_shard", StreamARN=arn, ShardToSplit=ZERO, NewStartingHashKey="100")
    await service.call("merge_shards", StreamARN=arn, ShardToMerge="shardId-2", AdjacentShardToMerge="shardId-3")
    await service.call("update_shard_count", StreamARN=arn, TargetShardCount=4, ScalingType="UNIFORM_SCALING")
    listed = await service.call("list_shards", StreamARN=arn, ShardFilter={"Type": "AT_LATEST"})
    assert len(listed["Shards"]) == 4
    iterator = await service.call("get_shard_iterator", StreamARN=arn, ShardId=ZERO, ShardIteratorType="TRIM_HORIZON")
    await service.call("get_records", StreamARN=arn, ShardIterator=iterator["ShardIterator"])
    await service.call("delete_stream", StreamARN=arn)
    assert (await service.call("list_streams"))["StreamNames"] == []


async def test_a_shard_throttles_its_records_one_by_one(service: Service) -> None:
    records = [entry(ExplicitHashKey="0")] * 500
    answers = [await service.call("put_records", StreamName="orders", Records=records) for _ in range(3)]
    failed = [result for answer in answers for result in answer["Records"] if "ErrorCode" in result]
    assert sum(answer["FailedRecordCount"] for answer in answers) == len(failed)
    assert len(failed) == 500
    assert failed[0] == {
        "ErrorCode": "ProvisionedThroughputExceededException",
        "ErrorMessage": f"Rate exceeded for shard {ZERO} in stream orders under account 000000000000.",
    }
    other = await service.call("put_records", StreamName="orders", Records=[entry(ExplicitHashKey=str(HASH_KEYS - 1))])
    assert other["FailedRecordCount"] == 0
    statistics = service.server.fake.statistics("orders")
    assert (statistics.put_requests, statistics.records_throttled) == (4, 500)


async def test_records_of_9_mib_are_accepted_after_update_max_record_size(service: Service) -> None:
    record = entry(data=bytes(9 * MIB))
    with pytest.raises(ClientError, match="1048576"):
        await service.call("put_records", StreamName="orders", Records=[record])
    arn = service.server.fake.arn("orders")
    await service.call("update_max_record_size", StreamARN=arn, MaxRecordSizeInKiB=10_240)
    answer = await service.call("put_records", StreamName="orders", Records=[record])
    assert answer["FailedRecordCount"] == 0
    content = await read_all(service.call)
    assert [len(stored["Data"]) for stored in all_records(content)] == [9 * MIB]


async def test_streams_are_created_listed_and_described(service: Service) -> None:
    await service.call("create_stream", StreamName="ondemand", StreamModeDetails={"StreamMode": "ON_DEMAND"})
    await service.call("create_stream", StreamName="three", ShardCount=3)
    first = await service.call("list_streams", Limit=2)
    assert (first["StreamNames"], first["HasMoreStreams"]) == (["ondemand", "orders"], True)
    rest = await service.call("list_streams", NextToken=first["NextToken"])
    assert (rest["StreamNames"], rest["HasMoreStreams"]) == (["three"], False)
    summary = (await service.call("describe_stream_summary", StreamName="ondemand"))["StreamDescriptionSummary"]
    assert (summary["OpenShardCount"], summary["StreamModeDetails"]) == (4, {"StreamMode": "ON_DEMAND"})
    assert abs(summary["StreamCreationTimestamp"].timestamp() - service.server.now - service.server.epoch) < 5
    description = (await service.call("describe_stream", StreamName="three"))["StreamDescription"]
    assert [shard["HashKeyRange"]["StartingHashKey"] for shard in description["Shards"]] == [
        "0",
        "113427455640312821154458202477256070485",
        "226854911280625642308916404954512140970",
    ]
    with pytest.raises(ClientError) as refusal:
        await service.call("create_stream", StreamName="three", ShardCount=3)
    assert refusal.value.response["Error"]["Code"] == "ResourceInUseException"


async def test_listings_follow_filters_and_pages(service: Service) -> None:
    service.clock.now += 2.0
    await service.call("split_shard", StreamName="orders", ShardToSplit=ZERO, NewStartingHashKey=str(HASH_KEYS // 4))
    pages = []
    page = await service.call("list_shards", StreamName="orders", ShardFilter={"Type": "AT_LATEST"}, MaxResults=2)
    pages.append([shard["ShardId"][-1] for shard in page["Shards"]])
    with pytest.raises(ClientError, match="NextToken and StreamName cannot be provided together"):
        await service.call("list_shards", StreamName="orders", NextToken=page["NextToken"])
    page = await service.call("list_shards", NextToken=page["NextToken"])
    pages.append([shard["ShardId"][-1] for shard in page["Shards"]])
    assert (pages, "NextToken" in page) == ([["1", "2"], ["3"]], False)
    after = await service.call(
        "list_shards", StreamName="orders", ShardFilter={"Type": "AFTER_SHARD_ID", "ShardId": ONE}
    )
    assert [shard.get("ParentShardId") for shard in after["Shards"]] == [ZERO, ZERO]
    created = (await service.call("describe_stream_summary", StreamName="orders"))["StreamDescriptionSummary"]
    # botocore before 1.43 sends whole seconds.
    at = {"Type": "AT_TIMESTAMP", "Timestamp": created["StreamCreationTimestamp"] + timedelta(seconds=1)}
    listed = await service.call("list_shards", StreamName="orders", ShardFilter=at)
    assert {ZERO, ONE} <= {shard["ShardId"] for shard in listed["Shards"]}


async def test_a_reader_follows_a_split_to_the_children(service: Service) -> None:
    await service.call("put_records", StreamName="orders", Records=[entry("k", b"before", ExplicitHashKey="0")])
    await service.call("split_shard", StreamName="orders", ShardToSplit=ZERO, NewStartingHashKey="100")
    await service.call("put_records", StreamName="orders", Records=[entry("k", b"after", ExplicitHashKey="0")])
    arguments = {"StreamName": "orders", "ShardId": ZERO, "ShardIteratorType": "TRIM_HORIZON"}
    iterator = (await service.call("get_shard_iterator", **arguments))["ShardIterator"]
    page = await service.call("get_records", ShardIterator=iterator)
    assert [record["Data"] for record in page["Records"]] == [b"before"]
    assert "NextShardIterator" not in page
    assert [(child["ShardId"], child["ParentShards"]) for child in page["ChildShards"]] == [
        (TWO, [ZERO]),
        ("shardId-000000000003", [ZERO]),
    ]
    assert [record["Data"] for record in (await read_all(service.call))[TWO]] == [b"after"]


async def test_an_iterator_at_a_records_timestamp_returns_the_record(service: Service) -> None:
    await service.call("put_record", StreamName="orders", **entry("a", b"1"))
    (record,) = (await read_all(service.call))[ZERO]
    arguments = {"StreamName": "orders", "ShardId": ZERO, "ShardIteratorType": "AT_TIMESTAMP"}
    iterator = await service.call("get_shard_iterator", **arguments, Timestamp=record["ApproximateArrivalTimestamp"])
    page = await service.call("get_records", ShardIterator=iterator["ShardIterator"])
    assert [stored["Data"] for stored in page["Records"]] == [b"1"]


@pytest.mark.long
async def test_no_acknowledged_record_is_lost_with_many_writers_and_a_reshard() -> None:
    async with (
        LocalKinesis({"orders": 2}, enforce_limits=False) as server,
        client_of("aiobotocore", server.endpoint_url) as call,
    ):
        acknowledged: Counter[bytes] = Counter()

        async def write(writer: int) -> None:
            for turn in range(10):
                data = [b"%d-%d-%d" % (writer, turn, number) for number in range(25)]
                records = [entry(datum.decode(), datum) for datum in data]
                answer = await call("put_records", StreamName="orders", Records=records)
                results = zip(data, answer["Records"], strict=True)
                acknowledged.update(datum for datum, result in results if "SequenceNumber" in result)

        async def reshard() -> None:
            await call("split_shard", StreamName="orders", ShardToSplit=ZERO, NewStartingHashKey=str(HASH_KEYS // 4))
            await call("update_shard_count", StreamName="orders", TargetShardCount=6, ScalingType="UNIFORM_SCALING")
            await call("update_shard_count", StreamName="orders", TargetShardCount=3, ScalingType="UNIFORM_SCALING")

        await asyncio.gather(*(write(writer) for writer in range(20)), reshard())
        stored = Counter(record["Data"] for record in all_records(await read_all(call)))
    assert sum(acknowledged.values()) == 20 * 10 * 25
    assert stored == acknowledged


async def test_a_stream_is_updating_for_the_configured_duration() -> None:
    now = 100.0
    durations = ServiceDurations(updating_seconds=30.0)
    async with (
        LocalKinesis({"orders": 1}, durations=durations, clock=lambda: now) as server,
        client_of("aiobotocore", server.endpoint_url) as call,
    ):
        await call("update_shard_count", StreamName="orders", TargetShardCount=2, ScalingType="UNIFORM_SCALING")
        summary = await call("describe_stream_summary", StreamName="orders")
        assert summary["StreamDescriptionSummary"]["StreamStatus"] == "UPDATING"
        now = 130.0
        summary = await call("describe_stream_summary", StreamName="orders")
        assert summary["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE"
        assert summary["StreamDescriptionSummary"]["OpenShardCount"] == 2


async def test_an_iterator_and_a_token_expire_on_the_servers_clock() -> None:
    now = 0.0
    async with (
        LocalKinesis({"orders": 2}, clock=lambda: now) as server,
        client_of("aiobotocore", server.endpoint_url) as call,
    ):
        page = await call("list_shards", StreamName="orders", MaxResults=1)
        arguments = {"StreamName": "orders", "ShardId": ZERO, "ShardIteratorType": "LATEST"}
        iterator = (await call("get_shard_iterator", **arguments))["ShardIterator"]
        now = 300.0
        with pytest.raises(ClientError, match="ExpiredNextTokenException"):
            await call("list_shards", NextToken=page["NextToken"])
        with pytest.raises(ClientError, match="ExpiredIteratorException"):
            await call("get_records", ShardIterator=iterator)


async def test_limits_follow_the_injected_clock() -> None:
    now = 0.0
    limits = ServiceLimits(records_per_second_per_shard=10.0)
    async with (
        LocalKinesis({"orders": 1}, limits=limits, clock=lambda: now) as server,
        client_of("aiobotocore", server.endpoint_url) as call,
    ):
        failed = []
        for instant in (0.0, 0.0, 0.5, 10.0):
            now = instant
            answer = await call("put_records", StreamName="orders", Records=[entry()] * 10)
            failed.append(answer["FailedRecordCount"])
    assert failed == [0, 10, 5, 0]
