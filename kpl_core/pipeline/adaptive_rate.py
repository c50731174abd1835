"""How much of a shard's limit to use while somebody else writes to it too.

Throttled Kinesis records come back inside an answer with HTTP 200, so no SDK's
adaptive mode can see them; the KPL leaves the reaction as a TODO. Here each
shard looks at its last second:

    throttled share above 1 %:   fraction x 0.85, at most once a second, never below 5 %
    otherwise, on success:       fraction + 0.2 a second, up to 1

Multiplicative decrease and additive increase let producers that know nothing
of each other converge to equal shares (Chiu and Jain, 1989).
"""

from collections import deque
from typing import Final

__all__ = ["AdaptiveRate"]

WINDOW_SECONDS: Final = 1.0
TOLERATED_SHARE: Final = 0.01
DECREASE: Final = 0.85
INCREASE_PER_SECOND: Final = 0.2
FLOOR: Final = 0.05


class AdaptiveRate:
    """The fraction, 0.05 .. 1, of the configured limit that a shard may use now."""

    __slots__ = ("_answers", "_changed_at", "_lowered_at", "_sent", "_throttled", "fraction")

    def __init__(self, now: float) -> None:
        self.fraction = 1.0
        self._answers: deque[tuple[float, int, int]] = deque()
        self._sent = 0
        self._throttled = 0
        self._lowered_at = -WINDOW_SECONDS + now
        self._changed_at = now

    def answered(self, *, sent: int, throttled: int, now: float) -> bool:
        """Take note of `sent` Kinesis records, `throttled` of them refused; say whether the fraction changed."""
        self._answers.append((now, sent, throttled))
        self._sent += sent
        self._throttled += throttled
        while self._answers[0][0] <= now - WINDOW_SECONDS:
            _, old_sent, old_throttled = self._answers.popleft()
            self._sent -= old_sent
            self._throttled -= old_throttled
        before = self.fraction
        if self._throttled > TOLERATED_SHARE * self._sent:
            if now - self._lowered_at >= WINDOW_SECONDS:
                self.fraction = max(FLOOR, before * DECREASE)
                self._lowered_at = now
            self._changed_at = now
        elif sent > throttled:
            self.fraction = min(1.0, before + INCREASE_PER_SECOND * (now - self._changed_at))
            self._changed_at = now
        return self.fraction != before
