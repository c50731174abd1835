"""An answer never claims more than what happened."""

from collections import Counter
from pathlib import Path
from random import Random

import anyio
import pytest

from kpl_core import Deliveries, Delivery, decode
from kpl_core.records.outcome import Outcome
from kpl_core.testing import BadBody, ErrorAnswer, RecordError, When
from kpl_integrations.ingest.http.answers import all_delivered, delivered_answer, record_answers
from kpl_integrations.ingest.tenants import Tenant
from tests.support.gateway_scene import (
    JSON,
    NDJSON,
    STREAM,
    Client,
    KnownTenants,
    gateway_of,
    kinesis,
    open_gateway,
    records,
)
from tests.support.virtual_time import virtual_time_backend as backend_in_virtual_time

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"


def stored(transport):
    """User records a consumer finds: key and data, with shard and sequence number."""
    found = []
    for record in transport.kinesis.records(STREAM):
        inside = decode(record.data)
        users = [(record.partition_key, record.data)] if inside is None else [(u.partition_key, u.data) for u in inside]
        found += [(key, data, record.shard_id, record.sequence_number) for key, data in users]
    return found


async def test_queued_is_answered_before_anything_is_sent():
    transport = kinesis(latency_seconds=5.0)
    async with open_gateway(transport) as gateway:
        # The stream is looked up with the first request, and never again.
        assert (await Client(gateway).post(records(1))).status == 202
        before = anyio.current_time()
        answer = await Client(gateway).post(records(3))
        assert anyio.current_time() == before
        assert (answer.status, answer.json()) == (202, {"ack": "queued", "accepted": 3})
        assert not transport.requests


async def test_delivered_names_shard_and_sequence_number_of_each_in_order():
    transport = kinesis(4)
    async with open_gateway(transport) as gateway:
        answer = await Client(gateway).post(records(50), ack="delivered")
        body = answer.json()
        assert (answer.status, body["ack"], body["delivered"], body["failed"]) == (200, "delivered", 50, 0)
        places = {(key, data): (shard, number) for key, data, shard, number in stored(transport)}
        for record, result in zip(records(50), body["records"], strict=True):
            expected = places[record["partition_key"], record["data"].encode()]
            assert (result["shard_id"], result["sequence_number"]) == expected


# The spool writes in a separate thread, and virtual time would pass while it writes.
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_spooled_is_answered_after_the_spool_has_the_records(tmp_path: Path):
    transport = kinesis(latency_seconds=0.2)
    async with open_gateway(transport, spool=tmp_path / "spool.db") as gateway:
        answer = await Client(gateway).post(records(7), ack="spooled")
        assert (answer.status, answer.json()) == (202, {"ack": "spooled", "accepted": 7})
        assert gateway.producer.spool is not None
        assert gateway.producer.spool.statistics().records == 7
    assert gateway.report is not None
    assert gateway.report.delivered == 7


async def test_the_query_has_precedence_over_the_header_and_both_over_the_tenants_default():
    tenants = KnownTenants(Tenant(id="t", default_ack="delivered"))
    async with open_gateway(directory=tenants) as gateway:
        client = Client(gateway, "t")
        assert (await client.post(records(1))).json()["ack"] == "delivered"
        assert (await client.post(records(1), x_ack="queued")).json()["ack"] == "queued"
        assert (await client.post(records(1), ack="delivered", x_ack="queued")).json()["ack"] == "delivered"


async def test_partial_accepts_the_valid_records_and_names_each_invalid_one():
    transport = kinesis()
    body = b'{"partition_key":"a","data":"1"}\n{"data":null}\nnonsense\n{"partition_key":"b","data":"2"}'
    async with open_gateway(transport) as gateway:
        client = Client(gateway)
        refused = await client.call("POST", PATH, body, headers={"content-type": NDJSON})
        assert (refused.status, refused.json()["error_count"]) == (400, 2)
        wrong_type = await client.post({"records": [{"partition_key": 42, "data": "x"}]})
        assert wrong_type.json()["detail"].endswith("records[0]: partition_key: Expected `str | null`, got `int`")
        taken = await client.call("POST", f"{PATH}?partial=true&ack=delivered", body, headers={"content-type": NDJSON})
        answered = taken.json()
        assert (taken.status, answered["delivered"]) == (200, 2)
        assert [bool(each.get("sequence_number")) for each in answered["records"]] == [True, False, False, True]
        assert [each["index"] for each in answered["rejected"]] == [1, 2]
        queued = await client.call("POST", f"{PATH}?partial=true", body, headers={"content-type": NDJSON})
        assert (queued.status, queued.json()["accepted"], len(queued.json()["rejected"])) == (202, 2, 2)
    assert Counter(data for _, data, _, _ in stored(transport)) == {b"1": 2, b"2": 2}


async def test_a_client_that_disconnects_does_not_cancel_accepted_records():
    transport = kinesis(latency_seconds=1.0)
    async with open_gateway(transport) as gateway:
        assert (await Client(gateway).post(records(1))).status == 202
        async with anyio.create_task_group() as tasks:

            async def impatient() -> None:
                await Client(gateway).post(records(10, first=100), ack="delivered")

            tasks.start_soon(impatient)
            await anyio.sleep(0.5)
            tasks.cancel_scope.cancel()
    assert gateway.report is not None
    assert gateway.report.delivered == 11
    assert len(stored(transport)) == 11


