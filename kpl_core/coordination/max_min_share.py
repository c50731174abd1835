"""Weighted max-min fair shares of one limit, by water-filling; pure.

No worker gets more than it wants while another worker of its tier wants more than it got. The rest is divided by weight
(Bertsekas and Gallager, "Data Networks", 6.5.2). Tiers are served one after the other. We differ from the textbook in
three points, because demand is measured and changes between two measurements:

- A worker wants a part more than its demand: 8 % while the wants of all are above the limit, otherwise up to 25 %. What
  is reserved above the demand of some is missing to a worker that wants everything.
- Every worker keeps 4 % of its fair share (the trickle), so that an idle worker can start at once and its new demand is
  measured.
- Of what is left when all wants are met, a part is divided among all workers and a part among those whose demand is
  above the trickle, so that demand can grow. The rest stays unassigned: a worker with a burst gets it at once, and need
  not wait until other workers have given it up.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import truediv
from typing import Final

TRICKLE: Final = 0.04
# A want is the measured rate times this factor, to allow for changes between two measurements.
HEADROOM: Final = 1.25
# The same while the wants of all are above the limit: what is reserved above a demand is missing elsewhere.
LEAST_HEADROOM: Final = 1.08
# The parts of the unused capacity that all workers share, and that workers share whose demand is above the trickle.
SPARE_OF_ALL: Final = 0.15
SPARE_OF_BUSY: Final = 0.6


def water_level(wants: Sequence[float], weights: Sequence[float], limit: float) -> float:
    """Return the level at which `sum(min(want, weight * level)) == limit`; the highest mark if all wants fit.

    O(n log n) in the number of wants.
    """
    if not wants:
        return 0.0
    if weights.count(weights[0]) == len(weights):
        return _level_of_equal_weights(wants, weights[0], limit)
    marks: list[tuple[float, float, float]] = sorted(zip(map(truediv, wants, weights), wants, weights, strict=True))
    # The weight of a mark and all after it. Added from the last on: subtracting each from the sum of all would leave
    # rounding in place of a small weight.
    heavy = list(accumulate(weight for _, _, weight in reversed(marks)))
    left = limit
    for mark, want, _ in marks:
        level = left / heavy.pop()
        if mark >= level:
            return level
        left -= want
    return marks[-1][0]


def _level_of_equal_weights(wants: Sequence[float], weight: float, limit: float) -> float:
    """Return the same for wants of equal weight, the case of most fleets, in half the time."""
    left, heads = limit, len(wants)
    for want in sorted(wants):
        if want * heads >= left:
            return left / (heads * weight)
        left -= want
        heads -= 1
    return max(wants) / weight


def shares(
    limit: float, demands: Sequence[float], weights: Sequence[float], tiers: Sequence[int] | None = None
) -> list[float]:
    """Divide `limit` among workers with these demands. If they want less, a part of the limit stays unassigned.

    Args:
        limit: units a second.
        demands: what each worker would use, units a second; infinity is allowed.
        weights: above 0.
        tiers: the rank of each worker's tier, 0 first; None: one tier.
    """
    if not demands:
        return []
    total_weight = sum(weights)
    trickle = TRICKLE * limit / total_weight
    wants = _wants(demands, weights, HEADROOM, trickle)
    left = limit * (1.0 - TRICKLE)
    filled: Sequence[float] = wants
    rest = left - sum(wants)
    if rest < 0.0:
        filled, rest = _fill_tiers(left, _wants(demands, weights, LEAST_HEADROOM, trickle), weights, tiers)
        if rest > 0.0:
            lacks = [want - share for want, share in zip(wants, filled, strict=True)]
            more, rest = _fill_tiers(rest, lacks, weights, tiers)
            filled = [share + rise for share, rise in zip(filled, more, strict=True)]
    # Divided by weight among all workers: the trickle, and what is left.
    alike = trickle + rest * SPARE_OF_ALL / total_weight
    busy_weight = sum([weight for want, weight in zip(wants, weights, strict=True) if want > 0.0])
    busy = alike + (rest * SPARE_OF_BUSY / busy_weight if busy_weight > 0.0 else 0.0)
    return [
        share + (busy if want > 0.0 else alike) * weight
        for share, want, weight in zip(filled, wants, weights, strict=True)
    ]


def _wants(demands: Sequence[float], weights: Sequence[float], headroom: float, trickle: float) -> list[float]:
    """Return what each worker wants above its trickle."""
    # Comparisons instead of min and max: for a large fleet this runs a hundred thousand times per summary.
    return [
        want if (want := demand * headroom - trickle * weight) > 0.0 else 0.0
        for demand, weight in zip(demands, weights, strict=True)
    ]


def _fill_tiers(
    left: float, wants: Sequence[float], weights: Sequence[float], tiers: Sequence[int] | None
) -> tuple[Sequence[float], float]:
    """Fill one tier after the other; return the part of each worker, and the remainder."""
    if tiers is None or tiers.count(tiers[0]) == len(tiers):
        return _fill(left, wants, weights)
    filled = [0.0] * len(wants)
    for tier in sorted(set(tiers)):
        members = [index for index, rank in enumerate(tiers) if rank == tier]
        of_tier, left = _fill(left, [wants[index] for index in members], [weights[index] for index in members])
        for index, share in zip(members, of_tier, strict=True):
            filled[index] = share
    return filled, left


def _fill(left: float, wants: Sequence[float], weights: Sequence[float]) -> tuple[Sequence[float], float]:
    """Divide `left` up to the water level; return the part of each worker, and the remainder."""
    total = sum(wants)
    if total <= left:
        return wants, left - total
    level = water_level(wants, weights, left)
    return [want if want < (most := weight * level) else most for want, weight in zip(wants, weights, strict=True)], 0.0


def fair_level(limit: float, weights: Sequence[float]) -> float:
    """Return what one unit of weight may claim while every worker wants everything."""
    return limit / sum(weights) if weights else limit
