# ruff: noqa: N803, EM101 - botocore's own names, and codes in place of sentences
"""The contract on S3 and DynamoDB as AWS documents them: a dictionary behind their calls and error codes.

tests/interop runs the same contract against independent servers.
"""

import itertools
from collections import Counter
from email.utils import formatdate
from typing import Any

import anyio
import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError, EndpointConnectionError

from kpl_core.coordination.lease_sync import SUMMARY_NAME as HEAD
from kpl_core.coordination.store import MemoryStore, StoreFailed
from kpl_core.coordination.store_objects import Summary, decode, encode
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.stores.dynamodb import COPIED_NAME, DynamoDbStore
from kpl_core.coordination.stores.s3 import S3Store
from kpl_core.coordination.worker import Coordinator
from kpl_core.errors import ConfigError
from tests.support.store_contract import CONTRACT

pytestmark = pytest.mark.anyio


def metadata() -> Any:
    return {"ResponseMetadata": {"HTTPHeaders": {"date": formatdate(usegmt=True)}}}


def refused(code: str) -> ClientError:
    answer: Any = {"Error": {"Code": code}} | metadata()
    return ClientError(answer, "Operation")


class Body:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body


class FakeS3:
    """Two keys per page, so that a listing has several pages."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self._tags = itertools.count()

    async def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        if Key not in self.objects:
            raise refused("NoSuchKey")
        body, tag = self.objects[Key]
        return {"Body": Body(body), "ETag": tag, **metadata()}

    async def put_object(
        self,
        *,
        Bucket: str,
        Key: str,
        Body: bytes,
        ContentType: str,
        IfMatch: str | None = None,
        IfNoneMatch: str | None = None,
    ) -> dict[str, Any]:
        known = self.objects.get(Key)
        if IfNoneMatch and known:
            raise refused("PreconditionFailed")
        if IfMatch and (known is None or known[1] != IfMatch):
            raise refused("NoSuchKey" if known is None else "PreconditionFailed")
        tag = f'"{next(self._tags)}"'
        self.objects[Key] = (Body, tag)
        return {"ETag": tag, **metadata()}

    async def delete_object(self, *, Bucket: str, Key: str) -> Any:
        self.objects.pop(Key, None)
        return metadata()

    async def list_objects_v2(self, *, Bucket: str, Prefix: str, ContinuationToken: str = "0") -> dict[str, Any]:
        keys = sorted(key for key in self.objects if key.startswith(Prefix))
        start = int(ContinuationToken)
        page = {
            "Contents": [{"Key": key, "ETag": self.objects[key][1]} for key in keys[start : start + 2]],
            **metadata(),
        }
        if start + 2 < len(keys):
            page |= {"IsTruncated": True, "NextContinuationToken": str(start + 2)}
        return page


class FakeDynamoDb:
    """Three items per page. It counts the reads and the writes of each item."""

    def __init__(self) -> None:
        # By partition key and sort key.
        self.groups: dict[tuple[str, str], dict[str, Any]] = {}
        self.reads: Counter[tuple[str, str]] = Counter()
        self.writes: Counter[tuple[str, str]] = Counter()
        # Writes of these partition keys fail.
        self.failing: set[str] = set()

    @property
    def items(self) -> "_Group":
        return _Group(self.groups, "g")

    async def get_item(self, *, TableName: str, Key: Any, ConsistentRead: bool) -> Any:
        assert ConsistentRead
        self.reads[_key_of(Key)] += 1
        item = self.groups.get(_key_of(Key))
        return metadata() if item is None else {"Item": item, **metadata()}

    async def put_item(
        self,
        *,
        TableName: str,
        Item: Any,
        ConditionExpression: str = "",
        ExpressionAttributeNames: Any = None,
        ExpressionAttributeValues: Any = None,
    ) -> Any:
        key = _key_of(Item)
        self.writes[key] += 1
        if key[0] in self.failing:
            raise refused("ProvisionedThroughputExceededException")
        known = self.groups.get(key)
        if ConditionExpression == "attribute_not_exists(#name)" and known is not None:
            raise refused("ConditionalCheckFailedException")
        if ConditionExpression == "attribute_not_exists(#serial) OR #serial < :serial":
            serial = int(ExpressionAttributeValues[":serial"]["N"])
            if known is not None and "serial" in known and int(known["serial"]["N"]) >= serial:
                raise refused("ConditionalCheckFailedException")
        if ConditionExpression.startswith("version"):
            expected = ExpressionAttributeValues[":expected"]
            if known is None or known["version"] != expected:
                raise refused("ConditionalCheckFailedException")
        self.groups[key] = Item
        return metadata()

    async def delete_item(self, *, TableName: str, Key: Any) -> Any:
        self.groups.pop(_key_of(Key), None)
        return metadata()

    async def query(
        self, *, ExpressionAttributeValues: Any, ExclusiveStartKey: Any = None, **_: object
    ) -> dict[str, Any]:
        group, prefix = ExpressionAttributeValues[":group"]["S"], ExpressionAttributeValues[":prefix"]["S"]
        names = sorted(name for each, name in self.groups if each == group and name.startswith(prefix))
        rest = [name for name in names if ExclusiveStartKey is None or name > ExclusiveStartKey["name"]["S"]]
        page: dict[str, Any] = {"Items": [self.groups[group, name] for name in rest[:3]], **metadata()}
        if len(rest) > 3:
            page["LastEvaluatedKey"] = {"name": {"S": rest[2]}}
        return page


def _key_of(item: Any) -> tuple[str, str]:
    return item["group"]["S"], item["name"]["S"]


class _Group:
    """The items of one partition key, by sort key."""

    def __init__(self, groups: dict[tuple[str, str], dict[str, Any]], group: str) -> None:
        self._groups, self._group = groups, group

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._groups[self._group, name]

    def __setitem__(self, name: str, item: dict[str, Any]) -> None:
        self._groups[self._group, name] = item


@pytest.fixture
def anyio_backend() -> str:
    """Return the loop of these stores, which are for asyncio only."""
    return "asyncio"


@pytest.fixture(params=["s3", "dynamodb"])
def store(request: pytest.FixtureRequest) -> S3Store | DynamoDbStore:
    client: Any = FakeS3() if request.param == "s3" else FakeDynamoDb()
    return S3Store(client, "bucket", "prefix") if request.param == "s3" else DynamoDbStore(client, "t", "g")


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
async def test_a_store_keeps_the_contract(store, clause):
    await clause(store)
    await store.aclose()


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (refused("AccessDenied"), "denied", "allow this role"),
        (refused("AccessDeniedException"), "denied", "allow this role"),
        (refused("ExpiredToken"), "denied", "renew the credentials"),
        (refused("NoSuchBucket"), "missing", "create the bucket"),
        (refused("ResourceNotFoundException"), "missing", "create the table"),
        (refused("ProvisionedThroughputExceededException"), "limit", "lengthen the interval"),
        (refused("RequestTimeTooSkewed"), "clock", "synchronise"),
        (refused("InternalError"), "down", "its endpoint and the network"),
        (EndpointConnectionError(endpoint_url="https://secret"), "down", "its endpoint and the network"),
        (TimeoutError(), "down", "its endpoint and the network"),
        (ClientPayloadError("secret"), "down", "its endpoint and the network"),
    ],
)
async def test_a_failed_call_raises_one_sentence_with_a_reason(store, error, reason, remedy):
    async def fail(**_: object) -> None:
        raise error

    client = store._client  # noqa: SLF001
    for name in [name for name in dir(type(client)) if not name.startswith("_")]:
        if callable(getattr(client, name)):
            setattr(client, name, fail)
    for call in (store.read("a"), store.write("a", b""), store.read_all("a"), store.delete("a")):
        with pytest.raises(StoreFailed, match=remedy) as failed:
            await call
        assert failed.value.reason == reason
        assert "secret" not in str(failed.value)


async def test_a_listing_that_repeats_its_pages_fails(store):
    again: Any = {
        "Items": [],
        "LastEvaluatedKey": {"name": {"S": "a"}},
        "IsTruncated": True,
        "NextContinuationToken": "a",
        **metadata(),
    }
    calls: list[object] = []

    async def page(**arguments: object) -> Any:
        calls.append(arguments)
        return again

    store._client.list_objects_v2 = store._client.query = page  # noqa: SLF001
    with pytest.raises(StoreFailed, match="EndlessListingError; check its endpoint") as failed:
        await store.read_all("")
    assert (failed.value.reason, len(calls)) == ("down", 2)


async def test_a_listing_of_the_most_pages_is_read_whole(store, monkeypatch):
    monkeypatch.setattr("kpl_core.paging.MAX_PAGES", 4)
    calls: list[object] = []

    async def page(**arguments: object) -> Any:
        calls.append(arguments)
        token = str(len(calls))
        more = {"LastEvaluatedKey": {"name": {"S": token}}, "IsTruncated": True, "NextContinuationToken": token}
        return {"Items": [], **(more if len(calls) < last else {}), **metadata()}

    store._client.list_objects_v2 = store._client.query = page  # noqa: SLF001
    last = 4
    assert (await store.read_all("")).bodies == {}
    assert len(calls) == 4
    calls.clear()
    last = 5
    with pytest.raises(StoreFailed, match="EndlessListingError"):
        await store.read_all("")
    assert len(calls) == 4


async def test_an_answer_without_a_date_header_fails(store, monkeypatch):
    monkeypatch.setattr(f"{__name__}.metadata", lambda: {"ResponseMetadata": {"HTTPHeaders": {}}})
    for call in (store.read("a"), store.write("a", b""), store.read_all("a")):
        with pytest.raises(StoreFailed, match="has no Date header") as failed:
            await call
        assert failed.value.reason == "clock"


async def test_a_truncated_body_fails():
    """As in aiobotocore: after the headers, the body may still be cut off."""

    class Broken(Body):
        async def read(self) -> bytes:
            raise ClientPayloadError

    client: Any = FakeS3()
    store = S3Store(client, "bucket", "prefix")
    await store.write("a", b"1")
    client.get_object = lambda **_: _answer({"Body": Broken(b""), "ETag": "1", **metadata()})
    with pytest.raises(StoreFailed, match="the network") as failed:
        await store.read("a")
    assert failed.value.reason == "down"


async def test_a_listing_reads_only_the_objects_that_have_changed_since_the_last_one():
    client: Any = FakeS3()
    store = S3Store(client, "bucket", "prefix")
    gets: list[str] = []
    get_object = client.get_object

    async def counted(*, Bucket: str, Key: str) -> Any:
        gets.append(Key)
        return await get_object(Bucket=Bucket, Key=Key)

    client.get_object = counted
    for name in "abc":
        await store.write(name, b"1")
    assert (await store.read_all("")).bodies == {"a": b"1", "b": b"1", "c": b"1"}
    gets.clear()
    await store.write("b", b"2")
    await store.delete("c")
    assert (await store.read_all("")).bodies == {"a": b"1", "b": b"2"}
    assert gets == ["prefix/b"]


async def _answer(answer: Any) -> Any:
    return answer


@pytest.mark.parametrize("item", [{}, {"body": {"S": "text"}}, {"body": {"B": b"1"}}, {"version": {"S": "1"}}])
async def test_an_item_of_another_program_is_reported_as_garbage(item):
    client: Any = FakeDynamoDb()
    store = DynamoDbStore(client, "t", "g")
    client.items["report-theirs"] = {"group": {"S": "g"}, "name": {"S": "report-theirs"}, **item}
    with pytest.raises(StoreFailed, match="belongs to another program; use another group") as failed:
        await store.read("report-theirs")
    assert failed.value.reason == "garbage"
    assert set((await store.read_all("report-")).bodies) == {"report-theirs"}


async def test_a_coordinator_respects_a_claim_and_replaces_garbage():
    complaints: list[str] = []
    now = [1_000.0]
    store = MemoryStore(lambda: now[0])

    def coordinator() -> Coordinator:
        return Coordinator(store, interval_seconds=5.0, on_problem=lambda reason, _: complaints.append(reason))

    await store.write("leases.json", b"garbage")
    assert await coordinator().compute_once() == (0, "computed")
    assert complaints == ["garbage"]
    head = decode((await store.read("leases.json")).body or b"", Summary)
    head.claimed_until = 1_003.0
    await store.write("leases.json", encode(head))
    assert await coordinator().compute_once() == (0, "overtaken")
    now[0] = 1_004.0
    assert await coordinator().compute_once() == (0, "computed")
    await store.write("leases.json", b'{"version": 7}')
    with pytest.raises(StoreFailed, match="version 7"):
        await coordinator().compute_once()


WORKERS = 10_000
# The row of 10,000 workers in the table of costs, and what DynamoDB allows for one item.
READS_PER_SECOND = 4_205.4
MOST_READS_OF_AN_ITEM = 3_000


def test_the_item_that_is_copied_is_the_head_of_the_plan() -> None:
    assert COPIED_NAME == HEAD


async def test_the_reads_of_the_plan_are_spread_over_its_copies() -> None:
    client: Any = FakeDynamoDb()
    stores = [DynamoDbStore(client, "t", "g", copies=4) for _ in range(WORKERS // 10)]
    await stores[0].write(HEAD, b"plan", expected="")
    await stores[0].write("report-1", b"report")
    await stores[0].aclose()
    assert dict(client.writes) == {("g", HEAD): 1, **{(f"g~{k}", HEAD): 1 for k in range(4)}, ("g", "report-1"): 1}
    for store in stores:
        assert (await store.read(HEAD)).body == b"plan"
    # The original is not read at all, and no copy by more than a third of the workers.
    assert client.reads["g", HEAD] == 0
    assert client.reads.total() == len(stores)
    most = max(client.reads.values()) / len(stores)
    assert most * READS_PER_SECOND <= 0.5 * MOST_READS_OF_AN_ITEM < READS_PER_SECOND
    await stores[0].delete(HEAD)
    assert set(client.groups) == {("g", "report-1")}


async def test_without_copies_each_read_and_write_is_one_call() -> None:
    client: Any = FakeDynamoDb()
    store = DynamoDbStore(client, "t", "g")
    await store.write(HEAD, b"plan")
    assert (await store.read(HEAD)).body == b"plan"
    assert (dict(client.reads), dict(client.writes)) == ({("g", HEAD): 1}, {("g", HEAD): 1})


async def test_a_plan_without_copies_is_read_from_its_original() -> None:
    client: Any = FakeDynamoDb()
    await DynamoDbStore(client, "t", "g").write(HEAD, b"plan")
    store = DynamoDbStore(client, "t", "g", copies=2)
    reading = await store.read(HEAD)
    assert reading.body == b"plan"
    assert (await store.write(HEAD, b"next", expected=reading.version)).version is not None
    await store.aclose()
    assert (await DynamoDbStore(client, "t", "g", copies=2).read(HEAD)).body == b"next"


async def test_a_writer_that_died_before_the_copies_stops_no_later_plan() -> None:
    client: Any = FakeDynamoDb()
    first, second = (DynamoDbStore(client, "t", "g", copies=2) for _ in range(2))
    await first.write(HEAD, b"one", expected="")
    await first.aclose()
    client.failing = {"g~0", "g~1"}
    version = (await first.read(HEAD)).version
    assert (await first.write(HEAD, b"two", expected=version)).version is not None
    await first.aclose()
    client.failing = set()
    old = await second.read(HEAD)
    assert old.body == b"one"
    assert (await second.write(HEAD, b"three", expected=old.version)).version is None
    # Refused, so it reads the original, and its own write renews all copies.
    original = await second.read(HEAD)
    assert original.body == b"two"
    assert (await second.write(HEAD, b"three", expected=original.version)).version is not None
    await second.aclose()
    assert {(await store.read(HEAD)).body for store in (first, second)} == {b"three"}


async def test_a_late_write_of_a_copy_replaces_no_newer_one() -> None:
    client: Any = FakeDynamoDb()
    store = DynamoDbStore(client, "t", "g", copies=1)
    await store.write(HEAD, b"one")
    await store.aclose()
    client.groups["g~0", HEAD]["serial"] = {"N": "99999999999999"}
    await store.write(HEAD, b"two")
    await store.aclose()
    assert client.groups["g~0", HEAD]["body"] == {"B": b"one"}


async def test_a_worker_never_returns_to_a_copy_before_the_plan_that_it_used() -> None:
    """All within one second of the store's clock. The copies of the second plan are lost, and one is late."""
    client: Any = FakeDynamoDb()
    first, second = (DynamoDbStore(client, "t", "g", copies=1) for _ in range(2))
    one = await first.write(HEAD, b"one", expected="")
    await first.aclose()
    old = dict(client.groups["g~0", HEAD])
    client.failing = {"g~0"}
    await first.write(HEAD, b"two", expected=one.version)
    await first.aclose()
    client.failing = set()
    assert (await second.read(HEAD)).body == b"one"
    two = await first.read(HEAD)
    assert two.body == b"two"
    await first.write(HEAD, b"three", expected=two.version)
    await first.aclose()
    assert (await second.read(HEAD)).body == b"three"
    client.groups["g~0", HEAD] = old
    assert [(await store.read(HEAD)).body for store in (first, second)] == [b"three", b"three"]


