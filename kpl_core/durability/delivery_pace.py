"""How fast stored records go back to the producer, so that new records are not starved; pure.

Three bounds apply together: a rate (records and bytes a second), the records and bytes in
flight (without a result: a new record may have to wait behind them), and after failures a
pause that doubles up to a cap, with full jitter.
"""

import math
from collections.abc import Callable
from typing import Final

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.pipeline.token_bucket import TokenBucket

_BURST_SECONDS: Final = 0.1
# The breaker's longest break is 5 s too, so a backlog moves again within 10 s after an outage.
_PAUSE: Final = ExponentialBackoff(base_seconds=0.5, cap_seconds=5.0)


class DeliveryPace:
    """Decides when a stored record may be sent. `chance` returns 0 .. 1."""

    def __init__(
        self,
        *,
        records_per_second: float,
        bytes_per_second: float,
        in_flight_records: int,
        in_flight_bytes: int,
        chance: Callable[[], float],
    ) -> None:
        self._bucket = TokenBucket(
            [
                (records_per_second, max(1.0, records_per_second * _BURST_SECONDS)),
                (bytes_per_second, max(1.0, bytes_per_second * _BURST_SECONDS)),
            ],
            now=-math.inf,
        )
        self._max_records = in_flight_records
        self._max_bytes = in_flight_bytes
        self._chance = chance
        self._records = 0
        self._bytes = 0
        self._failures = 0
        self._paused_until = -math.inf

    def try_send(self, size_bytes: int, now: float) -> bool:
        """Pay for sending a record of `size_bytes`; return False if it must wait."""
        if now < self._paused_until or not self._fits(size_bytes) or not self._bucket.try_take((1, size_bytes), now):
            return False
        self._records += 1
        self._bytes += size_bytes
        return True

    def ready_at(self, size_bytes: int, now: float) -> float:
        """Return when `try_send` may succeed, `math.inf` if only a result of a record in flight helps."""
        if not self._fits(size_bytes):
            return math.inf
        return max(self._paused_until, self._bucket.ready_at((1, size_bytes), now))

    def succeeded(self, size_bytes: int) -> None:
        """Note a delivery; the next pause is short again."""
        self._landed(size_bytes)
        self._failures = 0

    def failed(self, size_bytes: int, now: float) -> None:
        """Note a failure, and pause. Failures during a pause count once."""
        self._landed(size_bytes)
        if now >= self._paused_until:
            self._failures += 1
            self._paused_until = now + _PAUSE.seconds(self._failures, self._chance)

    def _landed(self, size_bytes: int) -> None:
        self._records -= 1
        self._bytes -= size_bytes

    def _fits(self, size_bytes: int) -> bool:
        # One record always fits, however large.
        return not self._records or (self._records < self._max_records and self._bytes + size_bytes <= self._max_bytes)
