"""Put orders, wait for their results, and look at what became of each.

    pip install 'kpl-integrations[local]'
    python examples/quickstart.py

It starts a Kinesis of its own on this machine. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`)
names another one, which has a stream `orders`; then region and credentials come from where every AWS client
takes them.
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
        # `put` returns as soon as there is room for the record; it does not wait for Kinesis.
        deliveries = [
            await producer.put(STREAM, partition_key=f"customer-{number % 100}", data=b'{"order": %d}' % number)
            for number in range(1_000)
        ]

        # A delivery is awaited for its result. A record that failed is a result too, never an exception.
        first = await deliveries[0]
        print("first order:", first.shard_id, first.sequence_number, f"{len(first.attempts)} attempt")

        # Everything put before has its final result now, whoever awaits it or not.
        report = await producer.flush(timeout=10.0)
        print("flushed:", report)

        for delivery in deliveries:
            result = delivery.result()
            if not result.successful:
                print("failed:", result.error_code, result.error_message)
    # The end of the block closes the producer: it delivers what is left, for 30 seconds at most.


@asynccontextmanager
async def kinesis() -> AsyncGenerator[Config]:
    """Say where Kinesis is: where KPL_ENDPOINT_URL points to, or here, as long as the block lasts."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield Config(endpoint_url=endpoint_url)
        return
    async with LocalKinesis({STREAM: 4}) as local:
        yield Config(
            region="us-east-1",
            endpoint_url=local.endpoint_url,
            # The local Kinesis takes any; a request must be signed with some.
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 - opens nothing
            # No proxy on the way to this machine, whatever HTTP_PROXY says.
            botocore={"proxies": {}},
        )


async def main() -> None:
    """Run the example."""
    async with kinesis() as config:
        await produce(config)


if __name__ == "__main__":
    asyncio.run(main())
