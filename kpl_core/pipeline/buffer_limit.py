"""Backpressure: how many user records, and how many of their bytes, may be outstanding.

The promise: a user record counts from the moment it is accepted until its
result is final, wherever it waits in between, and is released exactly once.

What is kept is the room that is free for a normal user record, so a reservation
is two subtractions and two comparisons with zero. With tiers, critical user
records may take it below zero, down to their reserve, and bulk must leave some.
"""

from typing import Final

from kpl_core.errors import BufferFull
from kpl_core.options.reliability import TierPolicy
from kpl_core.pipeline.open_record import Room
from kpl_core.records.user_record import Tier

# More than any memory holds. A C integer has room for it and for what is added to it.
UNBOUNDED: Final = 2**60


class BufferLimit(Room):
    """Room for `max_records` user records of `max_bytes` (partition key + data) together."""

    def __init__(self, *, max_records: int, max_bytes: int, tiers: TierPolicy | None = None) -> None:
        self.max_records = max_records = min(max_records, UNBOUNDED)
        self.max_bytes = max_bytes = min(max_bytes, UNBOUNDED)
        reserve, bulk_share = (0.0, 1.0) if tiers is None else (tiers.critical_reserve, tiers.bulk_share)
        self._normal_records = max_records - int(max_records * reserve)
        self._normal_bytes = max_bytes - int(max_bytes * reserve)
        # What must be left free: records and bytes.
        self._floors: dict[Tier, tuple[int, int]] = {
            "critical": (self._normal_records - max_records, self._normal_bytes - max_bytes),
            "normal": (0, 0),
            "bulk": (int(self._normal_records * (1 - bulk_share)), int(self._normal_bytes * (1 - bulk_share))),
        }
        self.free_records = self._normal_records
        # Below zero while critical user records use their reserve, or one larger than the whole bound is outstanding.
        self.free_bytes = self._normal_bytes

    @property
    def outstanding_records(self) -> int:
        """Return how many user records are accepted and not final."""
        return self._normal_records - self.free_records

    @property
    def outstanding_bytes(self) -> int:
        """Return the bytes of key and data of the outstanding user records."""
        return self._normal_bytes - self.free_bytes

    def has_room(self, *, size_bytes: int, records: int = 1, tier: Tier = "normal") -> bool:
        """Return True if `reserve` would succeed.

        A record larger than the whole bound fits when nothing else is outstanding: refusing
        it always would be a deadlock for a caller that waits for room.
        """
        if records == 1 and self.free_records == self._normal_records:
            return True
        least_records, least_bytes = self._floors[tier]
        return self.free_records - records >= least_records and self.free_bytes - size_bytes >= least_bytes

    def could_hold(self, *, size_bytes: int, records: int, tier: Tier) -> bool:
        """Return True if there would be room for so many user records together if nothing were outstanding."""
        least_records, least_bytes = self._floors[tier]
        return records == 1 or (
            self._normal_records - records >= least_records and self._normal_bytes - size_bytes >= least_bytes
        )

    def free_for(self, tier: Tier) -> tuple[int, int]:
        """Return how many records and bytes of this tier would still fit: below zero for a tier that must wait."""
        least_records, least_bytes = self._floors[tier]
        return self.free_records - least_records, self.free_bytes - least_bytes

    def overdraw(self, *, size_bytes: int) -> None:
        """Take room without a check for a spilled user record, which gives it back at once."""
        self.free_records -= 1
        self.free_bytes -= size_bytes

    def reserve(self, *, size_bytes: int, records: int = 1, tier: Tier = "normal") -> None:
        """Take room for one user record, or for `records` of `size_bytes` together.

        Raises:
            BufferFull: there is none; nothing was taken.
        """
        free_records, free_bytes = self.free_records - records, self.free_bytes - size_bytes
        # Only bulk records must leave some room free.
        has_room = free_records >= 0 and free_bytes >= 0 and tier != "bulk"
        if not (has_room or self.has_room(size_bytes=size_bytes, records=records, tier=tier)):
            raise self.full()
        self.free_records, self.free_bytes = free_records, free_bytes

    def release(self, *, records: int, size_bytes: int) -> None:
        """Give back the room of `records` user records whose results are final."""
        self.free_records += records
        self.free_bytes += size_bytes

    def full(self, *, more_records: int = 0, more_bytes: int = 0) -> BufferFull:
        """Return the error with the counts; `more_*` are reserved elsewhere and count too."""
        records, size_bytes = self.outstanding_records + more_records, self.outstanding_bytes + more_bytes
        message = (
            f"{records:,} of {self.max_records:,} records and {size_bytes:,} of {self.max_bytes:,} bytes are "
            f"outstanding; await put() to wait for room, or raise max_outstanding_records / max_outstanding_bytes"
        )
        return BufferFull(message, outstanding_records=records, outstanding_bytes=size_bytes)

    def __repr__(self) -> str:
        return (
            f"<BufferLimit {self.outstanding_records}/{self.max_records} records, "
            f"{self.outstanding_bytes}/{self.max_bytes} bytes>"
        )
