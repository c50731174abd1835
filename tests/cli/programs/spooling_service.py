"""A service that writes records ahead and reaches no Kinesis: its spool has them when it is killed.

Usage: spooling_service.py FILE. It prints `spooled` when all records are acknowledged, and then waits.
"""

import asyncio
import os
import sys
from pathlib import Path

from kpl_core import Config, Producer, SpoolOptions

# (stream, partition key, data); the keys of a stream are in order.
RECORDS = [
    *(("orders", f"key-{number % 2}", b"order %d" % number) for number in range(20)),
    ("clicks", "key", b"\xff\x00"),
    ("clicks", "key-ü", "ü".encode()),
]


async def main(path: Path) -> None:
    config = Config(
        region="us-east-1",
        # Nothing listens on the port "discard".
        endpoint_url="http://127.0.0.1:9",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        spool=SpoolOptions(path=path, mode="write_ahead"),
    )
    async with Producer(config) as producer:
        for stream, key, data in RECORDS:
            _ = await producer.put(stream, partition_key=key, data=data)
        os.write(1, b"spooled\n")
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
