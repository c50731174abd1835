"""Fetch a stream's shard map in the background, while the old one stays in use.

Attempts back off: 1 s, then 1.5 times as long each (KPL, `shard_map.h`), up to 30 s, with equal jitter. A stream
whose shards cannot be listed goes on without a map, one user record to a Kinesis record, and says so once.
"""

import logging
from collections.abc import Callable
from typing import Final

import anyio

from kpl_core.backoff import ExponentialBackoff
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.records.put_records import RequestFailure
from kpl_core.transport.transport import KinesisTransport, as_shards

__all__ = ["ShardMapRefresher"]

BACKOFF: Final = ExponentialBackoff(base_seconds=1.0, cap_seconds=30.0, factor=1.5, jitter="equal")
# Between two refreshes, however often results ask: an endpoint whose answers never match its own
# map must not be asked for it with every request.
SPACING_SECONDS: Final = 0.25

_logger = logging.getLogger("kpl_core")


class ShardMapRefresher:
    """Keeps one pipeline's shard map up to date."""

    def __init__(
        self,
        pipeline: StreamPipeline,
        transport: KinesisTransport,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._transport = transport
        self._clock = clock
        self._chance = chance
        self._warned: str | None = None
        self._wanted = anyio.Event()

    def wake(self) -> None:
        """Fetch a new map soon."""
        self._wanted.set()

    async def run(self, changed: Callable[[], None]) -> None:
        """Refresh whenever the map is unknown or asked for; call `changed` after each. Cancelled by the producer."""
        await self._refresh()
        changed()
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            if self._pipeline.shard_map.refresh_wanted:
                await self._refresh()
                changed()
                await anyio.sleep(SPACING_SECONDS)
                if self._pipeline.shard_map.refresh_wanted:
                    self.wake()

    async def _refresh(self) -> None:
        failures = 0
        while True:
            shards = as_shards(await self._transport.list_shards(self._pipeline.stream))
            if not isinstance(shards, RequestFailure):
                self._warned = None
                self._pipeline.shards_changed(shards, self._clock())
                return
            self._warn(shards)
            failures += 1
            await anyio.sleep(BACKOFF.seconds(failures, self._chance))

    def _warn(self, failure: RequestFailure) -> None:
        if failure.code == self._warned:
            return
        self._warned = failure.code
        consequence = (
            "the old shard map stays in use"
            if self._pipeline.shard_map.known
            else "until then its user records travel alone, without aggregation"
        )
        _logger.warning(
            "shards of stream %r cannot be listed (%s: %s); trying again in the background, %s",
            self._pipeline.stream,
            failure.code,
            failure.message,
            consequence,
        )
