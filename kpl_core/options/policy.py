"""Policies: rate and fairness as plain values, checked when they are made.

A policy does nothing by itself. It can be built at import time, compared, pickled, written as JSON or TOML and
read back with `RateLimitPolicy(**table)`. The pipeline, `rate_limited` and `fair_merge` (kpl_core.limits) apply it.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kpl_core.options.validation import ABOVE_ZERO, Bound, FrozenMapping, require_kind, require_number

_WEIGHT: Final = Bound(1e-6, 1e6, "a weight")
_COUNT: Final = Bound(1, float("inf"), "", whole=True)


def require_weight(name: str, weight: float) -> float:
    """Return `weight` after checking it.

    Raises:
        ConfigError: it is not a number between 1e-6 and 1e6.
    """
    require_number(name, weight, _WEIGHT)
    return weight


@dataclass(frozen=True, slots=True)
class RateLimitPolicy:
    """A token bucket in two numbers: at most `tokens_per_second * t + burst_tokens` in any `t` seconds.

    Raises:
        ConfigError: the rate is not a finite number above 0, or the burst is not a whole number of at least 1.
            A bucket that cannot hold one token would let nothing pass.
    """

    tokens_per_second: float = 10.0
    burst_tokens: int = 10

    def __post_init__(self) -> None:
        require_number("tokens_per_second", self.tokens_per_second, ABOVE_ZERO)
        require_number("burst_tokens", self.burst_tokens, _COUNT)


@dataclass(frozen=True, slots=True)
class FairnessPolicy:
    """How flows share a limit when they want more than it allows.

    Weights are relative: a flow of weight 3 gets three times as much as one of weight 1. A flow's name is a str,
    or an int: its position, if the flows are a sequence. JSON and TOML write an int key as text, so the weight of
    flow 0 is also found under "0". `max_buffer_per_flow` bounds how many items of one flow may wait.

    Raises:
        ConfigError: a weight is not a number between 1e-6 and 1e6, or the buffer is below 1.
    """

    # Not part of the hash, because a mapping is not hashable; equality compares it.
    weights: Mapping[str | int, float] = field(default_factory=dict, hash=False)
    default_weight: float = 1
    max_buffer_per_flow: int = 16

    def __post_init__(self) -> None:
        require_kind("weights", self.weights, Mapping, "a mapping of flows to weights")
        for flow, weight in self.weights.items():
            require_weight(f"weights[{flow!r}]", weight)
        require_weight("default_weight", self.default_weight)
        require_number("max_buffer_per_flow", self.max_buffer_per_flow, _COUNT)
        object.__setattr__(self, "weights", FrozenMapping(self.weights))

    def weight_of(self, flow: Hashable) -> float:
        """Return the weight of `flow`, or the default weight if it has no entry."""
        weights: Mapping[Any, float] = self.weights
        weight = weights.get(flow)
        if weight is None and isinstance(flow, int):
            weight = weights.get(str(flow))
        return self.default_weight if weight is None else weight

    def aggregates(self, flow: Hashable) -> bool:  # noqa: ARG002 - a subclass may know flows whose consumers cannot
        """Return True if user records of `flow` may share an aggregated record, also when retried or replayed."""
        return True
