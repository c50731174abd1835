"""The spool as overflow: what would have failed is on disk instead, and arrives when the outage is over."""

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kpl_core import BufferFull
from kpl_core.durability.spool import LetterFilter
from kpl_core.hooks import DeadLetterAlarm, Fact, RecordsFinished
from kpl_core.options.reliability import DeadLetterOptions, SpoolMode, SpoolOptions
from kpl_core.producer import durable_store
from kpl_core.testing import ErrorAnswer, RecordError, When
from tests.support.durability_scene import STREAM, assert_invariant, assert_streams_add_up, consumed, producer, service
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def spool(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0)


async def test_an_outage_longer_than_the_ttl_loses_nothing(spool: SpoolOptions):
    transport = service()
    outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    async with producer(transport, spool=spool, record_ttl_ms=150) as each:
        deliveries = [each.put_nowait(STREAM, partition_key=f"k{n % 7}", data=b"%d" % n) for n in range(200)]
        results = [await delivery for delivery in deliveries]
        assert {(result.successful, result.kept) for result in results} == {(False, "spooled")}
        report = each.report()
        assert_invariant(report)
        assert report.failed_total == 0
        assert report.spooled + report.buffered == 200
        transport.kinesis.faults.remove(outage)
        await until(lambda: each.report().delivered == 200)
        assert_invariant(each.report())
        assert_streams_add_up(each)
    report = each.report()
    assert (report.accepted, report.delivered, report.spooled, report.buffered) == (200, 200, 0, 0)
    assert set(consumed(transport)) == {b"%d" % n for n in range(200)}


async def test_what_is_left_at_close_waits_in_the_spool_for_the_next_producer(spool: SpoolOptions):
    transport = service()
    outage = transport.kinesis.faults.add(RecordError())
    async with producer(transport, spool=spool) as first:
        deliveries = [first.put_nowait(STREAM, partition_key=f"k{n}", data=b"%d" % n) for n in range(50)]
        report = await first.close(timeout=0.3)
    assert (report.accepted, report.spooled, report.buffered, report.failed_total) == (50, 50, 0, 0)
    assert_invariant(report)
    assert {delivery.result().kept for delivery in deliveries} == {"spooled"}
    transport.kinesis.faults.remove(outage)
    async with producer(transport, spool=spool) as second:
        await until(lambda: second.report().delivered == 50)
        assert_invariant(second.report())
    assert (second.report().accepted, second.report().delivered, second.report().spooled) == (50, 50, 0)
    assert consumed(transport).keys() == {b"%d" % n for n in range(50)}


@pytest.mark.parametrize("mode", ["overflow", "write_ahead"])
async def test_a_put_that_finds_no_room_goes_to_the_spool_and_await_put_waits(spool: SpoolOptions, mode: SpoolMode):
    spool = msgspec.structs.replace(spool, mode=mode)
    transport = service(latency_seconds=0.05)
    async with producer(transport, spool=spool, max_outstanding_records=10) as each:
        deliveries = [each.put_nowait(STREAM, partition_key="k", data=b"%d" % n) for n in range(30)]
        assert each.report().accepted == 30
        deliveries.append(await each.put(STREAM, partition_key="k", data=b"30"))
        results = [await delivery for delivery in deliveries]
        assert sum(result.kept == "spooled" for result in results) >= 15
        await until(lambda: each.report().delivered == 31)
        assert_invariant(each.report())
        assert each.buffer_limit.outstanding_records == 0
    assert set(consumed(transport)) == {b"%d" % n for n in range(31)}


@pytest.mark.parametrize("mode", ["overflow", "write_ahead"])
async def test_await_put_counts_the_bytes_of_a_key_and_waits_for_room(spool: SpoolOptions, mode: SpoolMode):
    """The record has room beside the first one if its key is counted in characters, and none in bytes."""
    spool = msgspec.structs.replace(spool, mode=mode)
    async with producer(service(latency_seconds=0.05), spool=spool, max_outstanding_bytes=1 << 16) as each:
        first = await each.put(STREAM, partition_key="k", data=b"first")
        second = await each.put(STREAM, partition_key="ü" * 100, data=bytes((1 << 16) - 150))
        assert (await first).successful
        result = await second
        assert (result.successful, result.kept) == (True, None)
        assert each.report().delivered == 2


