"""Outlive an outage: what cannot be delivered waits on disk, and arrives when Kinesis is back.

    pip install 'kpl-integrations[local]'
    python examples/spool_and_dead_letters.py

It starts a Kinesis of its own on this machine, and breaks it for a while.
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
    """Return a producer's options with everything that keeps records safe."""
    return Config(
        region="us-east-1",
        endpoint_url=endpoint_url,
        aws_access_key_id="local",
        aws_secret_access_key="local",  # noqa: S106 - opens nothing
        botocore={"proxies": {}},
        # So short that the example need not last; 30 seconds is the default.
        record_ttl_ms=300,
        # So that the record Kinesis refuses below travels alone, and is refused alone.
        aggregation_enabled=False,
        # "write_ahead": on disk before `await put()` returns. "overflow" spools only what could not be delivered.
        spool=SpoolOptions(path=spool, mode="write_ahead"),
        dead_letters=DeadLetterOptions(alarm_depth=100),
        breaker=BreakerPolicy(),
        tiers=TierPolicy(critical_reserve=0.1, bulk_share=0.5),
    )


async def main() -> None:
    """Put through an outage, and see everything arrive."""
    # The log tells of outages; this one is on purpose.
    logging.getLogger("kpl_core").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        async with LocalKinesis({STREAM: 2}) as kinesis:
            outage = kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
            kinesis.faults.add(RecordError("ValidationException"), When(record=lambda key, _: key == "poison"))

            async with Producer(config(kinesis.endpoint_url, Path(folder) / "orders.spool")) as producer:
                for number in range(200):
                    # When this returns the order is on disk: acknowledge it to whoever sent it.
                    _ = await producer.put(STREAM, partition_key=f"customer-{number % 20}", data=b"%d" % number)
                _ = await producer.put(STREAM, partition_key="poison", data=b"?", metadata={"severity": "minor"})
                await asyncio.sleep(0.5)
                print("in the outage:", producer.report())

                kinesis.faults.remove(outage)
                # The replay tries again by itself, with pauses that grow with the outage.
                while producer.report().spooled or producer.report().buffered:  # noqa: ASYNC110 - for an example
                    await asyncio.sleep(0.05)
                print("after it:     ", producer.report())


if __name__ == "__main__":
    asyncio.run(main())
