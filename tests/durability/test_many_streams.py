"""A producer of a thousand streams that keeps what it cannot deliver: what happens in one costs the others nothing."""

from collections.abc import Sequence

import anyio
import pytest

from kpl_core.durability.dead_letters import SinkReport
from kpl_core.durability.spool import DeadLetter
from kpl_core.options.reliability import DeadLetterOptions
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.stream_set import StreamSet
from kpl_core.testing import FakeKinesis, RecordError, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.durability_scene import assert_invariant, producer

pytestmark = pytest.mark.anyio

STREAMS = 200
RECORDS = 5


class Taking:
    """Takes every letter."""

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        return SinkReport(len(letters), ())


async def test_the_disk_is_asked_for_the_streams_in_which_something_happened_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    original = StreamSet.take_progressed

    def counted(streams: StreamSet) -> set[StreamPipeline]:
        nonlocal looks
        pipelines = original(streams)
        looks += len(pipelines)
        return pipelines

    monkeypatch.setattr(StreamSet, "take_progressed", counted)
    names = [f"stream-{number}" for number in range(STREAMS)]
    kinesis = FakeKinesis(dict.fromkeys(names, 1), enforce_limits=False)
    # Every other stream loses what it was given.
    for name in names[::2]:
        kinesis.faults.add(RecordError("ValidationException"), When(operation="PutRecords", stream=name))
    letters = DeadLetterOptions()
    with anyio.fail_after(60):
        async with producer(
            FakeTransport(kinesis), sink=Taking(), dead_letters=letters, max_in_flight_requests=16
        ) as each:
            for _ in range(RECORDS):
                for name in names:
                    _ = each.put_nowait(name, partition_key="k", data=b"x")
                await anyio.sleep(0.01)
            report = await each.flush()
    assert_invariant(report)
    assert (report.delivered, report.dead_lettered) == (STREAMS * RECORDS // 2, STREAMS * RECORDS // 2)
    # A few for each record; all streams each time would be a few for each record and stream.
    assert looks < 20 * STREAMS * RECORDS
