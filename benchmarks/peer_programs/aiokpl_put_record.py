"""aiokpl: put_record for each user record, every outcome awaited after the flush.

Its rate limits are raised so that they have no effect, as for all producers. The rest is its default.
"""

import asyncio
from typing import Any

from aiokpl.config import Config  # type: ignore[import-not-found]
from aiokpl.producer import Producer  # type: ignore[import-not-found]

from benchmarks.trial import REGION, Trial
from benchmarks.workload import STREAM_NAME

_UNLIMITED = 1e12


def unlimited_config(trial: Trial) -> Any:  # noqa: ANN401 - aiokpl is not in every environment
    """Return its defaults without its rate limits."""
    return Config(
        region=REGION,
        endpoint_url=trial.endpoint_url,
        rate_limit_records_per_sec_per_shard=_UNLIMITED,
        rate_limit_bytes_per_sec_per_shard=_UNLIMITED,
    )


async def main() -> None:
    trial = Trial.from_command_line()
    async with Producer(unlimited_config(trial)) as producer:

        async def send(records: list[tuple[str, bytes]]) -> int:
            outcomes: list[Any] = [
                await producer.put_record(stream=STREAM_NAME, partition_key=key, data=data) for key, data in records
            ]
            await producer.flush()
            acknowledged = 0
            for outcome in outcomes:
                acknowledged += (await outcome.wait()).success
            return acknowledged

        await send(trial.warm_up_records())
        records = trial.measured_records()
        with trial.measured():
            acknowledged = await send(records)
    trial.finish(acknowledged=acknowledged, distributions=("aiokpl", "aiobotocore", "botocore", "anyio"))


if __name__ == "__main__":
    asyncio.run(main())
