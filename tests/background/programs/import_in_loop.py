"""Prints what the event loop's thread imports between the construction of a producer and its first result."""

import asyncio
import os
import sys
import threading

from kpl_core import Config, Producer


class Imports:
    """A finder that finds nothing, and prints what the main thread looks for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if threading.current_thread() is threading.main_thread():
            sys.stdout.write(f"{name}\n")


async def main() -> None:
    config = Config(region="us-east-1", endpoint_url=os.environ["KPL_ENDPOINT_URL"], record_max_buffered_time_ms=5)
    producer = Producer(config)
    sys.meta_path.insert(0, Imports())
    async with producer:
        delivery = await producer.put("logs", partition_key="k", data=b"x")
        assert (await delivery).successful


asyncio.run(main())
