"""The policy "proportional": the arithmetic of AWS's example for DynamoDB, to the last operation; pure.

Source: Jason Hunter, "Rate-limiting calls to Amazon DynamoDB using Python Boto3, Part 2:
Distributed Coordination" (AWS Database Blog). Every worker scales its own limit by how
far the sum of all consumptions is from the maximum, and goes 40 % of the way:

    scale  = aggregate_max / aggregate_current      (1 while nothing is consumed)
    target = min(scale * own limit, own maximum)
    limit  = 0.6 * limit + 0.4 * target

It is here so that a fleet can be changed over worker by worker, and to compare with. Known
of it: at the start everybody has its initial limit, whoever idles is raised to its maximum
and bursts with it, and a summary that nobody renews is applied again and again.
"""

from typing import Final

from kpl_core.options.coordination_options import PROPORTIONAL_FIRST_SHARE

__all__ = ["SMOOTHING", "initial_limit", "scaled_limit"]

SMOOTHING: Final = 0.4


def initial_limit(*, aggregate_max: float, worker_max: float) -> float:
    """Return the limit of a worker that was told none: a tenth of the whole, at most its own maximum."""
    return min(worker_max, aggregate_max * PROPORTIONAL_FIRST_SHARE)


def scaled_limit(limit: float, *, aggregate_max: float, aggregate_current: float, worker_max: float) -> float:
    """Return a worker's next limit; all are units a second."""
    scale = aggregate_max / aggregate_current if aggregate_current > 0 else 1.0
    target = min(scale * limit, worker_max)
    return (1 - SMOOTHING) * limit + SMOOTHING * target
