"""Put from threads: one producer, shared by all of them, that runs a loop in a thread of its own.

    pip install 'kpl-integrations[local]'
    python examples/blocking.py

It starts a Kinesis of its own on this machine. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`)
names another one, which has a stream `orders`; then region and credentials come from where every AWS client
takes them.
"""

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kpl_core import BlockingDelivery, BlockingProducer, Config
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

STREAM = "orders"


def work(producer: BlockingProducer, worker: int) -> list[BlockingDelivery]:
    """Put 250 orders. A full buffer makes a put wait, 5 seconds at most; then it raises BufferFull."""
    return [
        producer.put(STREAM, partition_key=f"worker-{worker}", data=b'{"order": %d}' % number, timeout=5.0)
        for number in range(250)
    ]


def produce(config: Config) -> None:
    """Put from four threads, then look at the results."""
    with BlockingProducer(config) as producer:
        with ThreadPoolExecutor(max_workers=4) as threads:
            handed_in = list(threads.map(lambda worker: work(producer, worker), range(4)))
        first = handed_in[0][0].result(timeout=10.0)
        print("first order:", first.shard_id, first.sequence_number, f"{len(first.attempts)} attempt")
        print("flushed:", producer.flush(timeout=10.0))
        failed = [delivery for deliveries in handed_in for delivery in deliveries if not delivery.result().successful]
        print("failed:", len(failed))
    # The end of the block closes the producer: it delivers what is left, for 30 seconds at most.


@contextmanager
def kinesis() -> Generator[Config]:
    """Say where Kinesis is: where KPL_ENDPOINT_URL points to, or here, as long as the block lasts."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield Config(endpoint_url=endpoint_url)
        return
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as local:
        yield Config(
            region="us-east-1",
            endpoint_url=local.endpoint_url,
            # The local Kinesis takes any; a request must be signed with some.
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 - opens nothing
            # No proxy on the way to this machine, whatever HTTP_PROXY says.
            botocore={"proxies": {}},
        )


if __name__ == "__main__":
    with kinesis() as local_or_named:
        produce(local_or_named)
