"""Policies: rate and fairness as plain values, checked when they are made.

A policy does nothing by itself. It can be built at import time, compared, pickled, written as JSON or TOML and
read back with `RateLimitPolicy(**table)`. The pipeline, `rate_limited` and `fair_merge` (kpl_core.limits) apply it.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from kpl_core.options.option import Option, check_options
from kpl_core.options.validation import Bound, require_number

_WEIGHT: Final = Bound(1e-6, 1e6, "a weight")


def require_weight(name: str, weight: float) -> float:
    """Return `weight` after checking it.

    Raises:
        ConfigError: it is not a number between 1e-6 and 1e6.
    """
    require_number(name, weight, _WEIGHT)
    return weight


def _require_weights(name: str, weights: Mapping[str | int, float]) -> None:
    for flow, weight in weights.items():
        require_weight(f"{name}[{flow!r}]", weight)


@dataclass(frozen=True, slots=True)
class RateLimitPolicy:
    """A token bucket in two numbers: at most `tokens_per_second * t + burst_tokens` in any `t` seconds.

    Raises:
        ConfigError: the rate is not a finite number above 0, or the burst is not a whole number of at least 1.
            A bucket that cannot hold one token would let nothing pass.
    """

    tokens_per_second: Annotated[float, Option("The rate.", 0.0, unit="tokens a second", above=True)] = 10.0
    burst_tokens: Annotated[int, Option("What an idle bucket holds.", 1, unit="tokens")] = 10

    def __post_init__(self) -> None:
        check_options(self)


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
    weights: Annotated[Mapping[str | int, float], Option("The weights of flows by name.", check=_require_weights)] = (
        field(default_factory=dict, hash=False)
    )
    default_weight: Annotated[float, Option("The weight of the other flows.", 1e-6, 1e6, "a weight")] = 1
    max_buffer_per_flow: Annotated[int, Option("How many items of one flow may wait.", 1, unit="items")] = 16

    def __post_init__(self) -> None:
        check_options(self)

    def weight_of(self, flow: Hashable) -> float:
        """Return the weight of `flow`, or the default weight if it has no entry."""
        weights: Mapping[Any, float] = self.weights
        weight = weights.get(flow)
        if weight is None and isinstance(flow, int):
            weight = weights.get(str(flow))
        return self.default_weight if weight is None else weight

    def aggregates(self, flow: Hashable) -> bool:  # noqa: ARG002 - a subclass may know flows whose consumers cannot
        """Return True if user records of `flow` may share an aggregated record, also when retried or replayed.

        It is not asked about user records without a flow: they may.
        """
        return True
