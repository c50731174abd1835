"""Measure kpl_core from put to acknowledgement, through its real transport to the sink.

Options: `freeze`, calls gc.freeze() before the measurement; `pace`:
"steady" puts 2,000 records a second and times each; "full" puts as fast as it can and
notes only the longest step of the event loop, in which a whole request is built, signed and sent.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

from benchmarks.end_to_end import DISTRIBUTIONS, producer_config, put_many
from benchmarks.pacing import StepWatch, deliver_steadily
from benchmarks.trial import Trial, call_sink
from benchmarks.workload import STREAM_NAME
from kpl_core import Producer

Records = list[tuple[str, bytes]]


async def put_steadily(producer: Producer, records: Records) -> dict[str, Any]:
    async def put(key: str, data: bytes, done: Callable[[bool], None]) -> None:
        delivery = await producer.put(STREAM_NAME, partition_key=key, data=data)
        delivery.add_done_callback(lambda each: done(each.result().successful))

    return await deliver_steadily(records, put)


async def put_at_full_speed(producer: Producer, records: Records) -> dict[str, Any]:
    with StepWatch() as watch:
        acknowledged = await put_many(producer, records)
    return {"acknowledged": acknowledged, **watch.figures()}


async def main() -> None:
    trial = Trial.from_command_line()
    run = put_at_full_speed if trial.options.get("pace") == "full" else put_steadily
    async with Producer(producer_config(trial)) as producer:
        await run(producer, trial.warm_up_records()[:400])
        records = trial.measured_records()
        if trial.options.get("freeze"):
            # As a service does after start-up: collections then skip all objects created so far.
            gc.collect()
            gc.freeze()
        call_sink(trial.control_url, "/start", {})
        figures = await run(producer, records)
    trial.add(**figures)
    trial.finish(acknowledged=figures["acknowledged"], distributions=DISTRIBUTIONS)


if __name__ == "__main__":
    asyncio.run(main())
