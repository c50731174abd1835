"""2,000 user records of 1 KiB a second on 64 shards: the load for the memory and event loop benchmarks."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.trial import REGION
from benchmarks.watched_kinesis import STREAM_NAME
from kpl_core import Config, Producer

__all__ = ["RECORDS_PER_SECOND", "SHARDS", "config_for", "put_steadily"]

SHARDS = 64
RECORDS_PER_SECOND = 2_000
_DATA = bytes(1024)
_KEYS = [f"key-{number:012d}" for number in range(10_000)]
# A service puts one record for each of its requests, so only a few at a time.
_TICK_SECONDS = 0.005


def config_for(endpoint_url: str, **options: Any) -> Config:  # noqa: ANN401 - any option
    """Return the default options, for a service that does not check signatures."""
    return Config(
        **options,
        region=REGION,
        endpoint_url=endpoint_url,
        aws_access_key_id="benchmark",
        aws_secret_access_key="benchmark",  # noqa: S106 - not checked
    )


async def put_steadily(
    producer: Producer, seconds: float, each_second: Callable[[int], Awaitable[None]] | None = None
) -> int:
    """Put at the steady rate and await no delivery; return how many were put.

    Calls `each_second` with the number of each ended second.
    """
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    count = ended = 0
    while (elapsed := loop.time() - started_at) < seconds:
        while count < elapsed * RECORDS_PER_SECOND:
            _ = producer.put_nowait(STREAM_NAME, partition_key=_KEYS[count % len(_KEYS)], data=_DATA)
            count += 1
        if each_second is not None and elapsed >= ended + 1:
            ended += 1
            await each_second(ended)
        await asyncio.sleep(_TICK_SECONDS)
    return count
