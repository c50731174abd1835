"""Two producers, as if in two processes, share one shard. Each is limited to its share, and neither is throttled.

    pip install 'kpl-integrations[local]'
    python examples/coordinated_producers.py

They synchronize through a folder. In production, where several machines share a stream, use a bucket instead:

    KPL_COORDINATION_STORE='s3://my-bucket/kpl/orders/?region=eu-central-1' python examples/coordinated_producers.py

KPL_ENDPOINT_URL selects a Kinesis. Without it the example starts a local one.
"""

import asyncio
import os
import tempfile
from collections import Counter
from contextlib import nullcontext

from kpl_core import Config, CoordinationOptions, Producer
from kpl_core.hooks import Fact, RequestCompleted
from kpl_integrations.local_kinesis import LocalKinesis

SECONDS = 5.0


async def produce(endpoint_url: str, store: str, counts: Counter[str]) -> None:
    """Put as fast as the producer accepts records."""

    def count(fact: Fact) -> None:
        if isinstance(fact, RequestCompleted):
            counts["sent"] += fact.kinesis_records
            counts["throttled"] += sum(fact.throttled_by_shard.values())

    config = Config(
        region="us-east-1",
        endpoint_url=endpoint_url,
        aws_access_key_id="local",
        aws_secret_access_key="local",  # noqa: S106 - a dummy value
        aggregation_enabled=False,
        max_outstanding_records=500,
        # At most two processes. The interval of half a second keeps the example short; the timeout is for a busy disk.
        coordination=CoordinationOptions(store=store, max_workers=2, interval_seconds=0.5, store_timeout_seconds=20.0),
    )
    async with Producer(config, hooks=[count]) as producer:
        end = asyncio.get_running_loop().time() + SECONDS
        number = 0
        while asyncio.get_running_loop().time() < end:
            number += 1
            _ = await producer.put("orders", partition_key=str(number), data=b"an order")
        if producer.coordination is not None:
            for resource, share in producer.coordination.shares().items():
                print(f"{resource}: {share:.0%} of the limit")


async def main() -> None:
    """Run both side by side."""
    counts: Counter[str] = Counter()
    url = os.environ.get("KPL_ENDPOINT_URL")
    with tempfile.TemporaryDirectory() as folder:
        store = os.environ.get("KPL_COORDINATION_STORE", f"file://{folder}")
        async with nullcontext() if url else LocalKinesis({"orders": 1}) as local:
            endpoint_url = url or (local.endpoint_url if local else "")
            await asyncio.gather(*(produce(endpoint_url, store, counts) for _ in range(2)))
    print(f"{counts['sent']:,} Kinesis records sent, {counts['throttled']:,} of them throttled")


if __name__ == "__main__":
    asyncio.run(main())
