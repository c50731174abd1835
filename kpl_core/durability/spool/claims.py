"""Which stored records are claimed: the ids, bytes and claims of a spool, in memory; pure.

A stored record is in exactly one of three states: *claimed* (a caller has it and will confirm or release it),
*confirmed* (delivered, its row not yet deleted) or *backlog*. The backlog is every unclaimed row after the read cursor,
plus the rows that were released since.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from kpl_core.durability.spool.envelope import SpooledRecord
from kpl_core.durability.spool.spool_error import SpoolFull
from kpl_core.durability.spool.store import SpoolTotals

# The size of a row without its envelope: key, checksum, headers.
_ROW_BYTES: Final = 32
# A spool that was full has room again below this share of `max_bytes`.
_FULL_SHARE: Final = 0.95


class Claimed(NamedTuple):
    """A record of the backlog that a caller has claimed."""

    id: int
    record: SpooledRecord


class BacklogQuery(NamedTuple):
    """Which rows to read next: the released ones, oldest first, and those after the cursor."""

    released_ids: list[int]
    after_id: int


class ClaimTable:
    """Counts each stored byte once, from its reservation to the commit that deletes it. Not thread-safe."""

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
        self._confirmed: dict[int, int] = {}
        self._cursor = 0
        self._released: list[int] = []

    @property
    def claimed(self) -> int:
        """Records that a caller has claimed."""
        return len(self._claimed)

    @property
    def backlog(self) -> int:
        """Records without a claim, including those not committed yet."""
        return self.records - len(self._claimed) - len(self._confirmed)

    def reserve(self, sizes: Sequence[int], *, claim: bool) -> range:
        """Reserve room for records whose envelopes have these sizes; return their ids.

        Raises:
            SpoolFull: there is no room for all of them; nothing was reserved.
        """
        needed = sum(sizes) + len(sizes) * _ROW_BYTES
        if self.record_bytes + needed > self._max_bytes:
            message = (
                f"the spool holds {self.record_bytes:,} bytes and {needed:,} more would exceed its max_bytes of "
                f"{self._max_bytes:,}; wait until the backlog has been delivered, or raise max_bytes"
            )
            raise SpoolFull(message)
        ids = range(self._next_id, self._next_id + len(sizes))
        self._next_id = ids.stop
        self.records += len(sizes)
        self.record_bytes += needed
        if claim:
            self._claimed.update(zip(ids, (size + _ROW_BYTES for size in sizes), strict=True))
        return ids

    def require_room(self) -> None:
        """Check that a few more records would fit.

        Raises:
            SpoolFull: more than `_FULL_SHARE` of the room is used.
        """
        if self.record_bytes > _FULL_SHARE * self._max_bytes:
            message = (
                f"the spool holds {self.record_bytes:,} bytes of its max_bytes of {self._max_bytes:,}; wait until the "
                f"backlog has been delivered, or raise max_bytes"
            )
            raise SpoolFull(message)

    def is_delivered(self, record_id: int) -> bool:
        """Return True if this record is in the file only because its row is not deleted yet."""
        return record_id in self._confirmed

    def cancel_reservation(self, ids: range, sizes: Sequence[int]) -> None:
        """Cancel a reservation whose commit failed."""
        self.records -= len(ids)
        self.record_bytes -= sum(sizes) + len(sizes) * _ROW_BYTES
        for record_id in ids:
            self._claimed.pop(record_id, None)

    def confirm(self, ids: Iterable[int]) -> list[int]:
        """Mark claimed records as delivered; return the ids that were claimed, whose rows can be deleted."""
        confirmed = []
        for record_id in ids:
            size = self._claimed.pop(record_id, None)
            if size is not None:
                self._confirmed[record_id] = size
                confirmed.append(record_id)
        return confirmed

    def deleted(self, ids: Iterable[int]) -> None:
        """Remove confirmed records whose rows were deleted."""
        for record_id in ids:
            self.record_bytes -= self._confirmed.pop(record_id)
            self.records -= 1

    def restore_claims(self, ids: Iterable[int]) -> None:
        """Restore the claims of confirmed records whose rows could not be deleted."""
        for record_id in ids:
            self._claimed[record_id] = self._confirmed.pop(record_id)

    def release(self, ids: Iterable[int]) -> int:
        """Return claimed records to the backlog; return how many were claimed."""
        released = 0
        for record_id in ids:
            if self._claimed.pop(record_id, None) is not None:
                released += 1
                # Records after the cursor are found without this list.
                if record_id <= self._cursor:
                    heappush(self._released, record_id)
        return released

    def backlog_query(self, limit: int) -> BacklogQuery:
        """Return the query that reads up to `limit` records of the backlog, to be claimed."""
        released = [heappop(self._released) for _ in range(min(limit, len(self._released)))]
        return BacklogQuery(released, self._cursor)

    def unread(self, released_ids: Iterable[int]) -> None:
        """Put released ids back that a query took but did not read."""
        for record_id in released_ids:
            heappush(self._released, record_id)

    def claim(self, record_id: int, size: int) -> bool:
        """Claim a row that was read; return False if it is claimed or confirmed already."""
        if record_id in self._claimed or record_id in self._confirmed:
            return False
        self._claimed[record_id] = size + _ROW_BYTES
        return True

    def move_cursor(self, last_id: int) -> None:
        """Note that every row up to `last_id` was read."""
        self._cursor = max(self._cursor, last_id)

    def reserve_letters(self, sizes: Sequence[int]) -> range:
        """Reserve room for dead letters whose envelopes have these sizes; return their numbers.

        Raises:
            SpoolFull: there is no room for all of them; nothing was reserved.
        """
        needed = sum(sizes) + len(sizes) * _ROW_BYTES
        if self.letter_bytes + needed > self._max_letter_bytes:
            message = (
                f"the dead-letter queue holds {self.letter_bytes:,} bytes and {needed:,} more would exceed its "
                f"max_dead_letter_bytes of {self._max_letter_bytes:,}; redrive, export or purge letters, or raise it"
            )
            raise SpoolFull(message)
        numbers = range(self._next_number, self._next_number + len(sizes))
        self._next_number = numbers.stop
        self.letters += len(sizes)
        self.letter_bytes += needed
        return numbers

    def letters_removed(self, letter_count: int, envelope_bytes: int) -> None:
        """Subtract dead letters that were removed, or whose commit failed."""
        self.letters -= letter_count
        self.letter_bytes -= envelope_bytes + letter_count * _ROW_BYTES
