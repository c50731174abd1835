"""Max-min fair shares of one limit, by water-filling; pure.

Nobody gets more than it wants while another, of its tier, wants more than it
got; the rest is divided by weight (Bertsekas and Gallager, "Data Networks",
6.5.2). Tiers are served one after the other. Two things differ from the
textbook, because demand is measured and moves between two measurements:

- everybody keeps a trickle, 4 % of its fair share, so that one who wakes up
  moves at once, and can be seen to want more;
- what is left when all wants are met is divided too, so that a want may grow.
"""

from collections.abc import Sequence
from operator import truediv
from typing import Final

__all__ = ["HEADROOM", "TRICKLE", "fair_level", "shares", "water_level"]

TRICKLE: Final = 0.04
# A want is a measured rate and this much more, for what varies between two measurements.
HEADROOM: Final = 1.25


def water_level(wants: Sequence[float], weights: Sequence[float], limit: float) -> float:
    """Return the level at which `sum(min(want, weight * level)) == limit`; the highest mark if all wants fit.

    O(n log n) in the number of wants.
    """
    if not wants:
        return 0.0
    if weights.count(weights[0]) == len(weights):
        return _level_of_equals(wants, weights[0], limit)
    marks = sorted(zip(map(truediv, wants, weights), wants, weights, strict=True))
    left, heavy = limit, sum(weights)
    level = 0.0
    for mark, want, weight in marks:
        level = left / heavy if heavy > 0 else 0.0
        if mark >= level:
            return level
        left -= want
        heavy -= weight
        level = mark
    return level


def _level_of_equals(wants: Sequence[float], weight: float, limit: float) -> float:
    """Return the same for wants of one weight, which most fleets have, in half the time."""
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
    """Divide `limit` among workers with these demands; the sum is the limit, but for rounding.

    Args:
        limit: units a second.
        demands: what each would use, units a second; infinity is allowed.
        weights: above 0.
        tiers: the rank of each worker's tier, 0 before 1; None: all are alike.
    """
    if not demands:
        return []
    total_weight = sum(weights)
    trickle = TRICKLE * limit / total_weight
    # Comparisons instead of min and max: a large fleet passes here a hundred thousand times a summary.
    wants = [
        want if (want := demand * HEADROOM - trickle * weight) > 0.0 else 0.0
        for demand, weight in zip(demands, weights, strict=True)
    ]
    left = limit * (1.0 - TRICKLE)
    if tiers is None or tiers.count(tiers[0]) == len(tiers):
        poured, left = _poured(left, wants, weights)
    else:
        poured = [0.0] * len(wants)
        for tier in sorted(set(tiers)):
            members = [index for index, rank in enumerate(tiers) if rank == tier]
            of_tier, left = _poured(left, [wants[index] for index in members], [weights[index] for index in members])
            for index, share in zip(members, of_tier, strict=True):
                poured[index] = share
    # To all alike by weight: the trickle, and what nobody wanted.
    alike = trickle + left / total_weight
    return [share + alike * weight for share, weight in zip(poured, weights, strict=True)]


def _poured(left: float, wants: Sequence[float], weights: Sequence[float]) -> tuple[Sequence[float], float]:
    """Divide `left` up to the water level; return what each gets of it, and what is left then."""
    total = sum(wants)
    if total <= left:
        return wants, left - total
    level = water_level(wants, weights, left)
    return [want if want < (most := weight * level) else most for want, weight in zip(wants, weights, strict=True)], 0.0


def fair_level(limit: float, weights: Sequence[float]) -> float:
    """Return what one unit of weight may claim while everybody wants all."""
    return limit / sum(weights) if weights else limit
