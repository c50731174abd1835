"""Independent references, and broken copies of an algorithm.

The references are slow, obvious, in exact fractions, and share no line with what they judge. A broken copy shows that a
law would notice: it is the module's own source with a line or two replaced, so that it stays in step with the original.
"""

import inspect
from collections.abc import Mapping
from fractions import Fraction
from types import ModuleType
from typing import Any


class ExactTokenBucket:
    """A token bucket that counts tokens, topped up on every query, without rounding."""

    def __init__(self, rate: float, capacity: float, *, now: float = 0.0) -> None:
        self._rate = Fraction(rate)
        self._capacity = Fraction(capacity)
        self._level = self._capacity
        self._last = Fraction(now)

    def tokens(self, now: float) -> Fraction:
        elapsed = Fraction(now) - self._last
        self._level = min(self._capacity, self._level + self._rate * elapsed)
        self._last = Fraction(now)
        return self._level

    def try_take(self, cost: float, now: float) -> bool:
        if self.tokens(now) < min(Fraction(cost), self._capacity):
            return False
        self._level -= Fraction(cost)
        return True

    def ready_at(self, cost: float, now: float) -> Fraction:
        missing = min(Fraction(cost), self._capacity) - self.tokens(now)
        return Fraction(now) + max(Fraction(0), missing) / self._rate

    @staticmethod
    def most_in_window(rate: float, capacity: float, start: float, end: float) -> Fraction:
        """Return the most tokens a bucket may give within `start .. end`: capacity + rate x time."""
        return Fraction(capacity) + Fraction(rate) * (Fraction(end) - Fraction(start))


class PaperFairQueue:
    """Start-time fair queuing to the letter: every item is tagged when it arrives, in fractions.

    Goyal, Vin and Cheng 1996, section 2. Ties go to the flow named first in `weights`. After the
    last item of a busy period virtual time is the largest finish tag that was given.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = {flow: Fraction(weight).limit_denominator(10**6) for flow, weight in weights.items()}
        self._places = {flow: place for place, flow in enumerate(weights)}
        self._finish = dict.fromkeys(weights, Fraction(0))
        self._virtual_time = Fraction(0)
        self._waiting: list[tuple[Fraction, int, int, object]] = []
        self._arrivals = 0

    def push(self, item: object, flow: str, cost: int) -> None:
        start = max(self._virtual_time, self._finish[flow])
        self._finish[flow] = start + cost / self._weights[flow]
        self._arrivals += 1
        self._waiting.append((start, self._places[flow], self._arrivals, item))

    def pop(self) -> object:
        first = min(self._waiting, key=lambda entry: entry[:3])
        self._waiting.remove(first)
        self._virtual_time = first[0] if self._waiting else max(self._finish.values())
        return first[3]


def max_min_shares(demands: Mapping[str, int], weights: Mapping[str, float], capacity: int) -> dict[str, Fraction]:
    """Return the weighted max-min fair shares of `capacity`.

    No flow gets more than it asked for, and none can get more without taking from one that has
    no more for its weight. Found by giving: a flow that asks for no more than its part of what is
    left gets it, and the rest is divided again.
    """
    shares: dict[str, Fraction] = {}
    left = Fraction(capacity)
    unserved = dict(demands)
    while unserved:
        total = sum(Fraction(weights[flow]) for flow in unserved)
        modest = [flow for flow, demand in unserved.items() if demand * total <= left * Fraction(weights[flow])]
        if not modest:
            return shares | {flow: left * Fraction(weights[flow]) / total for flow in unserved}
        for flow in modest:
            shares[flow] = Fraction(unserved.pop(flow))
        left = Fraction(capacity) - sum(shares.values())
    return shares


__all__ = ["mutant_of"]


def mutant_of(module: ModuleType, *replacements: tuple[str, str], **names: Any) -> Any:
    """Return a copy of `module` with pieces of its source, each found exactly once, replaced.

    `names` are put into the copy's namespace in place of what it imported.
    """
    source = inspect.getsource(module)
    for old, new in replacements:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    copy = ModuleType(f"{module.__name__}_mutant")
    exec(compile(source, f"<mutant of {module.__name__}>", "exec"), copy.__dict__)  # noqa: S102 - our own source
    vars(copy).update(names)
    return copy
