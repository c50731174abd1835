# ruff: noqa: N803, EM101 - botocore's own names, and codes in place of sentences
"""The contract on S3 and DynamoDB as AWS documents them: a dictionary behind their calls and error codes.

tests/interop runs the same contract against independent servers.
"""

import itertools
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError, EndpointConnectionError

from kpl_core.coordination.store import MemoryStore, StoreFailed
from kpl_core.coordination.stores.dynamodb import DynamoDbStore
from kpl_core.coordination.stores.s3 import S3Store
from kpl_core.coordination.worker import Coordinator
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
    """Three items per page."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}

    async def get_item(self, *, TableName: str, Key: Any, ConsistentRead: bool) -> Any:
        assert ConsistentRead
        item = self.items.get(Key["name"]["S"])
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
        known = self.items.get(Item["name"]["S"])
        if ConditionExpression.startswith("attribute_not_exists") and known is not None:
            raise refused("ConditionalCheckFailedException")
        if ConditionExpression.startswith("version"):
            expected = ExpressionAttributeValues[":expected"]
            if known is None or known["version"] != expected:
                raise refused("ConditionalCheckFailedException")
        self.items[Item["name"]["S"]] = Item
        return metadata()

    async def delete_item(self, *, TableName: str, Key: Any) -> Any:
        self.items.pop(Key["name"]["S"], None)
        return metadata()

    async def query(
        self, *, ExpressionAttributeValues: Any, ExclusiveStartKey: Any = None, **_: object
    ) -> dict[str, Any]:
        prefix = ExpressionAttributeValues[":prefix"]["S"]
        names = sorted(name for name in self.items if name.startswith(prefix))
        rest = [name for name in names if ExclusiveStartKey is None or name > ExclusiveStartKey["name"]["S"]]
        page: dict[str, Any] = {"Items": [self.items[name] for name in rest[:3]], **metadata()}
        if len(rest) > 3:
            page["LastEvaluatedKey"] = {"name": {"S": rest[2]}}
        return page


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
    body = (await store.read("leases.json")).body or b""
    await store.write("leases.json", body.replace(b'"claimed_until":0.0', b'"claimed_until":1003.0'))
    assert await coordinator().compute_once() == (0, "overtaken")
    now[0] = 1_004.0
    assert await coordinator().compute_once() == (0, "computed")
    await store.write("leases.json", b'{"version": 7}')
    with pytest.raises(StoreFailed, match="version 7"):
        await coordinator().compute_once()
