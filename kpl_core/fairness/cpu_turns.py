"""Share the CPU time of one event loop between flows while the loop is late. Pure: instants are arguments.

A flow is a tenant, or all clients that are not authenticated yet: each of their addresses is a part of this flow. An
item is a connection with received bytes that wait for their turn.

*When.* `observe_delay` gets how late the loop is. As in CoDel (RFC 8289), only a standing delay counts: the
smallest delay of a whole window is above the target. One slow request pauses no connection.

*Which flows wait.* Start-time fair queueing (Goyal, Vin and Cheng, 1996) on CPU seconds: a flow's tag is the virtual
time at which its used CPU time is paid, and grows by `cpu_seconds / weight`. A flow whose tag is at most
`round_seconds` of CPU ahead of virtual time has used no more than its share, and never waits. The others wait, and
`next_turn` returns their items in the order of tags, up to `round_seconds` in each round. Virtual time is

- at least the smallest tag of a waiting flow: capacity that others leave is used (work conserving);
- otherwise the elapsed time, divided by the weight of the flows that are ahead. A connection that many tenants share
  cannot wait, so this decides which of its requests are rejected. While the loop is late, less of the elapsed time
  counts, because sending records takes CPU time too. It passes between two rounds or samples only, so that a flow
  that is alone does not run without end in one round of the loop.

*Within a flow*, its parts take turns, one item each. A client can have as many addresses as it likes, so an address has
no share of its own.

An item waits at most `longest_wait_seconds`. Then it gets a turn out of order. It is marked as overdue, unless its flow
is next and the round has time. Items often begin to wait together, so half of each round is for those that have waited
half of this time.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from kpl_core.options.policy import require_weight

T = TypeVar("T", bound=Hashable)

# The part of the elapsed time that tenants may use falls by this factor a window while the loop is late, then grows.
_LESS: Final = 0.9
_LEAST: Final = 0.1
# Without a wait, a rejection or a standing delay for this long, the turns end.
_CALM_SECONDS: Final = 1.0


class StandingDelay:
    """Whether a delay has stood above `target_seconds` for `window_seconds`: the minimum over the window."""

    __slots__ = ("_above_since", "_target", "_window")

    def __init__(self, *, target_seconds: float, window_seconds: float) -> None:
        self._target = target_seconds
        self._window = window_seconds
        self._above_since = math.inf

    def observe(self, delay_seconds: float, now: float) -> bool:
        """Return True if the delay stands; one sample below the target ends it."""
        self._above_since = min(self._above_since, now) if delay_seconds > self._target else math.inf
        return now - self._above_since >= self._window


class CpuTurn(NamedTuple, Generic[T]):
    """The item whose turn it is. `is_overdue`: it has waited for the longest time, and its flow is not due."""

    item: T
    is_overdue: bool


class _Flow(Generic[T]):
    """One flow: its tag, and its waiting items by part, each part's longest wait first.

    The first part has the next turn. `is_listed`: the flow is in the heap of tags.
    """

    __slots__ = ("is_listed", "tag", "waiting", "weight")

    def __init__(self, tag: float, weight: float) -> None:
        self.tag = tag
        self.weight = weight
        self.waiting: OrderedDict[Hashable, OrderedDict[T, None]] = OrderedDict()
        self.is_listed = False


class CpuTurns(Generic[T]):
    """Decide which flows have used more than their share of CPU time, and whose turn is next. See the module.

    Args:
        target_seconds, window_seconds: the standing delay of the loop from which flows take turns.
        round_seconds: the CPU time of all turns of one round. The loop serves everything else between two rounds.
        longest_wait_seconds: how long an item waits at most.
    """

    def __init__(
        self,
        *,
        target_seconds: float = 0.005,
        window_seconds: float = 0.1,
        round_seconds: float = 0.005,
        longest_wait_seconds: float = 1.0,
    ) -> None:
        self._delay = StandingDelay(target_seconds=target_seconds, window_seconds=window_seconds)
        self._window = window_seconds
        self._round = round_seconds
        self._longest = longest_wait_seconds
        self._flows: dict[Hashable, _Flow[T]] = {}
        # The weight of all of `_flows`, which are those that are ahead of virtual time or were so a window ago.
        self._weight = 0.0
        # The flows with waiting items by tag. A tag only grows, so an entry is corrected when it comes up.
        self._heap: list[tuple[float, int, _Flow[T]]] = []
        self._serial = count()
        # All waiting items with their flows, their parts and since when they wait, the longest wait first.
        self._items: OrderedDict[T, tuple[_Flow[T], Hashable, float]] = OrderedDict()
        self._virtual = 0.0
        self._advanced_at = 0.0
        self._capacity = 1.0
        self._adapted_at = -math.inf
        self._spent = 0.0
        self._busy_at = -math.inf
        # Whether flows take turns now. While they do not, no other method needs to be called.
        self.is_active = False

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the waiting items, the longest wait first."""
        return iter(self._items)

    def observe_delay(self, delay_seconds: float, now: float) -> None:
        """Start turns if the delay of the loop stands, and end them after a calm second."""
        stands = self._delay.observe(delay_seconds, now)
        if not self.is_active:
            if stands:
                self.is_active = True
                self._busy_at = self._advanced_at = self._adapted_at = now
            return
        self._advance(now)
        if now - self._adapted_at >= self._window:
            self._adapted_at = now
            self._capacity = max(_LEAST, _LESS * self._capacity) if stands else min(1.0, self._capacity / _LESS)
            # A flow behind virtual time is like one that has used nothing.
            self._flows = {key: flow for key, flow in self._flows.items() if flow.waiting or flow.tag > self._virtual}
            self._weight = sum([flow.weight for flow in self._flows.values()])
        if stands or self._items:
            self._busy_at = now
        elif now - self._busy_at >= _CALM_SECONDS:
            self._end()

    def may_run(self, flow: Hashable, now: float) -> bool:
        """Return True if this flow has used no more than its share, so that its next item need not wait."""
        found = self._flows.get(flow)
        if found is None:
            return True
        if found.waiting:
            return False
        if (found.tag - self._virtual) * found.weight <= self._round:
            return True
        self._busy_at = now
        return False

    def charge(self, flow: Hashable, cpu_seconds: float, *, weight: float = 1.0) -> None:
        """Add CPU time that a flow has used. `weight` is its share relative to other flows."""
        found = self._flow(flow, weight)
        found.tag = max(found.tag, self._virtual) + cpu_seconds / found.weight
        if found.waiting or (found.tag - self._virtual) * weight > self._round:
            self._spent += cpu_seconds

    def wait(self, item: T, flow: Hashable, now: float, *, part: Hashable = None, weight: float = 1.0) -> None:
        """Let an item wait for its turn, behind the other items of its part of the flow."""
        found = self._flow(flow, weight)
        found.tag = max(found.tag, self._virtual)
        found.waiting.setdefault(part, OrderedDict())[item] = None
        self._items[item] = found, part, now
        if not found.is_listed:
            found.is_listed = True
            heappush(self._heap, (found.tag, next(self._serial), found))

    def leave(self, item: T) -> bool:
        """Remove a waiting item, for example because its client has gone. Return False if it does not wait."""
        found = self._items.pop(item, None)
        if found is None:
            return False
        flow, part, _ = found
        items = flow.waiting[part]
        del items[item]
        if not items:
            del flow.waiting[part]
        return True

    def begin_round(self, now: float) -> None:
        """Begin a round. What the one before used above its `round_seconds` counts in this one."""
        self._spent = max(0.0, self._spent - self._round)
        self._advance(now)
        first = self._first()
        if first is not None:
            self._virtual = max(self._virtual, first.tag)

    def next_turn(self, now: float) -> CpuTurn[T] | None:
        """Remove and return the item whose turn is next; None: this round is over. Charge its flow before the next."""
        if not self._items:
            return None
        item, (flow, part, since) = next(iter(self._items.items()))
        waited, first = now - since, self._first()
        is_overdue = waited >= self._longest or (waited >= self._longest / 2 and self._spent < self._round / 2)
        if self._spent < self._round and flow is first:
            # Its flow is due too: a flow that waits alone is never refused while a round has time.
            is_overdue = False
        if not is_overdue:
            if first is None or self._spent >= self._round:
                return None
            flow = first
            part, items = next(iter(flow.waiting.items()))
            item = next(iter(items))
        self.leave(item)
        if part in flow.waiting:
            flow.waiting.move_to_end(part)
        return CpuTurn(item, is_overdue)

    def take_all(self) -> list[T]:
        """End the turns at once, and return all waiting items, the longest wait first."""
        waiting = list(self._items)
        self._end()
        return waiting

    def _flow(self, key: Hashable, weight: float) -> _Flow[T]:
        found = self._flows.get(key)
        if found is None:
            found = self._flows[key] = _Flow(self._virtual, require_weight("weight", weight))
            self._weight += weight
        elif found.weight != weight:
            self._weight += weight - found.weight
            found.weight = require_weight("weight", weight)
        return found

    def _first(self) -> _Flow[T] | None:
        """Return the flow with the smallest tag among those with waiting items."""
        heap = self._heap
        while heap:
            tag, _, flow = heap[0]
            if not flow.waiting:
                flow.is_listed = False
                heappop(heap)
            elif tag < flow.tag:
                heapreplace(heap, (flow.tag, next(self._serial), flow))
            else:
                return flow
        return None

    def _advance(self, now: float) -> None:
        """Let the flows that are ahead use their shares of the time since the last call."""
        if now > self._advanced_at:
            if self._flows:
                virtual = self._virtual + self._capacity * (now - self._advanced_at) / self._weight
                # A flow that waits has not had this time yet.
                first = self._first()
                self._virtual = virtual if first is None else max(self._virtual, min(virtual, first.tag))
            self._advanced_at = now

    def _end(self) -> None:
        self.is_active = False
        self._capacity = 1.0
        self._spent = self._weight = 0.0
        self._flows.clear()
        self._heap.clear()
        self._items.clear()
