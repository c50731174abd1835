"""The limiter on moto's DynamoDB, with moto's S3 as the workers' store: boto3 in threads, aiobotocore in tasks."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any
from uuid import uuid4

import anyio
import boto3
import msgspec
import pytest
from aiobotocore.session import get_session
from botocore.config import Config

from kpl_integrations.dynamodb_limits import (
    AsyncDistributedRateAggregator,
    AsyncDistributedRateWorker,
    DistributedRateAggregator,
    DistributedRateWorker,
    SessionLimiter,
)
from kpl_integrations.dynamodb_limits.proportional import Consumption, ConsumptionSummary
from tests.interop.emulators import Emulator
from tests.support.waiting import wait_until

WORKERS = 20
AGGREGATE_WRITES = 40.0
SYNC_SECONDS = 0.5
ONE_ATTEMPT = Config(retries={"total_max_attempts": 1})


class Session:
    """A boto3 session whose clients use moto."""

    def __init__(self, moto: Emulator) -> None:
        self._session = boto3.Session(region_name="us-east-1")
        self._endpoint_url = moto.endpoint_url
        self.events = self._session.events

    def client(self, service: str) -> Any:
        return self._session.client(service, endpoint_url=self._endpoint_url, config=ONE_ATTEMPT)  # type: ignore[call-overload]


@pytest.fixture
def table(moto: Emulator) -> Iterator[str]:
    name = f"table-{uuid4().hex}"
    client = Session(moto).client("dynamodb")
    client.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    yield name
    client.delete_table(TableName=name)


@pytest.fixture
def bucket(moto: Emulator) -> str:
    name = f"bucket-{uuid4().hex}"
    Session(moto).client("s3").create_bucket(Bucket=name)
    return name


def press(client: Any, table: str, stopping: threading.Event) -> None:
    number = 0
    while not stopping.is_set():
        number += 1
        client.put_item(TableName=table, Item={"id": {"S": f"{threading.get_ident()} {number}"}})


@contextmanager
def busy_workers(
    moto: Emulator, table: str, bucket: str, count: int, **options: Any
) -> Iterator[list[DistributedRateWorker]]:
    """Run workers, each with a thread that writes as fast as it may."""
    stopping = threading.Event()
    workers = []
    with ExitStack() as running:
        for index in range(count):
            session = Session(moto)
            worker = DistributedRateWorker(
                session, bucket, "job", aggregate_max_write_rate=AGGREGATE_WRITES, worker_id=str(index), **options
            )
            running.callback(worker.cleanup)
            workers.append(worker)
            thread = threading.Thread(target=press, args=(session.client("dynamodb"), table, stopping))
            thread.start()
            running.callback(thread.join)
            running.callback(stopping.set)
        yield workers


def test_twenty_boto3_workers_stay_within_the_shared_capacity(moto: Emulator, table: str, bucket: str) -> None:
    with ExitStack() as running:
        aggregator = DistributedRateAggregator(Session(moto), bucket, "job", interval=SYNC_SECONDS)
        running.callback(aggregator.stop)
        options: dict[str, Any] = {
            "worker_max_write_rate": AGGREGATE_WRITES / 2,
            "policy": "proportional",
            "sync_interval": SYNC_SECONDS,
            "burst_seconds": 0.5,
        }
        workers = running.enter_context(busy_workers(moto, table, bucket, WORKERS, **options))
        time.sleep(16 * SYNC_SECONDS)
        before, began = sum(worker.limiter.totals()[1] for worker in workers), time.monotonic()
        limits = []
        for _ in range(12):
            time.sleep(SYNC_SECONDS)
            limits.append(sum(worker.limiter.rates[1] for worker in workers))
        rate = (sum(worker.limiter.totals()[1] for worker in workers) - before) / (time.monotonic() - began)
    assert rate <= 1.15 * AGGREGATE_WRITES
    # On a machine of any speed: no worker is limited to a trickle.
    assert fmean(limits) >= 0.8 * AGGREGATE_WRITES
    consumed = Session(moto).client("dynamodb").scan(TableName=table, Select="COUNT")["Count"]
    assert sum(worker.limiter.totals()[1] for worker in workers) == pytest.approx(consumed, abs=WORKERS)


def test_the_objects_are_those_of_the_example(moto: Emulator, table: str, bucket: str) -> None:
    session = Session(moto)
    worker = DistributedRateWorker(session, bucket, "job/", autostart=False, worker_id="one", policy="proportional")
    assert worker.limiter.rates == (1_500.0, 500.0)
    aggregator = DistributedRateAggregator(session, bucket, "job/", autostart=False)
    s3 = session.client("s3")
    worker.sync_once()
    first = msgspec.json.decode(s3.get_object(Bucket=bucket, Key="job/worker-one.json")["Body"].read())
    assert set(first) == {"worker_id", "timestamp", "read_rate", "write_rate"}
    assert (first["worker_id"], first["read_rate"], first["write_rate"]) == ("one", 0.0, 0.0)
    client = session.client("dynamodb")
    for number in range(5):
        client.put_item(TableName=table, Item={"id": {"S": str(number)}})
    worker.sync_once()
    s3.put_object(Bucket=bucket, Key="job/worker-garbage.json", Body=b"\xff")
    s3.put_object(Bucket=bucket, Key="job/worker-stale.json", Body=b'{"timestamp": 1, "read_rate": 1e9}')
    for number in range(30):
        other = msgspec.json.encode(Consumption(timestamp=time.time(), read_rate=10.0, worker_id=str(number)))
        s3.put_object(Bucket=bucket, Key=f"job/worker-other-{number}.json", Body=other)
    summary = aggregator.aggregate_once()
    assert summary.active_workers == 31
    assert summary.aggregated_read_rate == pytest.approx(300.0)
    assert (summary.aggregated_write_rate or 0.0) > 0
    stored = msgspec.json.decode(s3.get_object(Bucket=bucket, Key="job/summary.json")["Body"].read())
    assert set(stored) == {
        "timestamp",
        "aggregated_read_rate",
        "aggregated_write_rate",
        "active_workers",
        "aggregation_time_utc",
    }
    # Numbers as text, and null, as other writers of these objects leave them.
    s3.put_object(
        Bucket=bucket,
        Key="job/worker-text.json",
        Body=b'{"timestamp": "%.1f", "read_rate": "7.5", "write_rate": null}' % time.time(),
    )
    assert aggregator.aggregate_once().aggregated_read_rate == pytest.approx(307.5)
    stale = ConsumptionSummary(timestamp=time.time() - 16, aggregated_read_rate=200_000.0)
    s3.put_object(Bucket=bucket, Key="job/summary.json", Body=msgspec.json.encode(stale))
    worker.sync_once()
    assert worker.limiter.rates == (1_500.0, 500.0)
    too_much = ConsumptionSummary(timestamp=time.time(), aggregated_read_rate=200_000.0, aggregated_write_rate=0.0)
    s3.put_object(Bucket=bucket, Key="job/summary.json", Body=msgspec.json.encode(too_much))
    worker.sync_once()
    # 0.6 * 1,500 + 0.4 * 750; if nothing was written at all: scale 1.
    assert worker.limiter.rates == pytest.approx((1_200.0, 500.0))
    worker.cleanup()
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket, Prefix="job/worker-one.json")


@pytest.mark.anyio
async def test_aiobotocore_clients_stay_within_the_shared_capacity(moto: Emulator, table: str, bucket: str) -> None:
    session = get_session()
    options = {"region_name": "us-east-1", "endpoint_url": moto.endpoint_url}
    async with session.create_client("s3", **options) as s3:
        # In a shorter interval the rate that is measured would be that of the machine's stalls.
        aggregator = AsyncDistributedRateAggregator(s3, bucket, "job", interval=1.0)
        worker = AsyncDistributedRateWorker(
            session, s3, bucket, "job", sync_interval=1.0, aggregate_max_write_rate=50, policy="proportional"
        )
        async with session.create_client("dynamodb", **options) as client:
            numbers = itertools.count()

            async def press_while(condition: Callable[[], bool]) -> None:
                while condition():
                    await client.put_item(TableName=table, Item={"id": {"S": str(next(numbers))}})

            # Before the first summary each worker has its own maximum.
            with anyio.fail_after(60):
                await press_while(lambda: worker.limiter.rates[1] > 50)
            before, began = worker.limiter.totals()[1], time.monotonic()
            await press_while(lambda: time.monotonic() < began + 4)
            seconds, written = time.monotonic() - began, worker.limiter.totals()[1] - before
        summary = await aggregator.aggregate_once()
        await worker.stop()
        await aggregator.stop()
    assert summary.active_workers == 1
    # Up to one second's worth may have been kept for a burst, and comes on top.
    assert written <= 50 * (seconds + 1) * 1.3


def test_boto3_workers_share_the_capacity_by_leases_in_the_bucket_without_an_aggregator(
    moto: Emulator, table: str, bucket: str
) -> None:
    with busy_workers(moto, table, bucket, 4, sync_interval=2.0, max_workers=4) as workers:
        wait_until(lambda: sum(worker.limiter.rates[1] for worker in workers) >= 0.9 * AGGREGATE_WRITES, "the shares")
        before, began = sum(worker.limiter.totals()[1] for worker in workers), time.monotonic()
        time.sleep(5.0)
        rate = (sum(worker.limiter.totals()[1] for worker in workers) - before) / (time.monotonic() - began)
        names = [each["Key"] for each in Session(moto).client("s3").list_objects_v2(Bucket=bucket)["Contents"]]
        assert sum(worker.limiter.rates[1] for worker in workers) <= 1.01 * AGGREGATE_WRITES
    assert rate <= 1.1 * AGGREGATE_WRITES
    assert sorted(names) == ["job/leases.json", *(f"job/report-{index}.json" for index in range(4))]
    left = Session(moto).client("s3").list_objects_v2(Bucket=bucket)["Contents"]
    assert [each["Key"] for each in left] == ["job/leases.json"]


def test_capacity_of_every_kind_of_call_is_read_from_moto(moto: Emulator, table: str) -> None:
    session = Session(moto)
    limiter = SessionLimiter(read_rate=1e6, write_rate=1e6)
    limiter.attach(session)
    client = session.client("dynamodb")
    client.put_item(TableName=table, Item={"id": {"S": "1"}})
    assert limiter.totals()[1] > 0
    client.get_item(TableName=table, Key={"id": {"S": "1"}})
    client.scan(TableName=table)
    assert limiter.totals()[0] > 0
