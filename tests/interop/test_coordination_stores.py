"""Coordination stores on independent servers: moto's S3 and DynamoDB, one request at a time, and a real Redis."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from uuid import uuid4

import anyio
import boto3
import pytest
from redis.asyncio import Redis

from kpl_core import CoordinationOptions
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import SUMMARY_NAME
from kpl_core.coordination.store import CoordinationStore, StoreFailed
from kpl_core.coordination.store_objects import Pair, Summary, decode
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.worker import CoordinationWorker
from tests.interop.emulators import Emulator
from tests.support.processes import CREDENTIALS, LOOPBACK
from tests.support.store_contract import CONTRACT, assert_never_two_winners
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NewUrl = Callable[[], str]
RedisPlace = tuple[CoordinationStore, Redis, str]


@pytest.fixture(scope="session")
def s3_bucket(moto: Emulator) -> str:
    client = boto3.client("s3", endpoint_url=moto.endpoint_url, region_name="us-east-1")
    client.create_bucket(Bucket="coordination")
    return "coordination"


@pytest.fixture(scope="session")
def dynamodb_table(moto: Emulator) -> str:
    client = boto3.client("dynamodb", endpoint_url=moto.endpoint_url, region_name="us-east-1")
    client.create_table(
        TableName="coordination",
        KeySchema=[{"AttributeName": "group", "KeyType": "HASH"}, {"AttributeName": "name", "KeyType": "RANGE"}],
        AttributeDefinitions=[
            {"AttributeName": "group", "AttributeType": "S"},
            {"AttributeName": "name", "AttributeType": "S"},
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    return "coordination"


@pytest.fixture(params=["s3", "dynamodb", "redis"])
def new_url(request: pytest.FixtureRequest) -> NewUrl:
    """Return a function that returns the URL of an unused store."""
    if request.param == "redis":
        redis_url = request.getfixturevalue("redis_url")
        return lambda: f"{redis_url}?group={uuid4().hex}"
    moto: Emulator = request.getfixturevalue("moto")
    place = request.getfixturevalue("s3_bucket" if request.param == "s3" else "dynamodb_table")
    return lambda: f"{request.param}://{place}/{uuid4().hex}?endpoint_url={moto.endpoint_url}&region=us-east-1"


@pytest.fixture
async def store(new_url: NewUrl) -> AsyncIterator[CoordinationStore]:
    opened = await open_store(new_url())
    try:
        yield opened
    finally:
        await opened.aclose()


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
async def test_a_store_keeps_the_contract(
    store: CoordinationStore, clause: Callable[[CoordinationStore], Awaitable[None]]
) -> None:
    await clause(store)


def test_two_processes_never_both_replace_one_version(new_url: NewUrl) -> None:
    assert_never_two_winners(new_url(), attempts=500, environment=CREDENTIALS)


async def test_workers_with_this_store_divide_the_limit(new_url: NewUrl) -> None:
    url = new_url()
    shares: dict[str, Pair] = {}
    stores = [await open_store(url) for _ in range(3)]
    began = anyio.current_time()

    def worker(index: int) -> CoordinationWorker:
        def usages() -> Mapping[str, Usage]:
            passed = anyio.current_time() - began
            return {"orders/shard-0": Usage((900.0, 9e5), (passed * 1e4, passed * 1e7))}

        def apply_shares(told: Mapping[str, Pair]) -> None:
            shares[f"w{index}"] = told["orders/shard-0"]

        # The HTTP Date header has whole seconds, so no shorter interval works.
        options = CoordinationOptions(
            store="memory://unused",
            max_workers=6,
            worker_id=f"w{index}",
            interval_seconds=2.0,
            store_timeout_seconds=10.0,
        )
        return CoordinationWorker(stores[index], options, usages=usages, apply_shares=apply_shares)

    workers = [worker(index) for index in range(3)]
    try:
        async with anyio.create_task_group() as tasks:
            for each in workers:
                tasks.start_soon(each.run)
            await until(lambda: len(shares) == 3 and sum(share[0] for share in shares.values()) >= 850)
            tasks.cancel_scope.cancel()
        assert sum(share[0] for share in shares.values()) <= 900.0 * (1 + 1e-9)
        head = decode((await stores[0].read(SUMMARY_NAME)).body or b"", Summary)
        assert set(head.members) == {"w0", "w1", "w2"}
    finally:
        for each in workers:
            await each.leave()
        for store in stores:
            await store.aclose()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisPlace]:
    """A store in Redis, a second client of the same server, and the key of the store's hash."""
    group = uuid4().hex
    store = await open_store(f"{redis_url}?group={group}")
    client = Redis.from_url(redis_url)
    try:
        yield store, client, f"kpl:coordination:{group}"
    finally:
        await client.aclose()
        await store.aclose()