async def test_a_client_that_disconnects_before_its_body_is_complete_puts_nothing():
    messages = [{"type": "http.request", "body": b'{"partition', "more_body": True}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    async with open_gateway() as gateway:
        headers = [(b"content-type", JSON.encode())]
        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}
        await gateway(scope, receive, send)
        assert not sent
        assert gateway.producer.report().accepted == 0


# Seconds each; twenty thousand through sockets are in tests/chaos. The other backend runs the same code.
@pytest.mark.parametrize("anyio_backend", [backend_in_virtual_time("asyncio")], ids=["asyncio"])
async def test_five_thousand_delivered_answers_are_true_under_random_faults_per_record():
    """Some records are throttled, some are rejected permanently, and some requests fail completely."""
    transport = kinesis(4, enforce_limits=False, chance=Random(8).random)
    faults = transport.kinesis.faults
    faults.add(RecordError(), When(operation="PutRecords", probability=0.1))
    faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords", probability=0.05))
    lost = {f"k{number}" for number in range(0, 50, 7)}
    # Alone in its Kinesis record, a user record is rejected by its own key.
    faults.add(
        RecordError("InternalFailure"), When(operation="PutRecords", record=lambda key, _: key in lost and key != "a")
    )
    claimed: set[tuple[bytes, str | None, str | None]] = set()
    denied: set[tuple[bytes, str | None, str | None]] = set()
    total = 5_000
    tenants = KnownTenants(Tenant(id="aggregated"), Tenant(id="alone", aggregation=False))
    options = {"record_ttl_ms": 2_000, "max_outstanding_records": 50_000}
    async with open_gateway(transport, tenants, **options) as gateway, anyio.create_task_group() as tasks:

        async def send(first: int) -> None:
            await anyio.sleep(first / 4_000)
            client = Client(gateway, "alone" if first % 200 else "aggregated")
            body = records(100, first=first)
            answer = await client.post(body, ack="delivered")
            assert answer.status in {200, 504}
            for record, result in zip(body, answer.json()["records"], strict=True):
                place = (record["data"].encode(), result.get("shard_id"), result.get("sequence_number"))
                (claimed if result.get("sequence_number") else denied).add(place)

        for first in range(0, total, 100):
            tasks.start_soon(send, first)
    assert len(claimed) + len(denied) == total
    assert len(claimed) > 1_000
    assert len(denied) > 250
    found = {(data, shard, number) for _, data, shard, number in stored(transport)}
    assert claimed <= found
    assert gateway.report is not None
    assert gateway.report.delivered == len(claimed)
    # Denied means rejected at each attempt, so the record is not in the stream.
    assert not {data for data, _, _ in denied} & {data for data, _, _ in found}


async def test_records_accepted_before_the_gateway_closed_are_answered_afterwards():
    transport = kinesis(latency_seconds=2.0)
    gateway = gateway_of(transport)
    answers = []
    async with gateway, anyio.create_task_group() as tasks:

        async def waiting() -> None:
            answers.append(await Client(gateway).post(records(5), ack="delivered"))

        tasks.start_soon(waiting)
        await anyio.sleep(0.5)
        assert (await Client(gateway).get("/readyz")).status == 200
        gateway.drain()
        assert (await Client(gateway).get("/readyz")).status == 503
        # Not ready, and still serving: clients that have not noticed yet lose nothing.
        assert (await Client(gateway).post(records(1, first=9))).status == 202
        report = await gateway.close()
        assert (await Client(gateway).post(records(1))).status == 503
    assert answers[0].status == 200
    assert report.accepted == report.delivered == 6


async def test_records_that_are_not_delivered_before_the_end_are_reported_to_the_waiting_client():
    transport = kinesis()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    gateway = gateway_of(transport, close_seconds=1.0)
    answers = []
    async with gateway, anyio.create_task_group() as tasks:

        async def waiting() -> None:
            answers.append(await Client(gateway).post(records(5), ack="delivered"))

        tasks.start_soon(waiting)
        await anyio.sleep(0.2)
        report = await gateway.close()
    assert answers[0].status == 503
    # Waiting for a retry, or in flight.
    assert {each["error_code"] for each in answers[0].json()["records"]} in ({"Shutdown"}, {"Unknown"})
    assert (report.accepted, report.failed_total) == (5, 5)


@pytest.mark.parametrize("count", [1, 2, 9])
async def test_the_answer_by_kinesis_record_is_that_by_record(count):
    outcomes = [Outcome() for _ in range(3)]
    deliveries = Deliveries.of([Delivery(outcomes[at % 3], at // 3) for at in range(count)])
    assert all_delivered(deliveries) is None
    for at, outcome in enumerate(outcomes):
        outcome.settle(shard_id=f"shardId-{at}", sequence_number=f"{at}" * 56)
    results = await deliveries.results()
    assert all_delivered(deliveries) == delivered_answer(results, record_answers(results), [], ())
    moved, failed = Outcome(), Outcome()
    outcomes[0].move(0, moved, 0)
    assert all_delivered(deliveries) is None
    failed.settle(shard_id="shardId-0")
    assert all_delivered(Deliveries.of([Delivery(failed, 0)])) is None


async def test_records_that_may_be_stored_are_not_said_to_be_undelivered():
    """Kinesis stores the records and its answer is cut; then the breaker opens."""
    transport = kinesis()
    async with open_gateway(transport) as gateway:
        transport.kinesis.faults.add(BadBody(), When(operation="PutRecords"))
        answer = await Client(gateway).post(records(3), ack="delivered")
        assert answer.status in {503, 504}
        assert answer.json()["detail"].startswith("none of the 3 records is known to be delivered; ")
        assert len(stored(transport)) >= 3
