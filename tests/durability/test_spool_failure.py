"""`SpoolOptions.failure`: what a producer does while its write-ahead spool cannot store."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kpl_core import BufferFull, ConfigError, NotSpooled
from kpl_core.durability.spool.spool_error import SpoolUnavailable
from kpl_core.options.reliability import SpoolFailure, SpoolOptions
from kpl_core.pipeline.intake.write_ahead import SpoolState
from kpl_core.producer import spool_watch
from kpl_core.producer.spool_watch import SpoolWatch
from kpl_core.records.outcome import Outcome
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.asgi.health import ProducerHealth, readiness_body
from tests.support.durability_scene import STREAM, assert_invariant, consumed, make_writable, producer, service
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def options(path: Path, failure: SpoolFailure) -> SpoolOptions:
    return SpoolOptions(path=path, mode="write_ahead", failure=failure, commit_interval_ms=1.0)


async def test_with_bypass_puts_return_and_are_delivered_while_the_spool_cannot_store(tmp_path: Path) -> None:
    transport = service()
    async with producer(transport, spool=options(tmp_path / "s.db", "bypass")) as each:
        _ = await each.put(STREAM, partition_key="k", data=b"stored")
        await make_writable(each, writable=False)
        for number in range(5):
            with anyio.fail_after(5.0):
                delivery = await each.put(STREAM, partition_key="k", data=b"%d" % number)
            assert (await delivery).successful
        deliveries = await each.put_many(STREAM, [("k", b"5"), ("k", b"6")])
        assert all(result.successful for result in await deliveries.results())
        assert each.spool_state is not None
        assert (each.spool_state.can_store, each.spool_state.bypassed, each.unready()) == (False, 7, [])
        await make_writable(each, writable=True)
        await until(lambda: each.spool_state is not None and each.spool_state.can_store)
        _ = await (await each.put(STREAM, partition_key="k", data=b"stored again"))
        assert each.spool_state.bypassed == 7
    assert_invariant(each.report())
    assert each.report().delivered == 9
    assert consumed(transport).keys() == {b"stored", b"stored again", *(b"%d" % number for number in range(7))}


async def test_with_refuse_puts_raise_at_once_and_the_producer_is_not_ready(tmp_path: Path) -> None:
    transport = service()
    async with producer(transport, spool=options(tmp_path / "s.db", "refuse")) as each:
        await make_writable(each, writable=False)
        with pytest.raises(NotSpooled, match="read-only"):
            _ = await each.put(STREAM, partition_key="k", data=b"finds out")
        room = each.buffer_limit.free_records
        for _ in range(3):
            with pytest.raises(NotSpooled, match="read-only"):
                _ = each.put_nowait(STREAM, partition_key="k", data=b"refused")
        assert each.buffer_limit.free_records == room
        assert each.report().accepted == 1
        assert each.unready() == ["the spool cannot store records"]
        await make_writable(each, writable=True)
        await until(lambda: not each.unready())
        _ = await each.put(STREAM, partition_key="k", data=b"stored")
    assert consumed(transport).keys() == {b"stored"}


async def test_by_default_puts_fail_and_the_producer_is_not_ready_until_the_spool_stores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with producer(service(), spool=options(tmp_path / "s.db", "fail")) as each:
        await make_writable(each, writable=False)
        for _ in range(2):
            with pytest.raises(NotSpooled, match="read-only"):
                _ = await each.put(STREAM, partition_key="k", data=b"refused")
        assert each.unready() == ["the spool cannot store records"]
        await make_writable(each, writable=True)
        await until(lambda: not each.unready())
    assert each.report().failed == {"NotSpooled": 2}
    assert caplog.text.count("the spool cannot store; until it can, puts fail with NotSpooled") == 1
    assert caplog.text.count("the spool stores again, after") == 1


async def test_a_bypassed_record_that_expires_when_the_disk_has_room_again_is_spooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_watch, "PROBE_SECONDS", 0.01)
    transport = service()
    outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    async with producer(transport, spool=options(tmp_path / "s.db", "bypass"), record_ttl_ms=1_500) as each:
        state = each.spool_state
        assert state is not None
        await make_writable(each, writable=False)
        bypassed = [await each.put(STREAM, partition_key="k", data=b"%d" % number) for number in range(3)]
        assert (state.can_store, state.bypassed) == (False, 3)
        await make_writable(each, writable=True)
        await until(lambda: state.can_store)
        assert [(await delivery).kept for delivery in bypassed] == ["spooled"] * 3
        assert each.report().failed_total == 0
        transport.kinesis.faults.remove(outage)
        await until(lambda: each.report().delivered == 3)
    assert_invariant(each.report())
    assert consumed(transport).keys() == {b"0", b"1", b"2"}


async def test_what_put_many_accepted_before_a_refused_record_is_delivered(tmp_path: Path) -> None:
    """The order of a key is at stake only for that key: the records before the refused one are on their way."""
    transport = service()
    outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    spool = options(tmp_path / "s.db", "bypass")
    async with producer(transport, spool=spool, ordering="per_key") as each:
        state = each.spool_state
        assert state is not None
        _ = await each.put(STREAM, partition_key="stored", data=b"first")
        await make_writable(each, writable=False)
        _ = await each.put(STREAM, partition_key="k", data=b"finds out")
        await until(lambda: state.keys is not None)
        # The keys are read again after a second: until then this one counts as stored. Nothing else wakes the stream.
        transport.kinesis.faults.remove(outage)
        _ = await each.flush()
        assert (STREAM, "stored") in (state.keys or ())
        with pytest.raises(NotSpooled, match="must not overtake"):
            _ = await each.put_many(STREAM, [*((f"k{n}", b"%d" % n) for n in range(20)), ("stored", b"second")])
        await until(lambda: each.report().delivered == 22, seconds=5.0)
    assert consumed(transport).keys() == {b"first", b"finds out", *(b"%d" % n for n in range(20))}


async def test_a_put_without_room_raises_instead_of_going_to_a_spool_that_cannot_store(tmp_path: Path) -> None:
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    spool = options(tmp_path / "s.db", "bypass")
    async with producer(transport, spool=spool, max_outstanding_records=10, record_ttl_ms=1_000) as each:
        await make_writable(each, writable=False)
        for number in range(10):
            _ = await each.put(STREAM, partition_key="k", data=b"%d" % number)
        with pytest.raises(BufferFull):
            _ = each.put_nowait(STREAM, partition_key="k", data=b"no room")
        await until(lambda: each.report().failed == {"Expired": 10})
        assert_invariant(each.report())


async def test_a_spool_that_was_full_stores_again_when_its_backlog_is_delivered(tmp_path: Path) -> None:
    transport = service()
    outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    spool = SpoolOptions(path=tmp_path / "s.db", mode="write_ahead", failure="bypass", max_bytes=1 << 20)
    async with producer(transport, spool=spool, record_ttl_ms=200) as each:
        state = each.spool_state
        assert state is not None
        while state.can_store:
            _ = await each.put(STREAM, partition_key="k", data=bytes(100_000))
        assert "exceed its max_bytes" in str(state.why)
        transport.kinesis.faults.remove(outage)
        await until(lambda: state.can_store)
        await until(lambda: each.report().spooled == each.report().buffered == 0)
    assert_invariant(each.report())


async def test_an_overflow_spool_that_cannot_store_leaves_the_producer_ready_and_says_what_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = service()
    outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    spool = SpoolOptions(path=tmp_path / "s.db", commit_interval_ms=1.0)
    async with producer(transport, spool=spool, record_ttl_ms=100) as each:
        health = ProducerHealth(each)
        await make_writable(each, writable=False)
        late = each.put_nowait(STREAM, partition_key="k", data=b"late")
        assert (await late).kept is None
        transport.kinesis.faults.remove(outage)
        assert (await (await each.put(STREAM, partition_key="k", data=b"in time"))).successful
        assert each.spool_state is not None
        assert (each.spool_state.can_store, each.unready()) == (False, [])
        status, body = readiness_body(health.readiness())
        detail = "cannot store; degraded: records that are not delivered in time fail, unless dead letters take them"
        assert (status, body["checks"]["spool"]) == (200, {"ready": True, "detail": detail})
        await make_writable(each, writable=True)
        await until(lambda: health.readiness()["spool"].detail == "stores records")
    assert "until it can, records that are not delivered in time fail, unless dead letters take them" in caplog.text
    assert "puts fail" not in caplog.text


def test_the_state_changes_once_each_way_and_forgets_the_keys() -> None:
    state = SpoolState("bypass")
    assert state.can_store
    assert not state.stored()
    assert state.refused("the disk is full", 10.0)
    assert not state.refused("it still is", 11.0)
    assert (state.why, state.since, state.can_store) == ("it still is", 10.0, False)
    state.keys = frozenset({("s", "k")})
    assert state.goes_straight("s", ["k"], durable=False, in_order=False)
    assert state.goes_straight("s", ["other"], durable=False, in_order=True)
    assert state.goes_straight("other", ["k"], durable=False, in_order=True)
    for durable, keys in ((True, ["other"]), (False, ["other", "k"])):
        with pytest.raises(NotSpooled, match="it still is; "):
            state.goes_straight("s", keys, durable=durable, in_order=True)
    assert state.stored()
    assert state.refused("again", 20.0)
    assert state.keys is None
    with pytest.raises(NotSpooled):
        state.goes_straight("s", ["any"], durable=False, in_order=True)


def test_the_choice_belongs_to_write_ahead_and_names_what_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="failure is 'bypass' and mode is 'overflow'"):
        SpoolOptions(path=tmp_path / "s.db", failure="bypass")
    with pytest.raises(ConfigError, match="failure is 'ignore'"):
        SpoolOptions(path=tmp_path / "s.db", mode="write_ahead", failure="ignore")  # type: ignore[arg-type]


async def test_the_keys_in_the_spool_are_unknown_while_records_are_on_their_way_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new record would overtake them: what was submitted before the disk was full is committed, or fails, later."""
    monkeypatch.setattr(spool_watch, "PROBE_SECONDS", 0.01)
    state = SpoolState("bypass")
    state.waiting.add(Outcome())
    watch = SpoolWatch(state, in_order=True)
    probes = 0

    async def asked(answer: Any) -> Any:
        nonlocal probes
        if answer is None:
            probes += 1
            message = "full"
            raise SpoolUnavailable(message)
        return answer

    spool: Any = SimpleNamespace(
        mailbox=SimpleNamespace(wait_for=asked),
        spool=SimpleNamespace(probe_nowait=lambda: None, keys_after_nowait=lambda _: ({(STREAM, "k")}, -1)),
    )
    watch.refused("full", anyio.current_time())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(watch.run, spool, clock=anyio.current_time))
        await until(lambda: probes > 3)
        assert state.keys is None
        state.waiting.clear()
        await until(lambda: state.keys == {(STREAM, "k")})
        tasks.cancel_scope.cancel()
