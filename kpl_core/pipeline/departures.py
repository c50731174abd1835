"""What may leave as a request, and when: the collector's requests, the pieces of a bisection, and a pause for both."""

import math
from collections import deque
from typing import Final

from kpl_core.pipeline.bisection import Bisection
from kpl_core.pipeline.collector import Collector
from kpl_core.pipeline.sending_pause import SendingPause
from kpl_core.records.kinesis_record import KinesisRecord

__all__ = ["Departures"]

# User records: who expires at one instant may be all there is, and a loop that serves others must not stop for it.
EXPIRED_AT_ONCE: Final = 500


class Departures:
    """The last stage before the driver. Pieces go first: their records have waited longest."""

    __slots__ = ("_bisection", "_collector", "_expired", "_pause")

    def __init__(self, collector: Collector, bisection: Bisection, pause: SendingPause) -> None:
        self._collector = collector
        self._bisection = bisection
        self._pause = pause
        # Out of its request already, and not handed out yet.
        self._expired: deque[KinesisRecord] = deque()

    def next_records(self, now: float) -> list[KinesisRecord] | None:
        """Remove and return the records of the next request, None if none may leave now."""
        if self._pause.ready_at > now:
            return None
        records = self._bisection.take() or self._collector.next_records(now)
        if records is not None:
            self._pause.sent(now)
        return records

    def is_due(self, now: float) -> bool:
        """Say whether `next_records` would return a request."""
        return self._pause.ready_at <= now and (self._bisection.is_due or self._collector.is_due(now))

    def room_beside(self, now: float) -> int:
        """Return how many more records a request would take along that leaves now although it is not full."""
        if self._pause.is_failing or self._pause.ready_at > now or self._bisection.is_due:
            return 0
        return self._collector.room_beside(now)

    def stopped_until(self, now: float, *, may_send: bool) -> float:
        """Return until when nothing should be admitted (`math.inf`: until there is news; in the past: it should).

        What has its tokens and cannot leave would reach the shards in one go in the end, beside all
        that their tokens admit then. While there is only no place for it a request may fill up; while
        requests fail, nothing is admitted but for a probe.
        """
        if self._pause.ready_at > now:
            return self._pause.ready_at
        if self._pause.is_failing:
            return math.inf if self._collector.is_due(now) else -math.inf
        return math.inf if not may_send and self._collector.has_full else -math.inf

    def next_wakeup(self, *, may_send: bool) -> float:
        """Return when a request may leave (`-math.inf`: at once), or a record that waits for that expires."""
        if self._expired:
            return -math.inf
        at = self._collector.next_wakeup(may_send=may_send)
        if self._bisection:
            at = min(at, self._bisection.next_wakeup(may_send=may_send))
        if may_send and at < self._pause.ready_at:
            return min(self._pause.ready_at, self.next_wakeup(may_send=False))
        return at

    def take_expired(self, now: float) -> list[KinesisRecord]:
        """Remove and return records that expired while no request could leave; if more, `next_wakeup` says at once."""
        self._expired += self._collector.take_expired(now)
        if self._bisection:
            self._expired += self._bisection.take_expired(now)
        expired: list[KinesisRecord] = []
        count = 0
        while self._expired and count < EXPIRED_AT_ONCE:
            record = self._expired.popleft()
            expired.append(record)
            count += len(record.arrivals)
        return expired

    def take_all(self) -> list[KinesisRecord]:
        """Remove and return everything."""
        expired = list(self._expired)
        self._expired.clear()
        return expired + self._collector.take_all() + self._bisection.take_all()

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait to leave."""
        return self._collector.user_record_count + sum(
            len(record.arrivals) for record in (*self._bisection, *self._expired)
        )
