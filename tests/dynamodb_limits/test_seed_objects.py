"""The objects of policy "proportional" have the keys of AWS's example, and clocks that differ are logged."""

import asyncio
import io
import json
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from kpl_integrations.dynamodb_limits import (
    AsyncDistributedRateAggregator,
    AsyncDistributedRateWorker,
    DistributedRateAggregator,
    DistributedRateWorker,
)

PREFIXES = ["job-2", "job-2/", "", "a/b"]
_ANSWERED: dict[str, Any] = {"ResponseMetadata": {"HTTPHeaders": {"date": "Wed, 25 Nov 2026 12:00:00 GMT"}}}
LOGGER = "kpl_integrations.dynamodb_limits.distributed_rate"


class Bucket:
    """An S3 client whose only bucket is a dict, with the calls of boto3."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put_object(self, *, Key: str, Body: bytes, **_: object) -> dict[str, Any]:  # noqa: N803 - boto3's names
        self.objects[Key] = Body
        return {"ETag": str(hash(Body)), **_ANSWERED}

    def get_object(self, *, Key: str, **_: object) -> dict[str, Any]:  # noqa: N803
        if Key not in self.objects:
            raise ClientError({"Error": {"Code": "NoSuchKey"}, **_ANSWERED}, "GetObject")  # type: ignore[typeddict-item]
        return {"Body": io.BytesIO(self.objects[Key]), "ETag": str(hash(self.objects[Key])), **_ANSWERED}

    def delete_object(self, *, Key: str, **_: object) -> None:  # noqa: N803
        del self.objects[Key]

    def list_objects_v2(self, *, Prefix: str, **_: object) -> dict[str, Any]:  # noqa: N803
        found = [{"Key": key, "ETag": str(hash(body))} for key, body in self.objects.items() if key.startswith(Prefix)]
        return {"Contents": found, **_ANSWERED}

    def get_paginator(self, _: str) -> Any:
        return SimpleNamespace(paginate=lambda **options: [self.list_objects_v2(**options)])


class AsyncBucket:
    """The same with the calls of aiobotocore."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(**options: Any) -> Any:
            answer = getattr(self._bucket, name)(**options)
            if "Body" in (answer or {}):
                content = answer["Body"].read()
                answer["Body"] = SimpleNamespace(read=lambda: asyncio.sleep(0, content))
            return answer

        return call


def session_of(bucket: Bucket) -> Any:
    return SimpleNamespace(client=lambda _: bucket, events=SimpleNamespace(register=lambda *_: None))


def report(worker: str, *, rate: float = 10.0, age: float = 0.0) -> bytes:
    """Return the object that the example's worker writes."""
    return json.dumps(
        {"worker_id": worker, "timestamp": time.time() - age, "read_rate": rate, "write_rate": 0.0}
    ).encode()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_is_used_as_the_example_uses_it(prefix: str) -> None:
    bucket = Bucket()
    # One of the example's workers, one of another job, and one of this job with another file name.
    bucket.objects = {
        f"{prefix}worker-theirs.json": report("theirs"),
        f"{prefix}0worker-other.json": report("other", rate=1e9),
        f"{prefix}/worker-other.json": report("other", rate=1e9),
    }
    worker = DistributedRateWorker(
        session_of(bucket), "b", prefix, autostart=False, worker_id="ours", policy="proportional"
    )
    worker.sync_once()
    assert f"{prefix}worker-ours.json" in bucket.objects
    summary = DistributedRateAggregator(session_of(bucket), "b", prefix, autostart=False).aggregate_once()
    assert (summary.active_workers, summary.aggregated_read_rate) == (2, 10.0)
    assert f"{prefix}summary.json" in bucket.objects
    worker.sync_once()
    worker.cleanup()
    assert f"{prefix}worker-ours.json" not in bucket.objects


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_prefix_is_used_as_the_example_uses_it_on_an_event_loop(prefix: str) -> None:
    bucket = Bucket()
    bucket.objects = {f"{prefix}worker-theirs.json": report("theirs"), f"{prefix}0worker-other.json": report("other")}
    client: Any = AsyncBucket(bucket)
    worker = AsyncDistributedRateWorker(
        session_of(bucket), client, "b", prefix, autostart=False, worker_id="ours", policy="proportional"
    )
    await worker.sync_once()
    summary = await AsyncDistributedRateAggregator(client, "b", prefix, autostart=False).aggregate_once()
    assert (summary.active_workers, summary.aggregated_read_rate) == (2, 10.0)
    assert {f"{prefix}worker-ours.json", f"{prefix}summary.json"} <= set(bucket.objects)
    await worker.sync_once()
    await worker.cleanup()
    assert f"{prefix}worker-ours.json" not in bucket.objects


@pytest.mark.parametrize(
    ("age", "words"),
    [
        (60.0, "summary.json is 60 s old: its aggregator has stopped, or a clock differs; keeping the current limits"),
        (-60.0, "summary.json is 60 s in the future: the clocks of its aggregator and of this worker differ"),
    ],
)
def test_a_summary_of_another_time_is_logged_once(caplog: pytest.LogCaptureFixture, age: float, words: str) -> None:
    bucket = Bucket()
    worker = DistributedRateWorker(session_of(bucket), "b", "job/", autostart=False, policy="proportional")
    summary = {"timestamp": time.time() - age, "aggregated_read_rate": 1e9}
    bucket.objects["job/summary.json"] = json.dumps(summary).encode()
    rates = worker.limiter.rates
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(3):
            worker.sync_once()
    assert [record.getMessage().partition(words)[1] for record in caplog.records] == [words]
    assert worker.limiter.rates == rates
    bucket.objects["job/summary.json"] = json.dumps(summary | {"timestamp": time.time()}).encode()
    worker.sync_once()
    assert worker.limiter.rates != rates


def test_a_worker_with_another_clock_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket()
    bucket.objects = {
        "job/worker-late.json": report("late", age=60.0),
        "job/worker-early.json": report("early", age=-60.0),
        "job/worker-right.json": report("right"),
    }
    aggregator = DistributedRateAggregator(session_of(bucket), "b", "job/", autostart=False)
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(3):
            assert aggregator.aggregate_once().active_workers == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the report of worker 'early' is 60 s in the future: its clock differs from this one; set both by NTP",
        "the report of worker 'late' is 60 s old: it has ended, or its clock is late; it does not count",
    ]
