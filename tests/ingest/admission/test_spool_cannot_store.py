"""While the spool cannot store: who gets 503 and why, what happens to the others, and how it ends."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core import Config, FairnessPolicy
from kpl_core.options.reliability import SpoolOptions
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.ingest import IngestGateway
from tests.support.durability_scene import assert_invariant, consumed, make_writable
from tests.support.gateway_scene import Answer, Client, kinesis, open_gateway, records
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
OUTAGE = (ErrorAnswer("InternalFailure"), When(operation="PutRecords"))


async def stop_storing(gateway: IngestGateway) -> None:
    """Let the spool fail, and the gateway find out."""
    await make_writable(gateway.producer, writable=False)
    answer = await Client(gateway).post(records(1, first=900), ack="spooled")
    assert answer.status == 503
    assert "read-only" in answer.json()["detail"]


async def first_refusal(client: Client) -> tuple[int, Answer]:
    """Put records until a request is refused; return how many were accepted before, and the answer."""
    accepted = 0
    while (answer := await client.post(records(20), ack="queued")).status == 202:
        accepted += 20
        await anyio.sleep(0.1)
    return accepted, answer


async def test_an_open_breaker_refuses_queued_records_and_those_accepted_before_are_counted_as_failed(
    tmp_path: Path,
) -> None:
    transport = kinesis()
    settings: dict[str, Any] = {"spool": tmp_path / "s.db", "record_ttl_ms": 2_000, "aggregation_enabled": False}
    async with open_gateway(transport, **settings) as gateway:
        await stop_storing(gateway)
        outage = transport.kinesis.faults.add(*OUTAGE)
        accepted, refused = await first_refusal(Client(gateway))
        assert refused.status == 503
        assert "the circuit breaker of stream orders is open" in refused.json()["detail"]
        await until(lambda: gateway.producer.report().buffered == 0)
        report = gateway.producer.report()
        # With the one that found out.
        assert (report.failed_total, report.spooled, report.dead_lettered) == (accepted + 1, 0, 0)
        assert_invariant(report)
        transport.kinesis.faults.remove(outage)
        await make_writable(gateway.producer, writable=True)
        await until(lambda: not gateway.producer.unready())


async def test_a_full_buffer_refuses_queued_records(tmp_path: Path) -> None:
    transport = kinesis(latency_seconds=0.5)
    async with open_gateway(transport, spool=tmp_path / "s.db", max_outstanding_records=100) as gateway:
        await stop_storing(gateway)
        client = Client(gateway)
        assert (await client.post(records(50), ack="queued")).status == 202
        refused = await client.post(records(60), ack="queued")
        assert refused.status == 503
        assert "no room" in refused.json()["detail"]
        await until(lambda: gateway.producer.report().delivered == 50)


async def test_a_key_with_records_in_the_spool_is_refused_where_the_order_of_keys_is_promised(tmp_path: Path) -> None:
    transport = kinesis()
    outage = transport.kinesis.faults.add(*OUTAGE)
    config = Config(
        region="us-east-1",
        ordering="per_key",
        fairness=FairnessPolicy(),
        spool=SpoolOptions(path=tmp_path / "s.db", mode="write_ahead", failure="bypass"),
    )
    async with open_gateway(transport, config=config, spool=tmp_path / "s.db") as gateway:
        client = Client(gateway)
        first = {"partition_key": "first", "data": "1"}
        assert (await client.post(first, ack="spooled")).status == 202
        await stop_storing(gateway)
        state = gateway.producer.spool_state
        assert state is not None
        # Before the keys are known, every key may be in the spool.
        assert (await client.post({"partition_key": "other", "data": "1"}, ack="queued")).status == 503
        await until(lambda: state.keys is not None)
        assert state.keys == {("orders", "first")}
        refused = await client.post({"partition_key": "first", "data": "2"}, ack="queued")
        assert refused.status == 503
        assert "must not overtake those of its partition key" in refused.json()["detail"]
        assert (await client.post({"partition_key": "other", "data": "1"}, ack="queued")).status == 202
        transport.kinesis.faults.remove(outage)
        await until(lambda: state.keys == frozenset())
        assert (await client.post({"partition_key": "first", "data": "2"}, ack="delivered")).status == 200
    assert consumed(transport).keys() == {b"1", b"2"}


async def test_the_idempotency_key_of_a_refused_request_is_free_and_that_of_a_bypassed_one_is_used(
    tmp_path: Path,
) -> None:
    transport = kinesis()
    async with open_gateway(transport, spool=tmp_path / "s.db") as gateway:
        await stop_storing(gateway)
        client = Client(gateway)
        for _ in range(2):
            assert (await client.post(records(2), ack="spooled", idempotency_key="one")).status == 503
            assert (await client.post(records(2), ack="queued", idempotency_key="two")).status == 202
        assert gateway.producer.spool_state.bypassed == 2  # type: ignore[union-attr] # it has a spool
        await make_writable(gateway.producer, writable=True)
        await until(lambda: not gateway.producer.spool_state.why)  # type: ignore[union-attr] # it has a spool
        assert (await client.post(records(2), ack="spooled", idempotency_key="one")).status == 202
        assert gateway.producer.spool_state.bypassed == 2  # type: ignore[union-attr] # it has a spool


async def test_a_record_that_would_be_a_dead_letter_has_failed_while_the_disk_takes_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = kinesis()
    transport.kinesis.faults.add(RecordError("ValidationException"), When(record=lambda key, _: key == "poison"))
    settings: dict[str, Any] = {"spool": tmp_path / "s.db", "aggregation_enabled": False}
    async with open_gateway(transport, **settings) as gateway:
        client, poison = Client(gateway), {"partition_key": "poison", "data": "x"}
        assert (await client.post(poison, ack="queued")).status == 202
        spool = gateway.producer.spool
        assert spool is not None
        # The commit of the letter deletes the record; `depth` already counts it before.
        await until(lambda: (spool.statistics().letters, spool.statistics().records) == (1, 0))
        await stop_storing(gateway)
        assert (await client.post(poison, ack="queued")).status == 202
        await until(lambda: gateway.producer.report().failed == {"NotSpooled": 1, "ValidationException": 1})
        assert gateway.producer.report().dead_lettered == 1
        await make_writable(gateway.producer, writable=True)
    assert "were not delivered: 1 ValidationException" in caplog.text


async def test_records_that_are_kept_on_no_disk_are_refused_too_with_refuse(tmp_path: Path) -> None:
    async with open_gateway(kinesis(), spool=tmp_path / "s.db", spool_failure="refuse") as gateway:
        await stop_storing(gateway)
        client = Client(gateway)
        assert gateway.producer.unready() == ["the spool cannot store records"]
        wire = b'{"StreamName":"orders","Records":[{"PartitionKey":"k","Data":"eA=="}]}'
        target = {"x-amz-target": "Kinesis_20131202.PutRecords", "content-type": "application/x-amz-json-1.1"}
        assert (await client.call("POST", "/", wire, headers=target)).status in {500, 503}
        assert gateway.producer.report().delivered == 0
        await make_writable(gateway.producer, writable=True)
        await until(lambda: not gateway.producer.unready())
        assert (await client.call("POST", "/", wire, headers=target)).status == 200
