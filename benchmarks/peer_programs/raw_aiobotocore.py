"""aiobotocore alone: put_records with 500 records a call, 8 calls in flight, no retry, no aggregation."""

import asyncio

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from benchmarks.trial import REGION, Trial
from benchmarks.workload import STREAM_NAME

_RECORDS_PER_CALL = 500
_CALLS_IN_FLIGHT = 8


async def main() -> None:
    trial = Trial.from_command_line()
    config = AioConfig(retries={"total_max_attempts": 1})
    async with get_session().create_client(
        "kinesis", region_name=REGION, endpoint_url=trial.endpoint_url, config=config
    ) as client:

        async def send(records: list[tuple[str, bytes]]) -> int:
            acknowledged = 0
            starts = iter(range(0, len(records), _RECORDS_PER_CALL))

            async def send_next() -> None:
                nonlocal acknowledged
                for start in starts:
                    response = await client.put_records(
                        StreamName=STREAM_NAME,
                        Records=[
                            {"Data": data, "PartitionKey": key}
                            for key, data in records[start : start + _RECORDS_PER_CALL]
                        ],
                    )
                    acknowledged += sum("SequenceNumber" in result for result in response["Records"])

            async with asyncio.TaskGroup() as tasks:
                for _ in range(_CALLS_IN_FLIGHT):
                    tasks.create_task(send_next())
            return acknowledged

        await send(trial.warm_up_records())
        records = trial.measured_records()
        with trial.measured():
            acknowledged = await send(records)
    trial.finish(acknowledged=acknowledged, distributions=("aiobotocore", "botocore", "aiohttp"))


if __name__ == "__main__":
    asyncio.run(main())
