"""How much may wait in a fair queue, in items and in cost, for one flow and for all together."""

import sys
from dataclasses import dataclass
from typing import Final, Literal

from kpl_core.errors import ConfigError

__all__ = ["QueueBounds", "Refusal", "Room"]

# Whose bound would break: that of the item's own flow, or that of all flows together.
Refusal = Literal["flow_full", "queue_full"]

_UNBOUNDED: Final = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """The most a fair queue holds. None: no bound.

    Something larger than a cost bound is let into an empty flow or queue all the same: it
    could never enter otherwise, and whoever waits for room would wait for ever.

    `critical_share`, 0 up to 1, is the part of `max_items` and of `max_cost` that only the
    tier "critical" can take.

    Raises:
        ConfigError: a bound is no whole number above 0, or the share is not 0 or more and below 1.
    """

    max_flow_items: int | None = None
    max_flow_cost: int | None = None
    max_items: int | None = None
    max_cost: int | None = None
    critical_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_flow_items", "max_flow_cost", "max_items", "max_cost"):
            bound = getattr(self, name)
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 1):
                message = f"{name} is {bound!r}; it must be a whole number, 1 or more, or None for no bound"
                raise ConfigError(message)
        if not 0.0 <= self.critical_share < 1.0:
            message = f"critical_share is {self.critical_share!r}; it must be 0 or more and below 1"
            raise ConfigError(message)


class Room:
    """What of a queue's bounds is taken."""

    __slots__ = (
        "_cost",
        "_critical_cost",
        "_critical_items",
        "_items",
        "_max_cost",
        "_max_flow_cost",
        "_max_flow_items",
        "_max_items",
        "_open_cost",
        "_open_items",
    )

    def __init__(self, bounds: QueueBounds) -> None:
        self._max_flow_items = _UNBOUNDED if bounds.max_flow_items is None else bounds.max_flow_items
        self._max_flow_cost = _UNBOUNDED if bounds.max_flow_cost is None else bounds.max_flow_cost
        self._max_items = _UNBOUNDED if bounds.max_items is None else bounds.max_items
        self._max_cost = _UNBOUNDED if bounds.max_cost is None else bounds.max_cost
        # What the tiers below critical can take, all together.
        self._open_items = int(self._max_items * (1.0 - bounds.critical_share))
        self._open_cost = int(self._max_cost * (1.0 - bounds.critical_share))
        self._items = 0
        self._cost = 0
        self._critical_items = 0
        self._critical_cost = 0

    def refusal(self, items: int, cost: int, rank: int, flow_items: int, flow_cost: int) -> Refusal | None:
        """Say which bound `items` and `cost` of one flow in one tier would break."""
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
        """Count one item in."""
        self._items += 1
        self._cost += cost
        if not rank:
            self._critical_items += 1
            self._critical_cost += cost

    def give_back(self, cost: int, rank: int) -> None:
        """Count one item out."""
        self._items -= 1
        self._cost -= cost
        if not rank:
            self._critical_items -= 1
            self._critical_cost -= cost
