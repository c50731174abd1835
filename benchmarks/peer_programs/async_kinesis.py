"""async-kinesis: put for each user record, then flush; an acknowledgement is an item of its flush callback.

Option `processor`: "string" sends every record alone with its key; "kpl" aggregates. It accepts no
keys and sends each aggregated record with a generated key. Its rate limits are raised so that they have
no effect, as for all producers.
"""

import asyncio
from typing import Any

from kinesis import Producer
from kinesis.processors import KPLStringProcessor, StringProcessor

from benchmarks.trial import REGION, Trial
from benchmarks.workload import STREAM_NAME

_UNLIMITED = 10**9
_AGGREGATED_RECORD_BYTES = 51_200


async def main() -> None:
    trial = Trial.from_command_line()
    is_aggregating = trial.options["processor"] == "kpl"
    acknowledged = 0

    async def count(items: list[Any]) -> None:
        nonlocal acknowledged
        acknowledged += sum(item.n for item in items)

    async with Producer(
        STREAM_NAME,
        region_name=REGION,
        endpoint_url=trial.endpoint_url,
        put_rate_limit_per_shard=_UNLIMITED,
        put_bandwidth_limit_per_shard=_UNLIMITED,
        processor=KPLStringProcessor(max_size=_AGGREGATED_RECORD_BYTES) if is_aggregating else StringProcessor(),
        after_flush_fun=count,
    ) as producer:

        async def send(records: list[tuple[str | None, str]]) -> None:
            for key, text in records:
                await producer.put(text, partition_key=key)
            await producer.flush()

        def as_text(records: list[tuple[str, bytes]]) -> list[tuple[str | None, str]]:
            return [(None if is_aggregating else key, data.decode()) for key, data in records]

        # A short warm-up, because its throttle scans the records of the last second for every record.
        await send(as_text(trial.warm_up_records()[:100]))
        records = as_text(trial.measured_records())
        acknowledged = 0
        with trial.measured():
            await send(records)
    trial.finish(acknowledged=acknowledged, distributions=("async-kinesis", "aiobotocore", "botocore"))


if __name__ == "__main__":
    asyncio.run(main())
