"""Learn how large a stream's records may be, in the background; until then the service's default is assumed."""

import logging
from collections.abc import Callable
from typing import Final

import anyio

from kpl_core.backoff import ExponentialBackoff
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.records.put_records import RequestFailure
from kpl_core.transport.transport import KinesisTransport, as_record_limit

__all__ = ["RecordLimit"]

# A right that is missing may be given any day; to ask for it more often would only fill its audit trail.
BACKOFF: Final = ExponentialBackoff(base_seconds=1.0, cap_seconds=600.0, factor=1.5, jitter="equal")

_logger = logging.getLogger("kpl_core")


class RecordLimit:
    """Asks for one stream's limit until it is told."""

    def __init__(self, pipeline: StreamPipeline, transport: KinesisTransport, *, chance: Callable[[], float]) -> None:
        self._pipeline = pipeline
        self._transport = transport
        self._chance = chance

    async def run(self) -> None:
        """Return when the limit is known. Cancelled by the producer."""
        told: str | None = None
        failures = 0
        while True:
            limit = as_record_limit(await self._transport.max_record_bytes(self._pipeline.stream))
            if not isinstance(limit, RequestFailure):
                self._pipeline.max_record_bytes = limit
                return
            if limit.code != told:
                told = limit.code
                _logger.info(
                    "the record limit of stream %r is not known (%s); assuming %d bytes and asking again in the "
                    "background, see Config.max_record_size",
                    self._pipeline.stream,
                    limit.code,
                    self._pipeline.max_record_bytes,
                )
            failures += 1
            await anyio.sleep(BACKOFF.seconds(failures, self._chance))
