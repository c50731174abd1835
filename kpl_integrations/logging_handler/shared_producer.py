"""A `BlockingProducer` of the application's, used by the sender beside everybody else; never closed by it.

It counts the log records among what that producer carries, by their own deliveries.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from typing import Final, Self

from kpl_core import BlockingDelivery, BlockingProducer, BufferFull, ProducerReport, RecordResult
from kpl_core.records.user_record import Tier

__all__ = ["SHARED_THREAD", "SharedProducer"]

# The name of the thread in which every BlockingProducer runs its loop.
SHARED_THREAD: Final = "kpl-producer"
_POLL_SECONDS: Final = 0.005


class _SharedDelivery:
    """What `SpecialRecords` asks of a delivery."""

    def __init__(self, delivery: BlockingDelivery) -> None:
        self._delivery = delivery

    def peek(self) -> RecordResult | None:
        """Return the result, None while it is not known."""
        return self._delivery.result(0) if self._delivery.done else None


class SharedProducer:
    """The part of a `Producer` that the sender uses, over one that belongs to others."""

    def __init__(self, producer: BlockingProducer) -> None:
        self._producer = producer
        self._pending: deque[BlockingDelivery] = deque()
        self._accepted = 0
        self._delivered = 0
        self._failed: Counter[str] = Counter()
        # Whoever asks for counts settles, too.
        self._settling = threading.Lock()

    async def __aenter__(self) -> Self:
        """Take part."""
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        """Leave; the producer goes on."""

    def put_nowait(self, stream: str, *, partition_key: str, data: bytes, tier: Tier = "normal") -> _SharedDelivery:
        """Put, or raise as `BlockingProducer.put_nowait` does."""
        delivery = self._producer.put_nowait(stream, partition_key=partition_key, data=data, tier=tier)
        self._accepted += 1
        self._pending.append(delivery)
        return _SharedDelivery(delivery)

    async def put(self, stream: str, *, partition_key: str, data: bytes, tier: Tier = "normal") -> _SharedDelivery:
        """Put as soon as there is room."""
        while True:
            try:
                return self.put_nowait(stream, partition_key=partition_key, data=data, tier=tier)
            except BufferFull:
                self._settle()
                await asyncio.sleep(_POLL_SECONDS)

    def report(self) -> ProducerReport:
        """Return the counts of log records only."""
        self._settle()
        return ProducerReport(
            accepted=self._accepted,
            delivered=self._delivered,
            failed=dict(self._failed),
            buffered=self._accepted - self._delivered - self._failed.total(),
            buffered_bytes=0,
            complete=not self._pending,
        )

    async def flush(self, timeout: float) -> ProducerReport:
        """Wait until every log record has its result, for `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while not (report := self.report()).complete and time.monotonic() < deadline:  # noqa: ASYNC110 - threads tell no loop
            await asyncio.sleep(_POLL_SECONDS)
        return report

    async def close(self, timeout: float) -> ProducerReport:
        """Flush; what has no result then is counted as `Unknown`, because the owner may still deliver it."""
        report = await self.flush(timeout)
        self._failed["Unknown"] += report.buffered
        self._pending.clear()
        return self.report()

    def _settle(self) -> None:
        """Count what has its result; in order, so that a late one holds back the counting of later ones only."""
        with self._settling:
            while self._pending and self._pending[0].done:
                result = self._pending.popleft().result(0)
                if result.successful:
                    self._delivered += 1
                else:
                    self._failed[result.error_code or ""] += 1
