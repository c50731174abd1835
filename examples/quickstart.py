"""Put orders, wait for their results, and print the failures.

    pip install 'kpl-integrations[local]'
    python examples/quickstart.py

It starts its own local Kinesis. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`)
selects another one with a stream `orders`; region and credentials then come from the usual AWS sources.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from kpl_core import Config, Producer
from kpl_integrations.local_kinesis import LocalKinesis

STREAM = "orders"


async def produce(config: Config) -> None:
    """Put 1,000 orders of 100 customers; the orders of a customer share a partition key."""
    async with Producer(config) as producer:
        # `put` returns as soon as the buffer has space for the record; it does not wait for Kinesis.
        deliveries = [
            await producer.put(STREAM, partition_key=f"customer-{number % 100}", data=b'{"order": %d}' % number)
            for number in range(1_000)
        ]

        # Await a delivery for its result. A failed record is a result too, never an exception.
        first = await deliveries[0]
        print("first order:", first.shard_id, first.sequence_number, f"{len(first.attempts)} attempt")

        # All records put before have their final result now, even if the program does not await them.
        report = await producer.flush(timeout=10.0)
        print("flushed:", report)

        for delivery in deliveries:
            result = delivery.result()
            if not result.successful:
                print("failed:", result.error_code, result.error_message)
    # The end of the block closes the producer, which delivers the remaining records within 30 seconds.


@asynccontextmanager
async def kinesis() -> AsyncGenerator[Config]:
    """Yield the options for the Kinesis of KPL_ENDPOINT_URL, or for a local one that runs until the block ends."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield Config(endpoint_url=endpoint_url)
        return
    async with LocalKinesis({STREAM: 4}) as local:
        yield Config(
            region="us-east-1",
            endpoint_url=local.endpoint_url,
            # The local Kinesis accepts any credentials, but a request must be signed.
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 - a dummy value
            # Use no proxy for this machine, even if HTTP_PROXY is set.
            botocore={"proxies": {}},
        )


async def main() -> None:
    """Run the example."""
    async with kinesis() as config:
        await produce(config)


if __name__ == "__main__":
    asyncio.run(main())
