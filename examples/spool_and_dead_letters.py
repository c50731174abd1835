"""Survive an outage: undelivered records wait on disk and are delivered when Kinesis works again.

    pip install 'kpl-integrations[local]'
    python examples/spool_and_dead_letters.py

It starts its own local Kinesis and makes it fail for a while.
"""

import asyncio
import logging
import tempfile
from pathlib import Path

from kpl_core import BreakerPolicy, Config, DeadLetterOptions, Producer, SpoolOptions, TierPolicy
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.local_kinesis import LocalKinesis

STREAM = "orders"


def config(endpoint_url: str, spool: Path) -> Config:
    """Return a producer's options with spool, dead letters, breaker and tiers."""
    return Config(
        region="us-east-1",
        endpoint_url=endpoint_url,
        aws_access_key_id="local",
        aws_secret_access_key="local",  # noqa: S106 - a dummy value
        botocore={"proxies": {}},
        # Short, to keep the example short. The default is 30 seconds.
        record_ttl_ms=300,
        # So that the record that Kinesis rejects below is sent alone and rejected alone.
        aggregation_enabled=False,
        # "write_ahead": on disk before `await put()` returns. "overflow" spools only undelivered records.
        spool=SpoolOptions(path=spool, mode="write_ahead"),
        dead_letters=DeadLetterOptions(alarm_depth=100),
        breaker=BreakerPolicy(),
        tiers=TierPolicy(critical_reserve=0.1, bulk_share=0.5),
    )


async def main() -> None:
    """Put records during an outage and wait until all have arrived."""
    # Hide the warnings about this intended outage.
    logging.getLogger("kpl_core").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        async with LocalKinesis({STREAM: 2}) as kinesis:
            outage = kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
            kinesis.faults.add(RecordError("ValidationException"), When(record=lambda key, _: key == "poison"))

            async with Producer(config(kinesis.endpoint_url, Path(folder) / "orders.spool")) as producer:
                for number in range(200):
                    # When this returns the order is on disk: a service would acknowledge it to its client now.
                    _ = await producer.put(STREAM, partition_key=f"customer-{number % 20}", data=b"%d" % number)
                _ = await producer.put(STREAM, partition_key="poison", data=b"?", metadata={"severity": "minor"})
                await asyncio.sleep(0.5)
                print("in the outage:", producer.report())

                kinesis.faults.remove(outage)
                # The replay retries automatically, with growing pauses.
                while producer.report().spooled or producer.report().buffered:  # noqa: ASYNC110 - for an example
                    await asyncio.sleep(0.05)
                print("after it:     ", producer.report())


if __name__ == "__main__":
    asyncio.run(main())
