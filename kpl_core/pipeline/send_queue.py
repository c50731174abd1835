"""What may leave as a request, and when: packed requests, the pieces of a bisection, and a pause during an outage.

**The pause.** A connection that fails, a status 500 and a timeout are not about single records. While they last, every
request is wasted work. So after two such failures in a row one request at a time is sent as a probe, each after a
longer pause (the retrier's backoff: exponential, with full jitter). The first answer of any kind ends the pause.
(Nygard, "Release It!", 2007, calls it the half-open state of a circuit breaker. Unlike
`durability/circuit_breaker.py` this machine fails no record: they wait where they are, and expire there.)

The next probe does not wait for the answer to the last one: a request that hangs until its timeout must not delay the
discovery that the stream is healthy again.

**The bisection** finds the invalid record of a request that was refused as a whole. The request travels again in two
halves, one piece at a time, until every invalid record has been refused alone: about 2 log2(n) requests for each. A
request that is invalid as a whole would be refused down to the last record, in about 2 n requests. So the pieces are
sent in an order that shows this soon: down to a single record, then its neighbour, then the largest piece that is
left. When `WITNESSES` single records in a row were refused and no record of the stream was stored in between, the rest
fails without being sent: 20 requests for 500 records. A single invalid record never looks like that, because its
neighbour is stored. Pieces pay no tokens again: a record refused as invalid has cost the shards nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kpl_core.pipeline.collector import Collector
from kpl_core.pipeline.open_record import python_sealed, sealed
from kpl_core.records.expiry import EXPIRED_AT_ONCE, split_expired
from kpl_core.records.kinesis_record import KinesisRecord

# One failure says little: a connection that the server closed while it was idle fails its next request.
FAILURES_IN_A_ROW: Final = 2
# So many single records refused in a row decide about all that are left.
WITNESSES: Final = 4
# A record in a bisection has its tokens and may expire so much later: another record caused the refusal.
PATIENCE_SECONDS: Final = 2.0
_FEW_RECORDS: Final = 2

Piece = list[KinesisRecord]


class SendingPause:
    """Decides when the next request may leave. `backoff` draws the seconds before the n-th probe, from 1 on."""

    __slots__ = ("_backoff", "_failures", "_is_lifted", "_probes", "is_failing", "ready_at")

    def __init__(self, backoff: Callable[[int], float]) -> None:
        self._backoff = backoff
        self._failures = 0
        self._probes = 0
        self._is_lifted = False
        # True while only probes may leave.
        self.is_failing = False
        # The time from which a request may leave; in the past unless requests fail.
        self.ready_at = -math.inf

    def sent(self, now: float) -> None:
        """Note that a request left. While requests fail it is a probe, and the next pause begins."""
        if self.is_failing:
            self._probes += 1
            self.ready_at = now + self._backoff(self._probes + 1)

    def ended(self, now: float, *, failed: bool) -> None:
        """Note how a request ended: `failed` as a whole in a way that a retry may fix, or answered."""
        if not failed:
            # The service answered, even if it refused single records.
            self._failures = self._probes = 0
            self.is_failing = False
            self.ready_at = -math.inf
            return
        self._failures += 1
        self.is_failing = self._failures >= FAILURES_IN_A_ROW and not self._is_lifted
        if self._failures == FAILURES_IN_A_ROW and self.is_failing:
            self.ready_at = now + self._backoff(1)

    def probe_from(self, now: float) -> None:
        """Allow the next probe from `now` on: a circuit breaker decided that it is time for one."""
        self.ready_at = min(self.ready_at, now)

    def lift(self) -> None:
        """End the pause permanently, because the producer is closing."""
        self._is_lifted = True
        self.is_failing = False
        self.ready_at = -math.inf


class Bisection:
    """The pieces of a stream's invalid requests. At most one piece is in flight at a time."""

    __slots__ = ("_earliest_expiration", "_next", "_out", "_sibling", "_witnesses", "pieces")

    def __init__(self) -> None:
        # Read by the send queue; empty unless a request was refused as invalid.
        self.pieces: list[Piece] = []
        # The piece to send next; None: the largest.
        self._next: Piece | None = None
        self._out: Piece | None = None
        # The other half of what was split last.
        self._sibling: Piece | None = None
        self._witnesses = 0
        # Never later than the first instant at which a record here is too old.
        self._earliest_expiration = math.inf

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def __iter__(self) -> Iterator[KinesisRecord]:
        return (record for piece in self.pieces for record in piece)

    def split(self, records: Piece) -> None:
        """Take in a request of more than one record that was refused as invalid."""
        middle = len(records) // 2
        first, second = records[:middle], records[middle:]
        self.pieces += (first, second)
        if records is self._out or self._next is None:
            self._next, self._sibling = first, second
        earliest = min(record.expires_at for record in records) + PATIENCE_SECONDS
        self._earliest_expiration = min(self._earliest_expiration, earliest)

    def refused_alone(self, records: Piece) -> bool:
        """Note that a record was refused alone. Return True if all that is left is to fail without being sent."""
        if records is not self._out:
            # It was not part of a refused request, so it is no evidence about the others.
            return False
        self._witnesses += 1
        self._next, self._sibling = self._sibling, None
        return self._witnesses >= WITNESSES

    def stored(self) -> None:
        """Note that a request of the stream was not refused: requests are not invalid as such."""
        self._witnesses = 0

    def returned(self, records: Piece) -> None:
        """Note that a request came back; if it was the piece in flight, the next may be sent."""
        if records is self._out:
            self._out = None
            if not self.pieces:
                self._witnesses = 0

    def take(self) -> Piece | None:
        """Remove and return the piece to send now, None if there is none or one is in flight."""
        if not self.is_due:
            return None
        piece = max(self.pieces, key=len) if self._next is None else self._next
        self.pieces = [other for other in self.pieces if other is not piece]
        self._next = None
        if piece is self._sibling:
            self._sibling = None
        self._out = piece
        if not self.pieces:
            self._earliest_expiration = math.inf
        return piece

    def take_expired(self, now: float) -> Piece:
        """Remove and return the records that waited for too long."""
        if self._earliest_expiration > now:
            return []
        expired: Piece = []
        for piece in self.pieces:
            too_old, left = split_expired(piece, now, extension_seconds=PATIENCE_SECONDS)
            expired += too_old
            # In place: `_next`, `_sibling` and `_out` are compared by identity.
            piece[:] = left
        self.pieces = [piece for piece in self.pieces if piece]
        self._next = self._next or None
        self._sibling = self._sibling or None
        self._earliest_expiration = min((record.expires_at for record in self), default=math.inf) + PATIENCE_SECONDS
        return expired

    def take_all(self) -> Piece:
        """Remove and return all records that wait."""
        records = list(self)
        self.pieces = []
        self._next = self._sibling = None
        self._earliest_expiration = math.inf
        return records

    @property
    def is_due(self) -> bool:
        """Say whether `take` would return a piece."""
        return bool(self.pieces) and self._out is None

    def next_wakeup(self, *, may_send: bool = True) -> float:
        """Return when a piece may leave (`-math.inf`: at once) or a record expires."""
        return -math.inf if may_send and self.is_due else self._earliest_expiration


