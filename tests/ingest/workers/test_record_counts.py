"""The counters of a worker: every acknowledged record moves one of the others once (Hypothesis); their memory."""

import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings, strategies as st

from kpl_core import Delivery, FairnessPolicy, Producer
from kpl_core.hooks import RecordsFinished, RecordsWrittenAhead, ShardMapRefreshed
from kpl_core.options.reliability import DeadLetterOptions, SpoolMode, SpoolOptions
from kpl_core.records.user_record import UserRecord
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest.workers.record_counts import Counts, CountsMemory, RecordCounts
from tests.support.durability_scene import STREAM, assert_invariant, producer, service

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="a limit of another kind")


def counts() -> RecordCounts:
    return RecordCounts([0] * 5)


def finished(outcome: str, records: int, kept_before: int = 0) -> RecordsFinished:
    return RecordsFinished(STREAM, None, "normal", outcome, "", records, 1, 1, 0.1, 0, kept_before)  # type: ignore[arg-type]


def test_each_fate_moves_its_own_counter_and_what_was_kept_before_moves_none():
    found = counts()
    found.acknowledge(20)
    found(finished("delivered", 5, kept_before=2))
    found(finished("spooled", 4, kept_before=4))
    found(finished("dead_lettered", 3, kept_before=1))
    found(finished("failed", 1))
    found(RecordsWrittenAhead(STREAM, 6))
    found(ShardMapRefreshed(STREAM, 2))
    assert found.now() == Counts(acknowledged=20, stored=3, kept=8, reported=1, stored_later=2)
    assert found.now().open == 8
    assert found.now().since(Counts(10, 1, 2, 0, 1)) == Counts(10, 2, 6, 1, 1)


# How many records, whether a store may keep them, whether they are aggregated, and milliseconds before the next.
PUTS = st.lists(
    st.tuples(st.integers(1, 30), st.booleans(), st.booleans(), st.sampled_from([0, 0, 60])), min_size=1, max_size=8
)


async def put_all(each: Producer, found: RecordCounts, puts: list[tuple[int, bool, bool, int]]) -> list[Delivery]:
    deliveries: list[Delivery] = []
    for number, (count, keep, aggregate, pause_ms) in enumerate(puts):
        records = [UserRecord(f"k{number}-{record}", b"x") for record in range(count)]
        deliveries += each.internal.put_together_nowait(STREAM, records, flow="f", aggregate=aggregate, keep=keep)
        found.acknowledge(count)
        await anyio.sleep(pause_ms / 1_000)
        assert 0 <= found.now().open <= found.now().acknowledged
    return deliveries


async def lives(
    transport: FakeTransport, folder: Path, mode: SpoolMode | None, puts: list[list[tuple[int, bool, bool, int]]]
) -> None:
    """Let one producer after the other use the same file; the last one finds what is left and puts nothing."""
    options = (
        {}
        if mode is None
        else {
            "spool": SpoolOptions(path=folder / "spool.db", mode=mode, commit_interval_ms=0.0),
            "dead_letters": DeadLetterOptions(),
        }
    )
    for each_puts in [*puts, []]:
        found = counts()
        each = producer(transport, hooks=[found], record_ttl_ms=100, fairness=FairnessPolicy(), **options)
        async with each:
            deliveries = await put_all(each, found, each_puts)
            await anyio.sleep(0.02)
            report = await each.close(timeout=0.05)
        assert_invariant(report)
        after, total = found.now(), sum(count for count, *_ in each_puts)
        results = [delivery.result() for delivery in deliveries]
        # Once each, and replays none.
        assert (after.acknowledged, after.open) == (total, 0)
        if mode == "write_ahead":
            # What no store may keep; the rest was kept before its result was known.
            assert after.stored + after.reported == sum(count for count, keep, *_ in each_puts if not keep)
            assert after.stored + after.stored_later == report.delivered
        else:
            assert after.stored == sum(result.successful for result in results)
            assert after.kept == sum(result.kept is not None for result in results)
            assert after.stored + after.stored_later == report.delivered


@pytest.mark.long
@given(
    puts=st.lists(PUTS, min_size=1, max_size=2),
    mode=st.sampled_from([None, "overflow", "write_ahead"]),
    record_errors=st.sampled_from([0.0, 0.3, 1.0]),
    answer=st.sampled_from([None, "InternalFailure", "AccessDeniedException"]),
)
@settings(max_examples=40, deadline=None)
def test_every_acknowledged_record_moves_one_other_counter_once(puts, mode, record_errors, answer):
    transport = service(shards=2, latency_seconds=0.002)
    transport.kinesis.faults.add(RecordError(), When(probability=record_errors))
    if answer is not None:
        transport.kinesis.faults.add(ErrorAnswer(answer), When(operation="PutRecords", probability=0.3))
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(lives, transport, Path(folder), mode, puts)


WRITER = """
import os, signal, sys
from kpl_integrations.ingest.workers.record_counts import RecordCounts
counts = RecordCounts.of_worker(int(sys.argv[1]))
while True:
    counts.acknowledge(1)
"""


@pytest.mark.long
def test_the_memory_outlives_a_killed_process_and_the_next_one_counts_on():
    memory = CountsMemory()
    seen = 0
    for _ in range(2):
        command = [sys.executable, "-c", WRITER, str(memory.descriptor)]
        with subprocess.Popen(command, pass_fds=[memory.descriptor]) as process:
            while memory.read().acknowledged <= seen:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        assert memory.read().acknowledged > seen
        seen = memory.read().acknowledged
    assert memory.read() == Counts(acknowledged=seen)
    memory.close()


@only_linux
def test_the_memory_is_allocated_whole():
    memory = CountsMemory()
    assert os.fstat(memory.descriptor).st_blocks * 512 == mmap.PAGESIZE
    memory.close()


@only_linux
def test_memory_that_cannot_be_allocated_is_an_error_and_leaks_no_descriptor():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            CountsMemory()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
