"""How much of a resource's limit is really there, learnt from what any worker was refused; pure.

All workers together keep the limit, so a refusal means that somebody writes who is not among
them. As in `kpl_core.pipeline.adaptive_rate`, but for all at once: decrease by 15 % an interval while
more than 1 % is refused, else increase by 10 points an interval (Chiu and Jain, 1989).
"""

import math
from typing import Final

__all__ = ["next_estimate"]

TOLERATED_SHARE: Final = 0.01
DECREASE: Final = 0.85
INCREASE: Final = 0.1
FLOOR: Final = 0.05


def next_estimate(estimate: float, *, sent: float, throttled: float, intervals: float) -> float:
    """Return the new share, 0.05 .. 1, of the limit that is there for us.

    Args:
        estimate: the share so far.
        sent: what all workers sent in their last interval; any unit.
        throttled: as much of it was refused.
        intervals: how many intervals have passed since `estimate` was made; at most one counts.
    """
    passed = min(1.0, max(0.0, intervals))
    if throttled > TOLERATED_SHARE * sent:
        return max(FLOOR, estimate * math.pow(DECREASE, passed))
    return min(1.0, estimate + INCREASE * passed)
