"""Measure aiokpl at a steady rate, from due to acknowledged, with its own buffering of 100 ms."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiokpl.producer import Producer  # type: ignore[import-not-found]

from benchmarks.pacing import deliver_steadily
from benchmarks.peer_programs.aiokpl_put_record import unlimited_config
from benchmarks.trial import Trial, call_sink
from benchmarks.workload import STREAM_NAME


async def main() -> None:
    trial = Trial.from_command_line()
    async with Producer(unlimited_config(trial)) as producer:
        waiting: set[asyncio.Task[None]] = set()

        async def put(key: str, data: bytes, done: Callable[[bool], None]) -> None:
            outcome = await producer.put_record(stream=STREAM_NAME, partition_key=key, data=data)
            task = asyncio.create_task(wait_for(outcome, done))
            waiting.add(task)
            task.add_done_callback(waiting.discard)

        async def wait_for(outcome: Any, done: Callable[[bool], None]) -> None:  # noqa: ANN401 - aiokpl is not in every environment
            done(bool((await outcome.wait()).success))

        await deliver_steadily(trial.warm_up_records()[:400], put)
        records = trial.measured_records()
        call_sink(trial.control_url, "/start", {})
        figures = await deliver_steadily(records, put)
    trial.add(**figures)
    trial.finish(acknowledged=figures["acknowledged"], distributions=("aiokpl", "aiobotocore", "botocore", "anyio"))


if __name__ == "__main__":
    asyncio.run(main())
