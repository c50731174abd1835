"""Put from threads: all threads share one producer, which runs an event loop in its own thread.

    pip install 'kpl-integrations[local]'
    python examples/blocking.py

It starts its own local Kinesis. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`)
selects another one with a stream `orders`; region and credentials then come from the usual AWS sources.
"""

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kpl_core import BlockingDelivery, BlockingProducer, Config
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

STREAM = "orders"


def work(producer: BlockingProducer, worker: int) -> list[BlockingDelivery]:
    """Put 250 orders. A put waits up to 5 seconds for a full buffer, then raises BufferFull."""
    return [
        producer.put(STREAM, partition_key=f"worker-{worker}", data=b'{"order": %d}' % number, timeout=5.0)
        for number in range(250)
    ]


def produce(config: Config) -> None:
    """Put from four threads, then read the results."""
    with BlockingProducer(config) as producer:
        with ThreadPoolExecutor(max_workers=4) as threads:
            by_thread = list(threads.map(lambda worker: work(producer, worker), range(4)))
        first = by_thread[0][0].result(timeout=10.0)
        print("first order:", first.shard_id, first.sequence_number, f"{len(first.attempts)} attempt")
        print("flushed:", producer.flush(timeout=10.0))
        failed = [delivery for deliveries in by_thread for delivery in deliveries if not delivery.result().successful]
        print("failed:", len(failed))
    # The end of the block closes the producer, which delivers the remaining records within 30 seconds.


@contextmanager
def kinesis() -> Generator[Config]:
    """Yield the options for the Kinesis of KPL_ENDPOINT_URL, or for a local one that runs until the block ends."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield Config(endpoint_url=endpoint_url)
        return
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as local:
        yield Config(
            region="us-east-1",
            endpoint_url=local.endpoint_url,
            # The local Kinesis accepts any credentials, but a request must be signed.
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 - a dummy value
            # Use no proxy for this machine, even if HTTP_PROXY is set.
            botocore={"proxies": {}},
        )


if __name__ == "__main__":
    with kinesis() as local_or_named:
        produce(local_or_named)