async def test_a_plan_after_its_original_was_deleted_replaces_all_copies() -> None:
    client: Any = FakeDynamoDb()
    first, second = (DynamoDbStore(client, "t", "g", copies=1) for _ in range(2))
    await first.write(HEAD, b"old", expected="")
    await first.aclose()
    await second.write("report-1", b"report")
    del client.groups["g", HEAD]
    stale = await second.read(HEAD)
    assert (await second.write(HEAD, b"new", expected=stale.version)).version is None
    absent = await second.read(HEAD)
    assert absent == (None, "", absent.at)
    client.groups["g~0", HEAD]["serial"] = {"N": "17"}
    await second.write(HEAD, b"new", expected="")
    await second.aclose()
    assert (await DynamoDbStore(client, "t", "g", copies=1).read(HEAD)).body == b"new"


async def test_a_plan_replaces_its_copies_though_the_clock_of_the_store_went_back() -> None:
    client: Any = FakeDynamoDb()
    store = DynamoDbStore(client, "t", "g", copies=1)
    old = await store.write(HEAD, b"old", expected="")
    await store.aclose()
    for group in ("g", "g~0"):
        client.groups[group, HEAD]["serial"] = {"N": "99999999999999"}
    assert (await store.read(HEAD)).body == b"old"
    await store.write(HEAD, b"new", expected=old.version)
    await store.aclose()
    assert client.groups["g~0", HEAD]["body"] == {"B": b"new"}


async def test_slow_copies_do_not_delay_the_write_of_a_plan() -> None:
    client: Any = FakeDynamoDb()
    store, answers = DynamoDbStore(client, "t", "g", copies=2), anyio.Event()
    put = client.put_item

    async def slow(**options: Any) -> Any:
        if options["Item"]["group"]["S"] != "g":
            await answers.wait()
        return await put(**options)

    client.put_item = slow
    with anyio.fail_after(2.0):
        written = await store.write(HEAD, b"one", expected="")
        assert (await store.write(HEAD, b"two", expected=written.version)).version is not None
    answers.set()
    await store.aclose()
    assert {client.groups[f"g~{number}", HEAD]["body"]["B"] for number in range(2)} == {b"two"}


@pytest.mark.parametrize("copies", ["-1", "65", "many", "1.5"])
async def test_a_wrong_number_of_copies_is_a_config_error(copies: str) -> None:
    with pytest.raises(ConfigError, match=r"copies of the store is .*; it must be a number from 0 to 64"):
        await open_store(f"dynamodb://table/group?copies={copies}")
