"""What the driver learns about a stream in the background: its shard map, and how large its records may be.

The old shard map stays in use while a new one is fetched. A stream whose shards cannot be listed goes on without a map,
one user record in each Kinesis record, and logs that once. Until the record limit is known, the service's default is
assumed. Failed calls back off: 1 s, then 1.5 times as long each (KPL, `shard_map.h`), up to 30 s and 600 s, with equal
jitter.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import anyio

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.records.put_records import RequestFailure
from kpl_core.transport.transport import LISTING_CALLS, KinesisTransport, answer_within, as_record_limit, as_shards

BACKOFF: Final = ExponentialBackoff(base_seconds=1.0, cap_seconds=30.0, factor=1.5, jitter="equal")
# Between two refreshes, however often results ask for one. An endpoint whose answers never match its own shard map must
# not be asked for it after every request.
SPACING_SECONDS: Final = 0.25

# A missing permission may be granted any day. Asking more often would only fill the audit trail.
LIMIT_BACKOFF: Final = ExponentialBackoff(base_seconds=1.0, cap_seconds=600.0, factor=1.5, jitter="equal")

_logger = logging.getLogger("kpl_core")

T = TypeVar("T")


async def until_answered(
    ask: Callable[[], Awaitable[T | RequestFailure]],
    backoff: ExponentialBackoff,
    chance: Callable[[], float],
    log: Callable[[RequestFailure], None],
) -> T:
    """Call `ask` until it does not fail. `log` gets a failure if its code differs from the previous one's."""
    failures, logged = 0, None
    while isinstance(answer := await ask(), RequestFailure):
        if answer.code != logged:
            logged = answer.code
            log(answer)
        failures += 1
        await anyio.sleep(backoff.seconds(failures, chance))
    return answer


class ShardMapRefresher:
    """Keeps one pipeline's shard map up to date."""

    def __init__(
        self,
        pipeline: StreamPipeline,
        transport: KinesisTransport,
        *,
        call_seconds: float,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._transport = transport
        self._listing_seconds = LISTING_CALLS * call_seconds
        self._clock = clock
        self._chance = chance
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
        listing = partial(self._transport.list_shards, self._pipeline.stream)
        ask = partial(answer_within, self._listing_seconds, "list_shards", listing, as_shards)
        shards = await until_answered(ask, BACKOFF, self._chance, self._warn)
        before = self._pipeline.shard_map.open_ranges()
        if any(before.get(each.shard_id, each.digests) != each.digests for each in shards):
            _logger.warning(
                "stream %r was deleted and made again: its shards have the ids of the old ones and other ranges; "
                "consumers may have dropped aggregated records that were sent since then",
                self._pipeline.stream,
            )
        self._pipeline.shards_changed(shards, self._clock())

    def _warn(self, failure: RequestFailure) -> None:
        consequence = (
            "the old shard map stays in use"
            if self._pipeline.shard_map.open_shards
            else "until then its user records travel alone, without aggregation"
        )
        _logger.warning(
            "shards of stream %r cannot be listed (%s: %s); trying again in the background, %s",
            self._pipeline.stream,
            failure.code,
            failure.message,
            consequence,
        )


async def learn_record_limit(
    pipeline: StreamPipeline, transport: KinesisTransport, chance: Callable[[], float], *, call_seconds: float
) -> None:
    """Ask for one stream's record limit until the service answers. Cancelled by the producer."""
    asking = partial(transport.max_record_bytes, pipeline.stream)
    ask = partial(answer_within, call_seconds, "max_record_bytes", asking, as_record_limit)

    def log(failure: RequestFailure) -> None:
        _logger.info(
            "the record limit of stream %r is not known (%s); assuming %d bytes and asking again in the "
            "background, see Config.max_record_size",
            pipeline.stream,
            failure.code,
            pipeline.max_record_bytes,
        )

    pipeline.max_record_bytes = await until_answered(ask, LIMIT_BACKOFF, chance, log)
