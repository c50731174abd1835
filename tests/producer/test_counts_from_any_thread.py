"""A metrics server counts in a thread of its own while the loop adds what is counted."""

from collections.abc import Callable

import pytest

from kpl_core import Producer
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.records.pipeline_statistics import PipelineStatistics
from tests.support.producer_scene import STREAM, put, service

pytestmark = pytest.mark.anyio

Ask = Callable[[Producer], object]
QUESTIONS: list[tuple[Ask, int]] = [
    (lambda orders: orders.report().accepted, 4),
    (lambda orders: sum(each.accepted for each in orders.statistics().values()), 4),
    (repr, 0),
]


@pytest.mark.parametrize(("ask", "expected"), QUESTIONS)
async def test_a_thread_that_counts_while_streams_are_added_gets_its_counts(
    ask: Ask, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"new-{number}" for number in range(3)]
    transport = service(streams=dict.fromkeys([STREAM, *names], 1))
    counted = StreamPipeline.statistics
    async with Producer(transport=transport) as orders:
        put(orders, 1)

        def while_the_loop_goes_on(pipeline: StreamPipeline) -> PipelineStatistics:
            if names:
                put(orders, 1, stream=names.pop())
            return counted(pipeline)

        monkeypatch.setattr(StreamPipeline, "statistics", while_the_loop_goes_on)
        assert ask(orders) == (expected or repr(orders))
        assert not names
