"""How fast the demo puts: a little slower than the shards take, or put-to-ack would only tell how long a queue is."""

import asyncio
import time
from typing import Final

from kpl_core.options.kinesis_limits import BYTES_PER_SECOND_PER_SHARD

__all__ = ["DemoPace"]

# Of what the shards take.
LOAD: Final = 0.9
# What aggregation adds to a small record, about.
_OVERHEAD_BYTES: Final = 10
_STEP_SECONDS: Final = 0.005


class DemoPace:
    """Waits whenever more was put than the shards will have taken by now."""

    def __init__(self, shards: int) -> None:
        self._bytes_per_second = LOAD * shards * BYTES_PER_SECOND_PER_SHARD
        self._began = 0.0
        self._put_bytes = 0

    def begin(self) -> None:
        """Count from now on."""
        self._began = time.monotonic()

    async def keep(self, records: int, size_bytes: int) -> None:
        """Note what was put, keys and data; wait if that was too fast."""
        self._put_bytes += size_bytes + records * _OVERHEAD_BYTES
        ahead = self._put_bytes / self._bytes_per_second - (time.monotonic() - self._began)
        if ahead > _STEP_SECONDS:
            await asyncio.sleep(ahead)
