"""The bounds of a fair queue in items and cost, how much of them is used, and the queue's statistics."""

import math
from typing import Final, Literal

import msgspec

from kpl_core.options.validation import Bound, require, require_bounds

# Which bound an item would exceed: that of its own flow, or that of all flows together.
ExceededBound = Literal["flow_full", "queue_full"]

_BOUND: Final = Bound(1, math.inf, "or None for no bound", whole=True, optional=True)
_BOUNDS: Final = dict.fromkeys(("max_flow_items", "max_flow_cost", "max_items", "max_cost"), _BOUND)


class QueueBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The largest size of a fair queue, for each flow and for all flows together. None means no bound.

    An empty flow or queue accepts an item above its cost bound. Otherwise such an item could never enter, and its
    caller would wait without end.

    Only the tier "critical" can use the last `critical_share` (at least 0, below 1) of `max_items` and `max_cost`.

    Raises:
        ConfigError: a bound is not a whole number above 0, or the share is not at least 0 and below 1.
    """

    max_flow_items: int | None = None
    max_flow_cost: int | None = None
    max_items: int | None = None
    max_cost: int | None = None
    critical_share: float = 0.0

    def __post_init__(self) -> None:
        require_bounds(self, _BOUNDS)
        require(0.0 <= self.critical_share < 1.0, "critical_share", self.critical_share, "at least 0 and below 1")


class UsedCapacity:
    """How much of a queue's bounds is used."""

    def __init__(self, bounds: QueueBounds) -> None:
        self._max_flow_items = bounds.max_flow_items or math.inf
        self._max_flow_cost = bounds.max_flow_cost or math.inf
        self._max_items = bounds.max_items or math.inf
        self._max_cost = bounds.max_cost or math.inf
        # What the tiers below critical can use together.
        self._open_items = self._max_items * (1.0 - bounds.critical_share)
        self._open_cost = self._max_cost * (1.0 - bounds.critical_share)
        self._items = 0
        self._cost = 0
        self._critical_items = 0
        self._critical_cost = 0

    def exceeded_bound(self, items: int, cost: int, rank: int, flow_items: int, flow_cost: int) -> ExceededBound | None:
        """Return the bound that `items` of a flow, with this cost together, would exceed, or None if there is room.

        `rank` is that of their tier. `flow_items` and `flow_cost` are already queued for the flow.
        """
        if flow_items + items > self._max_flow_items or (flow_items and flow_cost + cost > self._max_flow_cost):
            return "flow_full"
        if self._items + items > self._max_items or (self._items and self._cost + cost > self._max_cost):
            return "queue_full"
        if rank:
            open_items = self._items - self._critical_items
            open_cost = self._cost - self._critical_cost
            if open_items + items > self._open_items or (open_items and open_cost + cost > self._open_cost):
                return "queue_full"
        return None

    def take(self, cost: int, rank: int) -> None:
        """Count one item that is queued."""
        self._items += 1
        self._cost += cost
        if not rank:
            self._critical_items += 1
            self._critical_cost += cost

    def give_back(self, cost: int, rank: int) -> None:
        """Count one item that leaves."""
        self._items -= 1
        self._cost -= cost
        if not rank:
            self._critical_items -= 1
            self._critical_cost -= cost


class FairQueueStatistics(msgspec.Struct, frozen=True):
    """What is queued now, and totals since construction.

    `flows` counts the flows with queued items. `remembered_flows` also counts the idle ones that virtual time has
    not passed yet. Always `pushed == popped + evicted + removed + items`. `refused` counts rejected pushes, which
    are not in `pushed`.
    """

    items: int
    cost: int
    flows: int
    remembered_flows: int
    pushed: int
    popped: int
    refused: int
    evicted: int
    removed: int
