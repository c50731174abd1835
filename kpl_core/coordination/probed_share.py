"""The share of a worker that no store has answered since its start: the shard decides; pure.

The worker doubles its share about every second while it uses it and nothing is throttled. At the first throttle it
halves its share, and from then on raises it by 1 % a second: a shard takes a burst of one second before it throttles,
so a faster rise would be far above the limit when that is seen (Chiu and Jain, 1989).
"""

from typing import Final

from kpl_core.coordination.lease_table import NEARLY_USED, TOLERATED_SHARE
from kpl_core.coordination.store_objects import Pair

# The measurements are a second apart at most intervals; a step must not miss one by a millisecond.
STEP_SECONDS: Final = 0.8
LEAST_SENT: Final = 2.0
RAISE: Final = 2.0
LOWER: Final = 0.5
RAISE_AFTER_THROTTLE: Final = 1.01


class ProbedShare:
    """One resource's share, which begins at `share`, is never less, and ends at the limit, units a second."""

    def __init__(self, share: Pair, now: float) -> None:
        # Throttling by foreign writers must not starve this worker. All floors together are a sixth of the limit.
        self._least = self.share = share
        self._raise = RAISE
        self._changed_at = now

    def probe(self, demand: Pair, limit: Pair, now: float, *, sent: float, throttled: float) -> bool:
        """Change the share by the counts since the last True; return True if they have been used."""
        seconds = now - self._changed_at
        # Without an answer nothing is known, unless the share is too small for a record in that time.
        if seconds < STEP_SECONDS or (sent <= 0.0 and self.share[0] * seconds >= LEAST_SENT):
            return False
        factor = 1.0
        if throttled > TOLERATED_SHARE * sent:
            factor, self._raise = LOWER, RAISE_AFTER_THROTTLE
        elif any(wanted > NEARLY_USED * most for wanted, most in zip(demand, self.share, strict=True)):
            factor = self._raise
        first, second = (
            min(most, max(least, now_used * factor))
            for most, least, now_used in zip(limit, self._least, self.share, strict=True)
        )
        self.share = first, second
        self._changed_at = now
        return True
