"""One of two processes that compete for an object: `python fighter.py STORE_URL ATTEMPTS`, prints what it won as JSON.

Each attempt reads the object and writes it on the condition that it still has that version.
"""

import asyncio
import json
import os
import sys

from kpl_core.coordination.stores import open_store


async def fight(url: str, attempts: int) -> dict[str, object]:
    """Return the versions that were replaced, and how often the other process was faster."""
    store = await open_store(url)
    replaced, refused = [], 0
    try:
        # Both start when both are running.
        await store.write(f"here-{os.getpid()}", b"")
        while len((await store.read_all("here-")).bodies) < 2:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        for attempt in range(attempts):
            reading = await store.read("summary")
            written = await store.write("summary", f"{os.getpid()} {attempt}".encode(), expected=reading.version)
            if written.version is None:
                refused += 1
            else:
                replaced.append(reading.version)
    finally:
        await store.aclose()
    return {"replaced": replaced, "refused": refused}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(fight(sys.argv[1], int(sys.argv[2])))))
