"""Run kpl_core without a network, to measure the machines and the driver. The result of every delivery is read.

Options as in `benchmarks.end_to_end`.
"""

import asyncio

from benchmarks.end_to_end import PUT_WAYS, producer_config
from benchmarks.instant_transport import InstantTransport
from benchmarks.trial import Trial
from kpl_core import Producer


async def main() -> None:
    trial = Trial.from_command_line()
    trial.endpoint_url = ""
    put_all = PUT_WAYS[trial.options.get("api", "put_many")]
    transport = InstantTransport(trial.workload.shard_count)
    async with Producer(producer_config(trial), transport=transport) as producer:
        await put_all(producer, trial.warm_up_records())
        records = trial.measured_records()
        with trial.measured():
            acknowledged = await put_all(producer, records)
    trial.finish(acknowledged=acknowledged)


if __name__ == "__main__":
    asyncio.run(main())