async def test_a_claim_from_before_redis_lost_its_data_is_not_valid(redis: RedisPlace) -> None:
    """After a flush, a restart or a failover to a stale replica no version may repeat."""
    store, client, key = redis
    versions = []
    for _ in range(20):
        before = (await store.write(SUMMARY_NAME, b"mine")).version
        await client.delete(key)
        versions += [before, (await store.write(SUMMARY_NAME, b"somebody else's")).version]
        assert (await store.write(SUMMARY_NAME, b"late", expected=before)).version is None
        assert (await store.read(SUMMARY_NAME)).body == b"somebody else's"
    assert len(set(versions)) == len(versions)


async def test_scripts_that_redis_evicted_are_sent_again(redis: RedisPlace) -> None:
    store, client, _ = redis
    await store.write("any.json", b"1")
    await client.script_flush()
    assert (await store.read("any.json")).body == b"1"


async def test_foreign_data_in_the_hash_stops_no_worker(redis: RedisPlace) -> None:
    store, client, key = redis
    await store.write("report-ours", b"1")
    await client.hset(key, mapping={b"report-\xff": b"7:x", b"report-theirs": b"text", b":versions": b"garbage"})
    assert set((await store.read_all("report-")).bodies.values()) == {b"1", b"x", b""}
    assert (await store.write("report-ours", b"2")).version
    assert (await store.write("report-theirs", b"2", expected="1")).version is None
    with pytest.raises(StoreFailed, match="use another group") as failed:
        await store.read("report-theirs")
    assert failed.value.reason == "garbage"


async def _out_of_memory(client: Redis, key: str) -> None:
    await client.config_set("maxmemory", 1)


async def _replica(client: Redis, key: str) -> None:
    await client.execute_command("REPLICAOF", LOOPBACK, "1")


async def _no_scripts(client: Redis, key: str) -> None:
    await client.execute_command("ACL", "SETUSER", "default", "-eval")


async def _no_writes(client: Redis, key: str) -> None:
    await client.execute_command("ACL", "SETUSER", "default", "-hset")


async def _other_program(client: Redis, key: str) -> None:
    await client.set(key, "text")


@pytest.mark.parametrize(
    ("cause", "reason", "text"),
    [
        (_out_of_memory, "limit", "OOM; give the server more memory"),
        (_replica, "down", "READONLY; name the primary"),
        (_no_scripts, "denied", "NOPERM; check user"),
        (_no_writes, "denied", "NOPERM; check user"),
        (_other_program, "garbage", "WRONGTYPE; use another group"),
    ],
)
async def test_each_redis_error_has_its_own_reason(
    redis: RedisPlace, cause: Callable[[Redis, str], Awaitable[None]], reason: str, text: str
) -> None:
    store, client, key = redis
    await cause(client, key)
    try:
        with pytest.raises(StoreFailed, match=text) as failed:
            await store.write("any.json", b"1")
    finally:
        await client.execute_command("ACL", "SETUSER", "default", "+@all")
        await client.execute_command("REPLICAOF", "NO", "ONE")
        await client.config_set("maxmemory", 0)
    assert failed.value.reason == reason


@pytest.mark.parametrize("place", ["s3://nobodys-bucket/prefix", "dynamodb://nobodys-table/group"])
async def test_a_missing_bucket_or_table_has_the_reason_missing(place: str, moto: Emulator) -> None:
    store = await open_store(f"{place}?endpoint_url={moto.endpoint_url}&region=us-east-1")
    try:
        with pytest.raises(StoreFailed, match="check its name and region") as failed:
            await store.write("any.json", b"1")
        assert failed.value.reason == "missing"
    finally:
        await store.aclose()


async def test_an_unreachable_server_has_the_reason_down() -> None:
    for url in ("s3://b/p?endpoint_url=http://127.0.0.1:1&region=us-east-1", "redis://user:secret@127.0.0.1:1/0"):
        store = await open_store(url)
        try:
            with pytest.raises(StoreFailed, match="network") as failed:
                await store.read("any.json")
            assert failed.value.reason == "down"
            assert "secret" not in str(failed.value)
        finally:
            await store.aclose()


async def test_a_wrong_password_has_the_reason_denied(redis_url: str) -> None:
    store = await open_store(redis_url.replace("redis://", "redis://nobody:wrong@"))
    try:
        with pytest.raises(StoreFailed, match="check user, password and rights") as failed:
            await store.read("any.json")
        assert failed.value.reason == "denied"
        assert "wrong" not in str(failed.value)
    finally:
        await store.aclose()
