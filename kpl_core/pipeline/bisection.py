"""Which record of a request is invalid: the service says that one is, and refuses them all.

A refused request travels again in two halves, one piece at a time, until every record that is invalid has
been refused alone: about 2 log2(n) requests for each. A request that is invalid as a whole would be refused
down to the last record, about 2 n requests for nothing. So the pieces are asked in an order that finds out
soon: down to a single record, then its neighbour, then on with the largest piece that is left. When `WITNESSES`
single records in a row were refused and nothing of the stream was stored in between, what is left fails
without being asked: 20 requests for 500 records. A single guilty record never looks like that: its neighbour
is stored.

Pieces pay no tokens again: what was refused as invalid has cost the shards nothing.
"""

import math
from collections.abc import Iterator
from typing import Final

from kpl_core.records.kinesis_record import KinesisRecord

__all__ = ["PATIENCE_SECONDS", "WITNESSES", "Bisection"]

# Single records refused in a row that speak for all that are left.
WITNESSES: Final = 4
# What is being bisected has its tokens and may expire so much later: it is not its fault that it was refused.
PATIENCE_SECONDS: Final = 2.0

Piece = list[KinesisRecord]


class Bisection:
    """The pieces of a stream's invalid requests. At most one of them is on its way at a time."""

    __slots__ = ("_earliest_expiration", "_next", "_out", "_pieces", "_sibling", "_witnesses")

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        # The one to ask next; None: the largest.
        self._next: Piece | None = None
        self._out: Piece | None = None
        # The other half of what was split last.
        self._sibling: Piece | None = None
        self._witnesses = 0
        # Never later than the first instant at which a record here is too old.
        self._earliest_expiration = math.inf

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __iter__(self) -> Iterator[KinesisRecord]:
        return (record for piece in self._pieces for record in piece)

    def split(self, records: Piece) -> None:
        """Take in a request of more than one record that was refused as invalid."""
        middle = len(records) // 2
        first, second = records[:middle], records[middle:]
        self._pieces += (first, second)
        if records is self._out or self._next is None:
            self._next, self._sibling = first, second
        earliest = min(record.expires_at for record in records) + PATIENCE_SECONDS
        self._earliest_expiration = min(self._earliest_expiration, earliest)

    def refused_alone(self, records: Piece) -> bool:
        """Note that a record was refused alone; say whether what is left is hopeless."""
        if records is not self._out:
            # It was in nobody's company, and speaks for nobody.
            return False
        self._witnesses += 1
        self._next, self._sibling = self._sibling, None
        return self._witnesses >= WITNESSES

    def stored(self) -> None:
        """Note that a request of the stream was not refused: requests are not invalid as such."""
        self._witnesses = 0

    def returned(self, records: Piece) -> None:
        """Note that a request came back; if it was the piece on its way, the next may go."""
        if records is self._out:
            self._out = None
            if not self._pieces:
                self._witnesses = 0

    def take(self) -> Piece | None:
        """Remove and return the piece to send now, None if there is none or one is on its way."""
        if not self.is_due:
            return None
        piece = max(self._pieces, key=len) if self._next is None else self._next
        self._pieces = [other for other in self._pieces if other is not piece]
        self._next = None
        if piece is self._sibling:
            self._sibling = None
        self._out = piece
        if not self._pieces:
            self._earliest_expiration = math.inf
        return piece

    def take_expired(self, now: float) -> Piece:
        """Remove and return the records that waited for too long."""
        if self._earliest_expiration > now:
            return []
        expired = [record for record in self if record.expires_at + PATIENCE_SECONDS <= now]
        for piece in self._pieces:
            # In place, so that the next one is still the next one.
            piece[:] = [record for record in piece if record.expires_at + PATIENCE_SECONDS > now]
        self._pieces = [piece for piece in self._pieces if piece]
        self._next = self._next or None
        self._sibling = self._sibling or None
        self._earliest_expiration = min((record.expires_at for record in self), default=math.inf) + PATIENCE_SECONDS
        return expired

    def take_all(self) -> Piece:
        """Remove and return all records that wait."""
        records = list(self)
        self._pieces = []
        self._next = self._sibling = None
        self._earliest_expiration = math.inf
        return records

    @property
    def is_due(self) -> bool:
        """Say whether `take` would return a piece."""
        return bool(self._pieces) and self._out is None

    def next_wakeup(self, *, may_send: bool = True) -> float:
        """Return when a piece may leave (`-math.inf`: at once) or a record expires."""
        return -math.inf if may_send and self.is_due else self._earliest_expiration