async def test_what_can_never_be_delivered_becomes_a_dead_letter_with_all_that_was_noted(tmp_path: Path):
    transport = service()
    transport.kinesis.faults.add(RecordError("ValidationException", "1 validation error"))
    options = DeadLetterOptions(path=tmp_path / "letters.db")
    note = {"severity": "major", "timestamp": "2026-11-20T10:00:00Z", "traceparent": "00-1-2-01", "host": "a"}
    async with producer(transport, dead_letters=options) as each:
        delivery = each.put_nowait(
            STREAM, partition_key="k", data=b"x", flow="tenant 7", tier="critical", metadata=note
        )
        result = await delivery
        assert (result.successful, result.kept, result.error_code) == (False, "dead_lettered", "ValidationException")
        assert each.dead_letters is not None
        (stored,) = each.dead_letters.select_nowait(LetterFilter(), 10).result()
        letter = stored.letter
        assert letter is not None
        assert (letter.reason, letter.tier, letter.tenant, letter.attempts) == ("invalid", "critical", "tenant 7", 1)
        assert (letter.severity, letter.source_timestamp) == ("major", "2026-11-20T10:00:00Z")
        assert (letter.traceparent, letter.metadata) == ("00-1-2-01", {"host": "a"})
    report = each.report()
    assert (report.accepted, report.dead_lettered, report.failed_total) == (1, 1, 0)
    assert_invariant(report)


async def test_a_clock_that_is_set_right_dates_what_is_kept_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # It starts an hour behind, on a machine that boots before its clock is synchronised.
    behind = 3_600.0
    monkeypatch.setattr(durable_store, "time", SimpleNamespace(time=lambda: time.time() - behind))
    letters = DeadLetterOptions(path=tmp_path / "letters.db", redrive=False)
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("InvalidArgumentException"), When(operation="PutRecords"))
    async with producer(transport, dead_letters=letters) as each:
        assert each.dead_letters is not None
        behind = 0.0
        await each.put_nowait(STREAM, partition_key="k", data=b"")
        (stored,) = each.dead_letters.select_nowait(LetterFilter(), 10).result()
    assert stored.letter is not None
    assert stored.letter.last_attempt is not None
    for date in (stored.letter.first_seen, stored.letter.last_attempt):
        assert abs(date - time.time()) < 600


async def test_a_note_that_cannot_be_shown_costs_no_record_and_no_neighbour(spool: SpoolOptions):
    class Detached:
        def __repr__(self) -> str:
            message = "there is no session any more"
            raise RuntimeError(message)

    transport = service()
    outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    async with producer(transport, spool=spool, record_ttl_ms=100) as each:
        note = {"row": Detached(), "traceparent": Detached()}
        deliveries = [each.put_nowait(STREAM, partition_key="k", data=b"%d" % n, metadata=note) for n in range(3)]
        assert [(await delivery).kept for delivery in deliveries] == ["spooled"] * 3
        transport.kinesis.faults.remove(outage)
        await until(lambda: each.report().delivered == 3)
    assert_invariant(each.report())
    assert set(consumed(transport)) == {b"0", b"1", b"2"}


async def test_a_hook_that_fails_costs_no_record_and_no_flush(spool: SpoolOptions, caplog: pytest.LogCaptureFixture):
    told: list[Fact] = []

    def broken(fact: Fact) -> None:
        _ = {"RecordsFinished": {}, "DeadLetterAlarm": {}}.get(type(fact).__name__, {"": 0})[""]

    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    letters = DeadLetterOptions(redrive=False, alarm_depth=1)
    options = {"spool": spool, "dead_letters": letters, "record_ttl_ms": 100, "max_outstanding_records": 5}
    async with producer(transport, hooks=[broken, told.append], **options) as each:
        for n in range(20):
            _ = each.put_nowait(STREAM, partition_key="k", data=b"%d" % n, tier="bulk")
        assert (await each.flush(timeout=30.0)).complete
        await until(lambda: any(isinstance(fact, DeadLetterAlarm) for fact in told))
    assert_invariant(each.report())
    assert sum(fact.user_records for fact in told if isinstance(fact, RecordsFinished)) >= 20
    assert caplog.text.count("gets no more facts") == 1


async def test_without_a_spool_a_full_buffer_still_refuses(tmp_path: Path):
    options = DeadLetterOptions(path=tmp_path / "letters.db")
    async with producer(service(), dead_letters=options, max_outstanding_records=5) as each:
        for n in range(5):
            _ = each.put_nowait(STREAM, partition_key="k", data=b"%d" % n)
        with pytest.raises(BufferFull):
            _ = each.put_nowait(STREAM, partition_key="k", data=b"5")
        bulk = each.put_nowait(STREAM, partition_key="k", data=b"6", tier="bulk")
        result = await bulk
        assert (result.kept, result.error_code) == ("dead_lettered", "RateLimited")
    assert_invariant(each.report())
