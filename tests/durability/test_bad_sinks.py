"""A dead-letter sink of the caller's that does not do what it should: its letters have failed, and nothing waits."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from kpl_core.durability.dead_letters import RefusedLetter, SinkReport
from kpl_core.durability.spool import DeadLetter
from kpl_core.options.reliability import DeadLetterOptions
from kpl_core.testing import RecordError
from tests.support.durability_scene import STREAM, assert_invariant, producer, service

pytestmark = pytest.mark.anyio


class Sink:
    """Answers what the test sets."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def send(self, letters: Sequence[DeadLetter]) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer(letters) if callable(self._answer) else self._answer


@pytest.mark.parametrize(
    ("answer", "dead_lettered"),
    [
        (lambda letters: SinkReport(len(letters), ()), 2),
        (lambda letters: SinkReport(1, (RefusedLetter(letters[0], "too large"),)), 1),
        (OSError("gone"), 0),
        # Nothing returned is what is forgotten most easily.
        (None, 0),
        (2, 0),
        ((2, ()), 0),
    ],
)
async def test_every_record_has_its_result_for_any_answer_of_a_sink(answer, dead_lettered):
    transport = service()
    transport.kinesis.faults.add(RecordError("AccessDeniedException"))
    async with producer(transport, sink=Sink(answer), dead_letters=DeadLetterOptions()) as each:
        deliveries = [each.put_nowait(STREAM, partition_key="k", data=b"%d" % n) for n in range(2)]
        with anyio.fail_after(30):
            results = [await delivery for delivery in deliveries]

    assert [result.kept for result in results].count("dead_lettered") == dead_lettered
    report = each.report()
    assert_invariant(report)
    assert (report.dead_lettered, report.failed_total, report.buffered) == (dead_lettered, 2 - dead_lettered, 0)


async def test_the_log_says_what_a_sink_should_have_returned(caplog):
    transport = service()
    transport.kinesis.faults.add(RecordError("AccessDeniedException"))
    async with producer(transport, sink=Sink(None), dead_letters=DeadLetterOptions()) as each:
        with anyio.fail_after(30):
            await each.put_nowait(STREAM, partition_key="k", data=b"x")

    assert "returned a NoneType for 1 letters; return SinkReport(stored, refused)" in caplog.text
