"""What a fair queue tells about itself."""

from collections.abc import Hashable
from dataclasses import dataclass

from kpl_core.records.user_record import Tier

__all__ = ["FairQueueStatistics", "FlowBacklog"]


@dataclass(frozen=True, slots=True)
class FlowBacklog:
    """What one flow has queued in all its tiers; `tier` is the one that was asked about, if one was."""

    flow: Hashable
    tier: Tier | None
    weight: float
    items: int
    cost: int


@dataclass(frozen=True, slots=True)
class FairQueueStatistics:
    """What is queued now, and totals since construction.

    `flows` have something queued; `remembered_flows` are those and the idle ones that virtual
    time has not passed yet. Always `pushed == popped + evicted + removed + items`. `refused` counts pushes that were
    turned away; they are not in `pushed`.
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
