"""Metadata may hold any object of the caller, also one that holds the delivery. The producer lets go of it at the end.

Deliveries and outcomes are not tracked by the garbage collector. So if a final outcome still had its metadata, the
cycle request -> delivery -> metadata -> request would stay for the life of the process.
"""

import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core import Deliveries, Delivery, Producer, UserRecord
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.records.outcome import Outcome
from kpl_core.testing import RecordError
from tests.support.durability_scene import STREAM, producer, service

pytestmark = pytest.mark.anyio

COUNT = 50


class Request:
    """What a caller keeps of one of its requests: the metadata names it, and it names the delivery."""

    delivery: Delivery | None = None
    deliveries: Deliveries | None = None


async def put_one_by_one(to: Producer) -> list[Request]:
    requests = [Request() for _ in range(COUNT)]
    for number, request in enumerate(requests):
        request.delivery = to.put_nowait(
            STREAM, partition_key=f"key {number % 7}", data=b"%d" % number, metadata={"request": request}
        )
    return requests


async def put_many(to: Producer) -> list[Request]:
    request = Request()
    records = [UserRecord(f"key {number}", b"x", metadata={"request": request}) for number in range(COUNT)]
    request.deliveries = await to.put_many(STREAM, records)
    return [request]


ENDINGS: list[tuple[str, Sequence[RecordError], str | None, dict[str, Any]]] = [
    ("delivered in aggregated records", (), None, {}),
    ("delivered alone", (), None, {"aggregation_enabled": False}),
    ("delivered after a retry", (RecordError(),), None, {}),
    ("failed", (RecordError("ValidationException"),), "ValidationException", {}),
    ("expired", (RecordError(),), "Expired", {"record_ttl_ms": 100}),
    ("spooled", (RecordError(),), "Expired", {"record_ttl_ms": 100, "spool": "overflow"}),
    ("written ahead", (), None, {"spool": "write_ahead"}),
    ("dead-lettered", (RecordError("ValidationException"),), "ValidationException", {"dead_letters": True}),
]


def files(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    made = dict(options)
    if "spool" in made:
        made["spool"] = SpoolOptions(path=folder / "spool.db", mode=made["spool"], commit_interval_ms=1.0)
    if "dead_letters" in made:
        made["dead_letters"] = DeadLetterOptions(path=folder / "letters.db", redrive=False)
    return made


@pytest.mark.parametrize("puts", [put_one_by_one, put_many])
@pytest.mark.parametrize(("ending", "errors", "code", "options"), ENDINGS, ids=[each[0] for each in ENDINGS])
async def test_a_record_that_is_final_keeps_no_object_of_its_caller(
    ending: str,
    errors: Sequence[RecordError],
    code: str | None,
    options: dict[str, Any],
    puts: Callable[[Producer], Awaitable[list[Request]]],
    tmp_path: Path,
):
    transport = service()
    for error in errors:
        transport.kinesis.faults.add(error)
    async with producer(transport, **files(options, tmp_path)) as orders:
        requests = await puts(orders)
        if ending == "delivered after a retry":
            await anyio.sleep(0.1)
            transport.kinesis.faults.clear()
        deliveries = [delivery for each in requests for delivery in each.deliveries or [each.delivery] if delivery]
        results = [await delivery for delivery in deliveries]
        assert {(result.error_code, len(results)) for result in results} == {(code, COUNT)}
        alive = [weakref.ref(request) for request in requests]
        del requests, deliveries
    # Not before the close: the thread of the spool holds its latest batch for a moment.
    gc.collect()
    assert sum(each() is not None for each in alive) == 0


def test_a_user_record_that_moved_leaves_no_metadata_behind():
    first, second = Outcome(), Outcome()
    Delivery(first, 0).note({"of": "the first"})
    Delivery(first, 1).note({"of": "the second"})
    first.move(0, second, 0)
    assert first.metadata == {1: {"of": "the second"}}
    first.move(1, second, 1)
    assert not first.metadata


def test_a_cycle_through_a_user_record_is_collected():
    request: Any = Request()
    request.record = UserRecord("key", b"data", metadata={"request": request})
    alive = weakref.ref(request)
    del request
    gc.collect()
    assert alive() is None


def test_a_user_record_without_metadata_is_nothing_that_a_collection_visits():
    assert not gc.is_tracked(UserRecord("key", b"data", "7", flow="tenant", tier="bulk"))
