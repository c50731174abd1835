"""Puts what waited into the producer, each entry by its kind; and where there is no room, waits or keeps it on disk."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Literal

from kpl_core import BufferFull, Delivery, Producer
from kpl_core.records.user_record import Tier
from kpl_integrations.logging_handler.entry import Entry, WholeAndStub
from kpl_integrations.logging_handler.partition_key import random_keys
from kpl_integrations.logging_handler.special_records import SpecialRecords

__all__ = ["EntryPutter", "WithoutRoom"]

# What becomes of an entry for which there is no room, once it cannot wait: it waits all the same, or goes to the
# spool or the dead letters.
WithoutRoom = Literal["wait", "spool", "dlq"]
_POLL_SECONDS: Final = 0.02


class EntryPutter:
    """Puts entries into one stream of one producer.

    `cannot_wait` says that what waits behind an entry would be lost if that waited for room.
    """

    def __init__(
        self, stream: str, producer: Producer, *, without_room: WithoutRoom, cannot_wait: Callable[[], bool]
    ) -> None:
        self._stream = stream
        self._producer = producer
        self._without_room = without_room
        self._cannot_wait = cannot_wait
        self._keys = random_keys()
        self.special = SpecialRecords()

    async def put(self, entry: Entry, *, is_highest: bool) -> None:
        """Put an entry, as soon as there is room for it; raises as `Producer.put` does."""
        key, data = (None, entry) if isinstance(entry, bytes) else entry
        key = next(self._keys) if key is None else key
        tier: Tier = "critical" if is_highest else "normal"
        if isinstance(data, bytes):
            _ = await self._put(key, data, tier)
        elif isinstance(data, WholeAndStub):
            self.special.add_pieces([await self._put(key, data.stub, tier)], log_records=0)
            self.special.add_letter(self._bury(key, data, tier))
        else:
            await self._put_pieces(key, data, tier)

    async def _put_pieces(self, key: str, pieces: tuple[bytes, ...], tier: Tier) -> None:
        deliveries: list[Delivery] = []
        try:
            for piece in pieces:
                deliveries.append(await self._put(key, piece, tier))  # noqa: PERF401 - those put before a cancellation count
        finally:
            self.special.add_pieces(deliveries, log_records=int(len(deliveries) == len(pieces)))

    def put_notice(self, data: bytes) -> Delivery:
        """Put a notice now; raises as `Producer.put_nowait` does."""
        return self._producer.put_nowait(self._stream, partition_key=next(self._keys), data=data, tier="critical")

    async def _put(self, key: str, data: bytes, tier: Tier) -> Delivery:
        if self._without_room == "wait":
            return await self._producer.put(self._stream, partition_key=key, data=data, tier=tier)
        while True:
            has_room = self._producer.buffer_limit.has_room(size_bytes=len(key) + len(data), tier=tier)
            if has_room or self._cannot_wait():
                # Without room a spool takes any tier, and the dead letters take what is bulk.
                lowered = tier if has_room or self._without_room == "spool" else "bulk"
                try:
                    return self._producer.put_nowait(self._stream, partition_key=key, data=data, tier=lowered)
                except BufferFull:
                    # The disk is behind, too.
                    pass
            await asyncio.sleep(_POLL_SECONDS)

    def _bury(self, key: str, record: WholeAndStub, tier: Tier) -> "Future[None] | None":
        letters = self._producer.dead_letters
        if letters is None:
            return None
        from kpl_core.durability.spool import SpooledRecord, SpoolError  # noqa: PLC0415 - SQLite, imported by now

        metadata = {"dead_letter": record.mark}
        spooled = SpooledRecord(self._stream, key, record.whole, time.time(), tier=tier, metadata=metadata)
        try:
            return letters.bury_nowait([letters.letter(spooled, "oversize")])
        except SpoolError:
            return None
