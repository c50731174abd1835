"""What `/readyz?verbose` says about a disk that does not store, and about tenants that are not read, until it ends."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core import Config, DeadLetterOptions, FairnessPolicy, Producer
from kpl_core.durability.dead_letters import DeadLetterQueue, RefusedLetter, SinkReport
from kpl_core.durability.spool import DeadLetter, Spool, SpooledRecord, SpoolFull, SpoolOptions
from kpl_core.durability.spool.tables import LetterFilter
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.readiness.test_readyz import LOGGER, said, shown
from tests.support.gateway_scene import Client, KnownTenants, kinesis, open_gateway, records
from tests.support.small_disk import MIB
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
DENIED = (ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))


async def make_writable(producer: Producer, *, writable: bool) -> None:
    letters = producer.dead_letters
    assert letters is not None
    statement = f"PRAGMA query_only = {int(not writable)}"
    await until(letters.spool.ask(lambda store: store.connection.execute(statement).fetchone()).done)


async def test_a_spool_that_cannot_store_is_degraded_and_no_dead_letter_is_stored_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with open_gateway(spool=tmp_path / "s.db", record_max_buffered_time_ms=0) as gateway:
        client = Client(gateway)
        assert (await client.post(records(1), ack="spooled")).status == 202
        status, parts = await shown(gateway)
        assert (parts["spool"]["state"], parts["dead_letters"]["state"]) == ("ok", "ok")
        await make_writable(gateway.producer, writable=False)
        assert (await client.post(records(1), ack="spooled")).status == 503
        status, parts = await shown(gateway)
        assert (status, parts["spool"]["state"], parts["dead_letters"]["state"]) == (200, "degraded", "failed")
        detail = "cannot store; records go straight to Kinesis, and requests with ack=spooled get 503"
        assert parts["spool"]["detail"] == detail
        await make_writable(gateway.producer, writable=True)
        await until(lambda: gateway.producer.spool_state is not None and gateway.producer.spool_state.can_store)
        _, parts = await shown(gateway)
        assert (parts["spool"]["state"], parts["dead_letters"]["state"]) == ("ok", "ok")
    assert said(caplog, "spool") == ["degraded", "ok"]


async def test_a_disk_that_cannot_store_ends_readiness_where_requests_wait_for_it_by_default(tmp_path: Path) -> None:
    async with open_gateway(spool=tmp_path / "s.db", default_ack="spooled") as gateway:
        await make_writable(gateway.producer, writable=False)
        assert (await Client(gateway).post(records(1), ack="spooled")).status == 503
        status, parts = await shown(gateway)
        assert (status, parts["spool"]["state"], parts["spool"]["accepts_records"]) == (503, "failed", False)
        assert parts["spool"]["detail"].startswith("cannot store; requests get 503, except those with ack=queued")
        assert (await Client(gateway).post(records(1), ack="queued")).status == 202
        await make_writable(gateway.producer, writable=True)
        await until(lambda: gateway.producer.spool_state is not None and gateway.producer.spool_state.can_store)
        status, parts = await shown(gateway)
        assert (status, parts["spool"]["state"]) == (200, "ok")


async def test_a_spool_with_its_most_bytes_names_the_bound_and_leaves_the_dead_letters_ok(tmp_path: Path) -> None:
    transport = kinesis()
    options: dict[str, Any] = {"spool": tmp_path / "s.db", "spool_max_bytes": MIB, "record_max_buffered_time_ms": 0}
    async with open_gateway(transport, **options) as gateway:
        client = Client(gateway)
        outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
        assert (await client.post(records(1, size=700_000), ack="spooled")).status == 202
        assert (await client.post(records(1, size=700_000), ack="spooled")).status == 503
        _, parts = await shown(gateway)
        assert (parts["spool"]["state"], parts["dead_letters"]["state"]) == ("degraded", "ok")
        assert parts["spool"]["detail"].startswith("full (spool_max_bytes); records go straight to Kinesis")
        assert parts["spool"]["action"].startswith("if it is full, raise spool_max_bytes and see the part kinesis")
        transport.kinesis.faults.remove(outage)
        denied = transport.kinesis.faults.add(*DENIED)
        assert (await client.post(records(1), ack="delivered")).json()["kept"] == 1
        transport.kinesis.faults.remove(denied)


async def test_letters_that_the_disk_did_not_store_are_tried_again_while_the_spool_is_full(tmp_path: Path) -> None:
    with Spool(SpoolOptions(path=tmp_path / "s.db", max_bytes=MIB)) as spool:
        queue = DeadLetterQueue(spool)
        spool.append_nowait([SpooledRecord("orders", "k", bytes(1_020_000), 0.0)], claim=False).result()
        with pytest.raises(SpoolFull):
            spool.probe_nowait()
        queue.failing = True
        queue.probe()
        await until(lambda: not queue.failing)


@pytest.mark.parametrize("raises", [False, True])
async def test_a_queue_that_takes_no_letters_is_a_failed_part_until_it_takes_one_or_for_five_minutes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, raises: bool
) -> None:
    class Queue:
        why: str | None = "AccessDenied"

        def __init__(self, *_: Any) -> None:
            return

        async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
            if self.why is None:
                return SinkReport(len(letters), ())
            if raises:
                raise OSError(self.why)
            return SinkReport(0, tuple(RefusedLetter(letter, self.why) for letter in letters))

    monkeypatch.setattr("kpl_core.durability.dead_letters.aws_sinks.SqsSink", Queue)
    transport = kinesis()
    transport.kinesis.faults.add(*DENIED)
    settings: dict[str, Any] = {
        "dead_letters_sqs": "https://sqs/letters",
        "region": "eu-west-1",
        "record_max_buffered_time_ms": 0,
    }
    async with open_gateway(transport, **settings) as gateway:
        client, watch = Client(gateway), gateway.opened.parts

        async def post() -> Any:
            await client.post(records(1), ack="delivered")
            return (await shown(gateway))[1]["dead_letters"]

        assert (await shown(gateway))[1]["dead_letters"]["state"] == "ok"
        part = await post()
        assert (part["state"], part["accepts_records"]) == ("failed", True)
        assert "dead_letters_sqs" in part["action"]
        assert "AccessDenied" in caplog.text
        monkeypatch.setattr(Queue, "why", None)
        assert (await post())["state"] == "ok"
        monkeypatch.setattr(Queue, "why", "AccessDenied")
        assert (await post())["state"] == "failed"
        now = anyio.current_time()
        monkeypatch.setattr(watch, "_clock", lambda: now + 290.0)
        assert (await shown(gateway))[1]["dead_letters"]["state"] == "failed"
        monkeypatch.setattr(watch, "_clock", lambda: now + 301.0)
        assert (await shown(gateway))[1]["dead_letters"]["state"] == "ok"


async def test_dead_letters_without_a_disk_that_stores_have_failed_until_it_stores_again(tmp_path: Path) -> None:
    transport = kinesis()
    transport.kinesis.faults.add(*DENIED)
    async with open_gateway(transport, dead_letters=tmp_path / "d.db", record_max_buffered_time_ms=0) as gateway:
        client = Client(gateway)
        await make_writable(gateway.producer, writable=False)
        assert (await client.post(records(1), ack="delivered")).status == 502
        status, parts = await shown(gateway)
        assert (status, parts["spool"]["state"]) == (200, "not_configured")
        assert (parts["dead_letters"]["state"], parts["dead_letters"]["accepts_records"]) == ("failed", True)
        letters = gateway.producer.dead_letters
        assert letters is not None
        letters.probe()
        await until(lambda: letters.failing)
        await make_writable(gateway.producer, writable=True)
        letters.probe()
        await until(lambda: not letters.failing)
        assert (await shown(gateway))[1]["dead_letters"]["state"] == "ok"
        assert (await client.post(records(1), ack="delivered")).json()["kept"] == 1


async def test_dead_letters_without_room_have_failed_until_one_is_removed(tmp_path: Path) -> None:
    transport = kinesis()
    transport.kinesis.faults.add(*DENIED)
    options = DeadLetterOptions(path=tmp_path / "d.db", max_bytes=MIB, redrive=False, alarm_depth=1)
    config = Config(fairness=FairnessPolicy(), dead_letters=options, record_max_buffered_time_ms=0)
    async with open_gateway(transport, config=config) as gateway:
        client, letters = Client(gateway), gateway.producer.dead_letters
        assert letters is not None
        assert (await client.post(records(1, size=600_000), ack="delivered")).json()["kept"] == 1
        _, parts = await shown(gateway)
        assert (parts["dead_letters"]["state"], parts["dead_letters"]["detail"]) == ("degraded", "1 dead letters wait")
        assert (await client.post(records(1, size=600_000), ack="delivered")).status == 502
        letters.probe()
        assert (await shown(gateway))[1]["dead_letters"]["state"] == "failed"
        selected = letters.select_nowait(LetterFilter(), 100)
        await until(selected.done)
        letters.remove(selected.result())
        await until(lambda: not letters.failing and not letters.is_alarmed)
        assert (await shown(gateway))[1]["dead_letters"]["state"] == "ok"


async def test_tenants_that_cannot_be_read_again_are_a_degraded_part() -> None:
    class Sick(KnownTenants):
        is_sick = False

        def reload_if_changed(self) -> bool:
            if self.is_sick:
                message = "secret"
                raise RuntimeError(message)
            return False

    directory = Sick(Tenant(id="a"))
    async with open_gateway(directory=directory) as gateway:
        assert (await shown(gateway))[1]["tenants_file"]["state"] == "ok"
        directory.is_sick = True
        gateway.reload()
        await until(lambda: gateway.opened.parts.tenants_problem)
        answer = await Client(gateway).get("/readyz?verbose")
        assert answer.json()["parts"]["tenants_file"]["state"] == "degraded"
        assert b"secret" not in answer.body
        directory.is_sick = False
        gateway.reload()
        await until(lambda: gateway.opened.parts.tenants_problem is None)
        assert (await shown(gateway))[1]["tenants_file"]["state"] == "ok"
