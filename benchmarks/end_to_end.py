"""Run kpl_core through its real transport to the sink, in a process that `benchmarks.rounds` starts.

Options: `api`, one of the ways to put below; `config`, options of `kpl_core.Config` that differ from
the default. Rate limits are raised so that they have no effect, as for all producers. The result of every
delivery is read inside the measured time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.trial import REGION, Trial
from benchmarks.workload import STREAM_NAME
from kpl_core import BufferFull, Config, Delivery, Producer

__all__ = ["DISTRIBUTIONS", "PUT_WAYS", "UNLIMITED", "producer_config"]

Records = list[tuple[str, bytes]]

#: The packages whose versions are in the answer.
DISTRIBUTIONS = ("aiobotocore", "botocore", "aiohttp")
#: Shards without limits, because this benchmark does not measure limiting.
UNLIMITED: dict[str, Any] = {"rate_limit_records_per_sec_per_shard": 1e12, "rate_limit_bytes_per_sec_per_shard": 1e15}

_RECORDS_PER_PUT_MANY = 1_000
_TASK_COUNT = 1_000


def producer_config(trial: Trial) -> Config:
    """Return the configuration of a trial."""
    return Config(
        region=REGION, endpoint_url=trial.endpoint_url or None, **(UNLIMITED | trial.options.get("config", {}))
    )


async def put_many(producer: Producer, records: Records) -> int:
    """`put_many`, 1,000 records a call; results after the flush."""
    calls = [
        await producer.put_many(STREAM_NAME, records[start : start + _RECORDS_PER_PUT_MANY])
        for start in range(0, len(records), _RECORDS_PER_PUT_MANY)
    ]
    await producer.flush()
    return sum([len(deliveries) - len(await deliveries.failures()) for deliveries in calls])


async def put(producer: Producer, records: Records) -> int:
    """`await put` from one task; results after the flush."""
    deliveries = [await producer.put(STREAM_NAME, partition_key=key, data=data) for key, data in records]
    await producer.flush()
    return await _count_successful(deliveries)


async def put_nowait(producer: Producer, records: Records) -> int:
    """`put_nowait`, and `await put` when the buffer is full; results after the flush."""
    deliveries: list[Delivery] = []
    for key, data in records:
        try:
            delivery = producer.put_nowait(STREAM_NAME, partition_key=key, data=data)
        except BufferFull:
            delivery = await producer.put(STREAM_NAME, partition_key=key, data=data)
        deliveries.append(delivery)
    await producer.flush()
    return await _count_successful(deliveries)


async def put_in_tasks(producer: Producer, records: Records) -> int:
    """`await put` from 1,000 tasks, each with its share of the records; results after the flush."""
    deliveries: list[Delivery] = []

    async def put_share(share: Records) -> None:
        for key, data in share:
            deliveries.append(await producer.put(STREAM_NAME, partition_key=key, data=data))

    async with asyncio.TaskGroup() as tasks:
        for number in range(_TASK_COUNT):
            tasks.create_task(put_share(records[number::_TASK_COUNT]))
    await producer.flush()
    return await _count_successful(deliveries)


async def put_from_tasks(producer: Producer, records: Records) -> int:
    """1,000 tasks, each of which puts one record and awaits its result before the next."""
    remaining = iter(records)
    successful = 0

    async def put_one_by_one() -> None:
        nonlocal successful
        for key, data in remaining:
            delivery = await producer.put(STREAM_NAME, partition_key=key, data=data)
            result = await delivery  # await before the sum is read, because other tasks add to it meanwhile
            successful += result.successful

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_TASK_COUNT):
            tasks.create_task(put_one_by_one())
    return successful


async def _count_successful(deliveries: list[Delivery]) -> int:
    successful = 0
    for delivery in deliveries:
        successful += (await delivery).successful
    return successful


PUT_WAYS: dict[str, Callable[[Producer, Records], Awaitable[int]]] = {
    "put_many": put_many,
    "put": put,
    "put_nowait": put_nowait,
    "put_in_tasks": put_in_tasks,
    "put_from_tasks": put_from_tasks,
}


async def main() -> None:
    trial = Trial.from_command_line()
    put_all = PUT_WAYS[trial.options.get("api", "put_many")]
    async with Producer(producer_config(trial)) as producer:
        await put_all(producer, trial.warm_up_records())
        records = trial.measured_records()
        with trial.measured():
            acknowledged = await put_all(producer, records)
    trial.finish(acknowledged=acknowledged, distributions=DISTRIBUTIONS)


if __name__ == "__main__":
    asyncio.run(main())