class SendQueue:
    """The last stage before the driver. Pieces of a bisection go first: their records have waited longest."""

    __slots__ = ("_bisection", "_collector", "_expired", "pause")

    def __init__(self, collector: Collector, bisection: Bisection, pause: SendingPause) -> None:
        self._collector = collector
        self._bisection = bisection
        self.pause = pause
        # Already removed from its request, and not yet returned by `take_expired`.
        self._expired: deque[KinesisRecord] = deque()

    def next_records(self, now: float) -> list[KinesisRecord] | None:
        """Remove and return the records of the next request, None if none may leave now."""
        if self.pause.ready_at > now:
            return None
        records = (self._bisection.take() if self._bisection.pieces else None) or self._collector.next_records(now)
        if records is not None:
            _seal(records)
            if self.pause.is_failing:
                self.pause.sent(now)
        return records

    def is_due(self, now: float) -> bool:
        """Return True if `next_records` would return a request."""
        collector = self._collector
        return self.pause.ready_at <= now and (
            bool(collector.full)
            or collector.deadline <= now
            or (bool(self._bisection.pieces) and self._bisection.is_due)
        )

    def free_places(self, now: float) -> int:
        """Return how many records still fit into a request that leaves now although it is not full."""
        if self.pause.is_failing or self.pause.ready_at > now or (self._bisection.pieces and self._bisection.is_due):
            return 0
        return self._collector.free_places(now)

    def paused_until(self, now: float, *, may_send: bool) -> float:
        """Return until when the limiter must admit nothing: `math.inf` until news, a time in the past for no pause.

        A record that has its tokens and cannot leave would reach its shard together with all that the tokens admit
        later. While there is only no place for a request, the one being packed may fill up. While requests fail, the
        limiter admits records for one probe only.
        """
        if self.pause.ready_at > now:
            return self.pause.ready_at
        if self.pause.is_failing:
            return math.inf if self._collector.is_due(now) else -math.inf
        return math.inf if not may_send and self._collector.full else -math.inf

    def next_wakeup(self, *, may_send: bool) -> float:
        """Return when a request may leave (`-math.inf`: at once), or a record in the queue expires."""
        if self._expired:
            return -math.inf
        collector = self._collector
        at = collector.earliest_expiration
        if may_send:
            if collector.full:
                at = -math.inf
            elif collector.deadline < at:
                at = collector.deadline
        if self._bisection.pieces:
            at = min(at, self._bisection.next_wakeup(may_send=may_send))
        if may_send and at < self.pause.ready_at:
            return min(self.pause.ready_at, self.next_wakeup(may_send=False))
        return at

    def take_expired(self, now: float) -> list[KinesisRecord]:
        """Remove and return records that expired because no request could leave: about 500 user records a call.

        If more have expired, `next_wakeup` returns `-math.inf`.
        """
        expired: list[KinesisRecord] = []
        if self._collector.earliest_expiration <= now:
            self._expired += self._collector.take_expired(now)
        if self._bisection.pieces:
            self._expired += self._bisection.take_expired(now)
        count = 0
        while self._expired and count < EXPIRED_AT_ONCE:
            record = self._expired.popleft()
            expired.append(record)
            count += len(record.arrivals)
        return expired

    def take_all(self) -> list[KinesisRecord]:
        """Remove and return every record."""
        expired = list(self._expired)
        self._expired.clear()
        return expired + self._collector.take_all() + self._bisection.take_all()

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait to leave."""
        return self._collector.user_record_count + sum(
            len(record.arrivals) for record in (*self._bisection, *self._expired)
        )


def _seal(records: list[KinesisRecord]) -> None:
    """Compute the digests of aggregated records that have none. Those of a whole request cost less together."""
    unsealed = [record for record in records if not record.is_sealed]
    # For one or two the MD5 of OpenSSL is faster, and other threads run meanwhile.
    seal = sealed if len(unsealed) > _FEW_RECORDS else python_sealed
    for record, data in zip(unsealed, seal([record.data for record in unsealed]), strict=True):
        record.data = data
        record.is_sealed = True
