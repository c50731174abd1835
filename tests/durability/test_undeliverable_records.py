"""A record of the spool that becomes a dead letter is counted as one once the letter is committed, and not before."""

from pathlib import Path

import pytest

from kpl_core import Producer
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import LetterFilter, Spool
from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.testing import RecordError
from tests.support.durability_scene import (
    STREAM,
    assert_invariant,
    assert_streams_add_up,
    consumed,
    producer,
    service,
    spooled,
)
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

KEPT = DeadLetterOptions(redrive=False)
INVALID = RecordError("ValidationException", "1 validation error detected")


@pytest.fixture
def full(tmp_path: Path) -> SpoolOptions:
    """Return a spool that takes one more dead letter only after another has left."""
    options = SpoolOptions(
        path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0, max_dead_letter_bytes=4 * MIB
    )
    with Spool(options) as spool:
        queue = DeadLetterQueue(spool)
        queue.add_nowait([queue.letter(spooled(data=bytes(4 * MIB - 500)), "ttl")]).result()
    return options


async def remove_letters(each: Producer) -> None:
    queue = each.dead_letters
    assert queue is not None
    await until((found := queue.select_nowait(LetterFilter(), 10)).done)
    await until(queue.remove(found.result()).done)


async def test_a_rejected_record_counts_as_spooled_until_its_letter_has_room(full: SpoolOptions) -> None:
    transport = service()
    fault = transport.kinesis.faults.add(INVALID)
    facts: list[Fact] = []
    async with producer(transport, hooks=[facts.append], spool=full, dead_letters=KEPT) as each:
        _ = await each.put(STREAM, partition_key="k", data=bytes(2_000))
        # The replay tries again, and no letter is committed.
        await until(lambda: sum(isinstance(fact, RecordsFinished) for fact in facts) >= 3)
        report = each.report()
        assert (report.accepted, report.spooled + report.buffered, report.dead_lettered) == (2, 1, 1)
        assert_invariant(report)
        assert_streams_add_up(each)
        assert not [fact for fact in facts if isinstance(fact, RecordsFinished) and fact.outcome == "dead_lettered"]
        await remove_letters(each)
        await until(lambda: each.report().dead_lettered == 2)
        report = each.report()
        assert (report.accepted, report.spooled, report.buffered) == (2, 0, 0)
        assert_invariant(report)
        (fact,) = [fact for fact in facts if isinstance(fact, RecordsFinished) and fact.outcome == "dead_lettered"]
        assert (fact.stream, fact.reason, fact.user_records, fact.kept_before) == (STREAM, "ValidationException", 1, 1)
        assert fact.user_bytes == 2_001
        assert fact.attempts >= 1
        transport.kinesis.faults.remove(fault)
    assert_invariant(each.report())


async def test_a_record_that_no_stream_takes_counts_as_spooled_until_its_letter_has_room(full: SpoolOptions) -> None:
    with Spool(full) as spool:
        too_large, no_stream = spooled(data=bytes(MIB)), spooled(stream="no such name", data=bytes(2_000))
        spool.append_nowait([too_large, no_stream], claim=False).result()
    facts: list[Fact] = []
    async with producer(service(), hooks=[facts.append], spool=full, dead_letters=KEPT) as each:
        delivery = await each.put(STREAM, partition_key="k", data=b"x")
        assert (await delivery).successful
        report = each.report()
        # The letters of the two have no room, however often the replay tries.
        assert (report.accepted, report.delivered, report.spooled, report.dead_lettered) == (4, 1, 2, 1)
        await remove_letters(each)
        await until(lambda: each.report().dead_lettered == 3)
        report = each.report()
        assert (report.accepted, report.delivered, report.spooled) == (4, 1, 0)
        assert_invariant(report)
        assert_streams_add_up(each)
    added = [fact for fact in facts if isinstance(fact, RecordsFinished) and fact.outcome == "dead_lettered"]
    assert {(fact.stream, fact.reason, fact.attempts) for fact in added} == {
        (STREAM, "InvalidUserRecord", 0),
        ("no such name", "InvalidUserRecord", 0),
    }


async def test_a_letter_that_is_committed_while_the_producer_closes_is_counted(tmp_path: Path) -> None:
    options = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=100.0)
    transport = service()
    transport.kinesis.faults.add(INVALID)
    async with producer(transport, spool=options) as each:
        _ = await each.put(STREAM, partition_key="k", data=b"x")
        assert each.spool is not None
        await until(lambda: each.report().buffered == 0)
        report = await each.close()
    with Spool(options) as spool:
        statistics = spool.statistics()
    assert (report.spooled, report.dead_lettered) == (statistics.records, statistics.letters)
    assert report.spooled + report.dead_lettered == 1
    assert consumed(transport) == {}
