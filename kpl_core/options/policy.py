"""Policies: rate and fairness as plain values, checked once, obeyed elsewhere.

A policy does nothing by itself. It can be built while a module is imported, compared,
pickled, written as JSON or TOML and read back with `RateLimitPolicy(**table)`. What obeys
it are the pipeline, `rate_limited` and `fair_merge` (kpl_core.limits), and they only
while something flows.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kpl_core.errors import ConfigError
from kpl_core.options.frozen_mapping import FrozenMapping

__all__ = ["MAX_WEIGHT", "MIN_WEIGHT", "FairnessPolicy", "RateLimitPolicy", "require_weight"]

MIN_WEIGHT: Final = 1e-6
MAX_WEIGHT: Final = 1e6


def require_weight(name: str, weight: float) -> float:
    """Return `weight` if it is one.

    Raises:
        ConfigError: it is no number between `MIN_WEIGHT` and `MAX_WEIGHT`.
    """
    if not _is_number(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        message = f"{name} is {weight!r}; a weight must be a number between {MIN_WEIGHT:g} and {MAX_WEIGHT:,.0f}"
        raise ConfigError(message)
    return weight


@dataclass(frozen=True, slots=True)
class RateLimitPolicy:
    """A token bucket in two numbers: at most `tokens_per_second * t + burst_tokens` in any `t` seconds.

    Raises:
        ConfigError: a rate that is not finite and above 0, or a burst that is no whole number
            above 0 (one token must fit, or nothing ever passes within the bound).
    """

    tokens_per_second: float = 10.0
    burst_tokens: int = 10

    def __post_init__(self) -> None:
        if not _is_number(self.tokens_per_second) or not 0.0 < self.tokens_per_second < math.inf:
            message = f"tokens_per_second is {self.tokens_per_second!r}; it must be a finite number above 0"
            raise ConfigError(message)
        _require_count("burst_tokens", self.burst_tokens)


@dataclass(frozen=True, slots=True)
class FairnessPolicy:
    """Who gets how much of what all share, while they want more than there is.

    Weights are relative: a flow of weight 3 gets three times as much as one of weight 1.
    A flow is named by any text, or by a number: its position, where flows are a sequence.
    JSON and TOML spell a number as text, so the weight of flow 0 is also found under "0".

    `max_buffer_per_flow` is how many items of one flow may wait.

    Raises:
        ConfigError: a weight that is no number between 1e-6 and 1e6, or a buffer below 1.
    """

    # Not part of the hash, because a mapping has none; equality compares it.
    weights: Mapping[str | int, float] = field(default_factory=dict, hash=False)
    default_weight: float = 1
    max_buffer_per_flow: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            message = f"weights is of type {type(self.weights).__name__}; it must map flows to weights"
            raise ConfigError(message)
        for flow, weight in self.weights.items():
            require_weight(f"weights[{flow!r}]", weight)
        require_weight("default_weight", self.default_weight)
        _require_count("max_buffer_per_flow", self.max_buffer_per_flow)
        object.__setattr__(self, "weights", FrozenMapping(self.weights))

    def weight_of(self, flow: Hashable) -> float:
        """Return the weight of `flow`, known or not."""
        weights: Mapping[Any, float] = self.weights
        weight = weights.get(flow)
        if weight is None and isinstance(flow, int):
            weight = weights.get(str(flow))
        return self.default_weight if weight is None else weight

    def aggregates(self, flow: Hashable) -> bool:  # noqa: ARG002 - a subclass may know flows whose consumers cannot
        """Say whether user records of `flow` may share an aggregated record, when they are retried or replayed too."""
        return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        message = f"{name} is {value!r}; it must be a whole number, 1 or more"
        raise ConfigError(message)
