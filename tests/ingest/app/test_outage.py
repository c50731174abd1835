"""An outage that outlasts every buffered record: requests are rejected during it and accepted after it."""

from pathlib import Path

import anyio
import pytest

from kpl_core.testing import ErrorAnswer, When
from tests.support.gateway_scene import STREAM, Client, kinesis, open_gateway, records

pytestmark = pytest.mark.anyio


async def test_a_gateway_accepts_records_after_an_outage_in_which_all_records_expired() -> None:
    transport = kinesis()
    outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    async with open_gateway(transport, record_ttl_ms=1_000, aggregation_enabled=False) as gateway:
        client = Client(gateway)
        seen: set[int] = set()
        for _ in range(100):
            answer = await client.post(records(20), ack="queued")
            seen.add(answer.status)
            if answer.status == 503:
                assert int(answer.headers["retry-after"]) >= 1
            await anyio.sleep(0.1)
        assert seen == {202, 503}
        transport.kinesis.faults.remove(outage)
        await anyio.sleep(6.0)
        assert (await client.post(records(20), ack="delivered")).status == 200


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_client_that_waits_for_delivery_learns_the_open_breaker_and_that_the_spool_has_its_records(
    tmp_path,
) -> None:
    transport = kinesis()
    outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    async with open_gateway(
        transport, spool=tmp_path / "spool.db", record_ttl_ms=300, aggregation_enabled=False
    ) as gateway:
        client = Client(gateway)
        refused: list[dict[str, str]] = []
        with anyio.fail_after(30):
            while not any(each["error_code"] == "BreakerOpen" for each in refused):
                answer = await client.post(records(20), ack="delivered")
                document = answer.json()
                counts = {name: document[name] for name in ("accepted", "delivered", "failed", "kept")}
                assert (answer.status, counts) == (200, {"accepted": 20, "delivered": 0, "failed": 20, "kept": 20})
                refused += document["records"]
        assert {each["kept"] for each in refused} == {"spooled"}
        assert all(each["error_message"].endswith("so do not send it again") for each in refused)
        stopped = {each["error_message"] for each in refused if each["error_code"] == "BreakerOpen"}
        assert all(
            said.startswith(f"the circuit breaker of stream {STREAM} is open; not delivered yet") for said in stopped
        )
        transport.kinesis.faults.remove(outage)
        # The count is left out if it is 0.
        with anyio.fail_after(30):
            while True:
                answer = await client.post(records(1), ack="delivered")
                if not answer.json()["failed"]:
                    break
        assert "kept" not in answer.json()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_gateway_that_restarts_in_an_outage_goes_on_spooling_for_the_streams_in_its_spool(
    tmp_path: Path,
) -> None:
    """It answered 503 to everything until Kinesis was back."""
    spool = tmp_path / "spool.db"
    transport = kinesis()
    async with open_gateway(transport, spool=spool, close_seconds=1.0) as gateway:
        assert (await Client(gateway).post(records(2), ack="delivered")).status == 200
        fault = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When())
        assert (await Client(gateway).post(records(3), ack="spooled")).status == 202
    async with open_gateway(transport, spool=spool, close_seconds=1.0) as gateway:
        assert (await Client(gateway).post(records(3, first=3), ack="spooled")).status == 202
        assert (await Client(gateway).post(records(1), stream="never-seen")).status == 503
        transport.kinesis.faults.remove(fault)
        report = await gateway.producer.flush()
    assert (report.accepted, report.failed_total) == (6, 0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_gateway_that_restarts_in_an_outage_knows_a_stream_behind_many_records_of_another(
    tmp_path: Path,
) -> None:
    """The replay reads 4,000 records ahead, so it came to no other stream until Kinesis was back."""
    spool = tmp_path / "spool.db"
    transport = kinesis()
    transport.kinesis.create_stream("payments", shard_count=1, now=0.0)
    async with open_gateway(transport, spool=spool, close_seconds=0.1) as gateway:
        client = Client(gateway)
        for stream in (STREAM, "payments"):
            assert (await client.post(records(1), ack="delivered", stream=stream)).status == 200
        fault = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When())
        for _ in range(10):
            assert (await client.post(records(500), ack="spooled")).status == 202
        assert (await client.post(records(1), ack="spooled", stream="payments")).status == 202
    async with open_gateway(transport, spool=spool, close_seconds=1.0) as gateway:
        assert (await Client(gateway).post(records(1, first=1), ack="spooled", stream="payments")).status == 202
        transport.kinesis.faults.remove(fault)
