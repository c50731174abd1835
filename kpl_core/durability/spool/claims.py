"""Who holds what: the ids, bytes and claims of a spool, in memory; pure.

A stored record is in exactly one of three places: *claimed* (somebody holds it and will
confirm or release it), *leaving* (confirmed, its row not yet deleted) or *backlog*. The
backlog is the rows behind the cursor that nobody claimed, and those released since.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from kpl_core.durability.spool.envelope import SpooledRecord
from kpl_core.durability.spool.spool_error import SpoolFull
from kpl_core.durability.spool.store import SpoolTotals

__all__ = ["BacklogQuery", "ClaimTable", "Claimed"]

# What a row costs beside its envelope: key, checksum, headers.
_ROW_BYTES: Final = 32


class Claimed(NamedTuple):
    """A record of the backlog, now in the hands of whoever asked."""

    id: int
    record: SpooledRecord


class BacklogQuery(NamedTuple):
    """Which rows to read next: those released, oldest first, and those after the cursor."""

    released_ids: list[int]
    after_id: int


class ClaimTable:
    """Counts every stored byte once, from its reservation to the commit that deletes it.

    Not thread-safe.
    """

    def __init__(self, totals: SpoolTotals, *, max_bytes: int, max_letter_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_letter_bytes = max_letter_bytes
        self.records = totals.records
        self.record_bytes = totals.record_bytes + totals.records * _ROW_BYTES
        self.letters = totals.letters
        self.letter_bytes = totals.letter_bytes + totals.letters * _ROW_BYTES
        self._next_id = totals.last_id + 1
        self._next_number = totals.last_number + 1
        # id: size in bytes.
        self._claimed: dict[int, int] = {}
        self._leaving: dict[int, int] = {}
        self._cursor = 0
        self._released: list[int] = []

    @property
    def claimed(self) -> int:
        """Records that somebody holds."""
        return len(self._claimed)

    @property
    def backlog(self) -> int:
        """Records that nobody holds; those not committed yet are among them."""
        return self.records - len(self._claimed) - len(self._leaving)

    def reserve(self, sizes: Sequence[int], *, claim: bool) -> range:
        """Make room for records whose envelopes have these sizes; return their ids.

        Raises:
            SpoolFull: there is no room for all of them; nothing was reserved.
        """
        needed = sum(sizes) + len(sizes) * _ROW_BYTES
        if self.record_bytes + needed > self._max_bytes:
            message = (
                f"the spool holds {self.record_bytes:,} bytes and {needed:,} more would pass its max_bytes of "
                f"{self._max_bytes:,}; wait until the backlog has been delivered, or raise max_bytes"
            )
            raise SpoolFull(message, stored_bytes=self.record_bytes, max_bytes=self._max_bytes)
        ids = range(self._next_id, self._next_id + len(sizes))
        self._next_id = ids.stop
        self.records += len(sizes)
        self.record_bytes += needed
        if claim:
            self._claimed.update(zip(ids, (size + _ROW_BYTES for size in sizes), strict=True))
        return ids

    def never_stored(self, ids: range, sizes: Sequence[int]) -> None:
        """Take back what was reserved: the commit failed."""
        self.records -= len(ids)
        self.record_bytes -= sum(sizes) + len(sizes) * _ROW_BYTES
        for record_id in ids:
            self._claimed.pop(record_id, None)

    def confirm(self, ids: Iterable[int]) -> list[int]:
        """Note that claimed records were delivered; return those that were claimed, to be deleted."""
        leaving = []
        for record_id in ids:
            size = self._claimed.pop(record_id, None)
            if size is not None:
                self._leaving[record_id] = size
                leaving.append(record_id)
        return leaving

    def deleted(self, ids: Iterable[int]) -> None:
        """Note that the rows of confirmed records are gone."""
        for record_id in ids:
            self.record_bytes -= self._leaving.pop(record_id)
            self.records -= 1

    def stayed(self, ids: Iterable[int]) -> None:
        """Note that the rows of confirmed records could not be deleted: their holder holds them again."""
        for record_id in ids:
            self._claimed[record_id] = self._leaving.pop(record_id)

    def release(self, ids: Iterable[int]) -> int:
        """Return claimed records to the backlog; return how many were claimed."""
        released = 0
        for record_id in ids:
            if self._claimed.pop(record_id, None) is not None:
                released += 1
                # Beyond the cursor they are found without being remembered.
                if record_id <= self._cursor:
                    heappush(self._released, record_id)
        return released

    def backlog_query(self, limit: int) -> BacklogQuery:
        """Say what to read so as to claim up to `limit` records of the backlog."""
        released = [heappop(self._released) for _ in range(min(limit, len(self._released)))]
        return BacklogQuery(released, self._cursor)

    def unread(self, released_ids: Iterable[int]) -> None:
        """Take back what a query would have read and did not."""
        for record_id in released_ids:
            heappush(self._released, record_id)

    def claim(self, record_id: int, size: int) -> bool:
        """Claim a row that was read; False if somebody holds it or it is leaving."""
        if record_id in self._claimed or record_id in self._leaving:
            return False
        self._claimed[record_id] = size + _ROW_BYTES
        return True

    def move_cursor(self, last_id: int) -> None:
        """Note that everything up to `last_id` was read."""
        self._cursor = max(self._cursor, last_id)

    def reserve_letters(self, sizes: Sequence[int]) -> range:
        """Make room for dead letters whose envelopes have these sizes; return their numbers.

        Raises:
            SpoolFull: there is no room for all of them; nothing was reserved.
        """
        needed = sum(sizes) + len(sizes) * _ROW_BYTES
        if self.letter_bytes + needed > self._max_letter_bytes:
            message = (
                f"the dead-letter queue holds {self.letter_bytes:,} bytes and {needed:,} more would pass its "
                f"max_dead_letter_bytes of {self._max_letter_bytes:,}; redrive, export or purge letters, or raise it"
            )
            raise SpoolFull(message, stored_bytes=self.letter_bytes, max_bytes=self._max_letter_bytes)
        numbers = range(self._next_number, self._next_number + len(sizes))
        self._next_number = numbers.stop
        self.letters += len(sizes)
        self.letter_bytes += needed
        return numbers

    def letters_left(self, letter_count: int, envelope_bytes: int) -> None:
        """Note that dead letters were removed, or were never stored."""
        self.letters -= letter_count
        self.letter_bytes -= envelope_bytes + letter_count * _ROW_BYTES
