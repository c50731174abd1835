"""What `/readyz?verbose` says about a disk that does not store, and about tenants that are not read, until it ends."""

import logging
from pathlib import Path

import pytest

from kpl_core import Config, DeadLetterOptions, FairnessPolicy, Producer
from kpl_core.durability.spool.tables import LetterFilter
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.parts.test_watch import LOGGER, said, shown
from tests.ingest.scene import Client, KnownTenants, kinesis, open_gateway, records
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
        assert parts["spool"]["detail"] == "cannot store; records go straight to Kinesis"
        await make_writable(gateway.producer, writable=True)
        await until(lambda: gateway.producer.spool_state is not None and gateway.producer.spool_state.can_store)
        _, parts = await shown(gateway)
        assert (parts["spool"]["state"], parts["dead_letters"]["state"]) == ("ok", "ok")
    assert said(caplog, "spool") == ["degraded", "ok"]


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
