"""A fair queue: flows share one server in proportion to their weights, no matter how much each of them queues.

The algorithm is start-time fair queuing: Goyal, Vin and Cheng, "Start-time Fair Queuing: A Scheduling Algorithm for
Integrated Services Packet Switching Networks" (SIGCOMM 1996). An item gets a start tag and a finish tag in *virtual
time*. The item with the smallest start tag is served first:

    start  = max(virtual time, finish tag of the flow's previous item)
    finish = start + cost / weight

Virtual time is the start tag of the item served last, so an idle flow earns no credit. While two flows have queued
items all the time, this follows:

    share     their served cost / weight differs by at most one item of each
    waiting   if all items cost the same, a flow is served again after at most
              `ceil(weight of the other / its own weight)` items of every other flow. That is
              sum(weights) / weight items, plus a rest because items are not divisible.

Differences from the paper:

* An item is a user record or a chunk, its cost usually bytes. The server is the caller of `pop`. Its speed is not
  known, and the algorithm does not need it.
* Tags are whole numbers (see `flow.py`).
* Only a flow's first item needs its tag. So each flow has one place in the heap, no matter how much it has queued.
  When its queue runs empty it keeps the place under its last finish tag until virtual time passes it. A push to
  such a flow does not change the heap.
* A flow's items may be of three tiers. Within the flow the higher tier is served first, so a flow that mislabels
  its items harms only itself. When the queue is full the lowest tier is evicted first, and within it the flow
  with the longest backlog, which is its queued cost divided by its weight.
* An item may leave without being served (expired, rerouted, evicted). Its flow is not charged for it.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

from kpl_core.fairness.bounds import ExceededBound, FairQueueStatistics, QueueBounds, UsedCapacity
from kpl_core.fairness.flow import SLOT_BITS, SLOT_MASK, Flow, FlowRanking, require_cost
from kpl_core.options.policy import require_weight
from kpl_core.records.user_record import TIERS, Tier, rank_of

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of many flows. `push` and `pop` take O(log n) for n flows.

    It forgets a flow as soon as the flow cannot influence the order any more, at the latest when the whole queue is
    empty. It reads no clock and is not thread-safe.

    Args:
        weight_of: returns the weight of a flow, a number between 1e-6 and 1e6. It is called each time a flow
            becomes active. By default every flow has weight 1.
        flows: flows that win ties against all others, and among each other in this order.
            Other ties go to the flow whose slot was free first.
        bounds: the largest size of the queue. Without bounds every push is accepted.
    """

    def __init__(
        self,
        *,
        weight_of: Callable[[Any], float] = lambda _flow: 1,
        flows: Iterable[Hashable] = (),
        bounds: QueueBounds | None = None,
    ) -> None:
        self._weight_of = weight_of
        self._used = None if bounds is None else UsedCapacity(bounds)
        self._declared = {flow: slot for slot, flow in enumerate(flows)}
        # Invariant: each flow in `_flows` has one key in the heap, and is the flow in that key's slot. While nothing
        # is queued there are no flows. A slot that no key names is free, even if a flow is still in it.
        self._flows: dict[Hashable, Flow[T]] = {}
        self._heap: list[int] = []
        self._slots: list[Flow[T]] = [Flow(None, 1, "normal")] * len(self._declared)
        self._free_slots: list[int] = []
        # The heap key that virtual time has reached; its slot bits mean nothing.
        self._passed = 0
        # How often a flow's last item left without being served, since the last clean-up of idle flows.
        self._idle = 0
        self._ranking: FlowRanking[T] | None = None
        self._pushed = 0
        self._departed = 0
        self._refused = 0
        self._evicted = 0
        self._removed = 0

    def __len__(self) -> int:
        return self._pushed - self._departed

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, item: T, flow: Hashable, cost: int, tier: Tier = "normal") -> bool:
        """Queue `item` behind the others of its flow and tier. Return False if it would exceed a bound.

        Raises:
            ValueError: the cost is not a whole number above 0, or the tier is unknown.
            ConfigError: `weight_of(flow)` is out of range.
        """
        if type(cost) is not int or cost < 1:
            require_cost(cost)
        state = self._flows.get(flow)
        used = self._used
        rank = 0
        if used is not None:
            rank = state.rank if state is not None and state.tier == tier else rank_of(tier)
            flow_items, flow_cost = (0, 0) if state is None else (state.items(), state.cost)
            if used.exceeded_bound(1, cost, rank, flow_items, flow_cost) is not None:
                self._refused += 1
                return False
        if state is None:
            state = self._begin(flow, tier)
        entries = state.entries if state.tier == tier else state.queue_of(tier)
        entries.append(item)
        entries.append(cost)
        state.cost += cost
        self._pushed += 1
        if used is not None:
            used.take(cost, rank)
        if self._ranking is not None:
            self._ranking.grew(state)
        return True

    def pop(self) -> T:
        """Remove and return the next item.

        Raises:
            IndexError: nothing is queued.
        """
        heap = self._heap
        while heap:
            key = heap[0]
            flow = self._slots[key & SLOT_MASK]
            entries = flow.entries
            if not entries:
                if flow.serve_next_tier():
                    entries = flow.entries
                else:
                    self._forget_first()
                    continue
            item: T = entries.popleft()
            cost: int = entries.popleft()
            # The item is served: virtual time moves here, and the flow's next item starts where this one finishes.
            self._passed = key
            heapreplace(heap, key + (cost * flow.step or flow.advance(cost)))
            flow.cost -= cost
            self._departed += 1
            if self._used is not None:
                self._used.give_back(cost, flow.rank)
            if self._departed == self._pushed:
                self._forget_all()
            return item
        message = "pop from an empty FairQueue"
        raise IndexError(message)

    def exceeded_bound(
        self, flow: Hashable, cost: int, tier: Tier = "normal", *, items: int = 1
    ) -> ExceededBound | None:
        """Return the bound that `items` of `flow`, with `cost` together, would exceed, or None if there is room."""
        if self._used is None:
            return None
        state = self._flows.get(flow)
        if state is None:
            return self._used.exceeded_bound(items, cost, rank_of(tier), 0, 0)
        return self._used.exceeded_bound(items, cost, rank_of(tier), state.items(), state.cost)

    def push_evicting(self, item: T, flow: Hashable, cost: int, tier: Tier = "normal") -> list[T] | None:
        """Queue `item` and evict others if it needs their room. Return the evicted items.

        A full flow evicts from its own lower tiers. A full queue evicts from the lowest tier. In the item's own
        tier it evicts from the flow with the longest backlog; if that is the item's flow, the item is rejected. The
        newest items are evicted first. If the item is rejected, the result is None and nothing changes.

        Raises:
            ValueError, ConfigError: as `push`.
        """
        if type(cost) is not int or cost < 1:
            require_cost(cost)
        self._weight(flow)
        evicted: list[tuple[Flow[T], int, T, int]] = []
        while (exceeded := self.exceeded_bound(flow, cost, tier)) is not None:
            victim = self._victim(exceeded, flow, cost, rank_of(tier))
            if victim is None:
                for entry in reversed(evicted):
                    self._restore(*entry)
                self._refused += 1
                return None
            evicted.append((*victim, *self._take_newest(*victim)))
        self._evicted += len(evicted)
        self.push(item, flow, cost, tier)
        self._forget_idle()
        return [newest for _, _, newest, _ in evicted]

    def evict(self, for_tier: Tier = "critical") -> T | None:
        """Remove and return the item to evict first when an item of `for_tier` arrives.

        Its tier is the lowest one in use, not above `for_tier`; the result is None if only higher tiers are in use. It
        is the newest item of the flow with the longest backlog among those with an item in that tier. The first call
        visits every flow; later ones take O(log n).
        """
        victim = self._ranked().longest(rank_of(for_tier))
        if victim is None:
            return None
        item, _ = self._take_newest(*victim)
        self._evicted += 1
        self._forget_idle()
        return item

    def remove(self, flow: Hashable, matches: Callable[[T], bool], *, heads_only: bool = False) -> list[T]:
        """Remove the matching items of `flow`, in order of arrival within each tier. The flow is not charged for them.

        With `heads_only`, each tier is searched only up to the first item that does not match. That takes
        O(removed), and is enough if the oldest items expire first.
        """
        removed: list[T] = []
        state = self._flows.get(flow)
        if state is None:
            return removed
        for rank in range(len(TIERS)):
            for item, cost in state.take_matching(rank, matches, heads_only=heads_only):
                self._departs(state, rank, cost)
                removed.append(item)
        self._removed += len(removed)
        self._forget_idle()
        return removed

    def drain(self) -> list[T]:
        """Remove all items and return them in the order in which they would have been served."""
        removed = [self.pop() for _ in range(len(self))]
        self._removed += len(removed)
        return removed

    def flows(self) -> Iterator[Hashable]:
        """Iterate over the flows that have queued items. The queue must not change meanwhile."""
        return (key for key, flow in self._flows.items() if flow.cost)

    def items(self, flow: Hashable) -> Iterator[T]:
        """Iterate over the items of `flow` in the order they will be served. The queue must not change meanwhile."""
        return iter(self._flows.get(flow, ()))

    def statistics(self) -> FairQueueStatistics:
        """Return the statistics. This visits every flow."""
        return FairQueueStatistics(
            items=len(self),
            cost=sum(flow.cost for flow in self._flows.values()),
            flows=sum(1 for _ in self.flows()),
            remembered_flows=len(self._flows),
            pushed=self._pushed,
            popped=self._departed - self._evicted - self._removed,
            refused=self._refused,
            evicted=self._evicted,
            removed=self._removed,
        )

    def _begin(self, key: Hashable, tier: Tier) -> Flow[T]:
        """Add a flow without history: its first item starts at virtual time."""
        flow: Flow[T] = Flow(key, self._weight_of(key), tier)
        slot = self._declared.get(key)
        if slot is None and self._free_slots:
            slot = self._free_slots.pop()
        elif slot is None:
            slot = len(self._slots)
            self._slots.append(flow)
        self._flows[key] = flow
        self._slots[slot] = flow
        heappush(self._heap, self._passed >> SLOT_BITS << SLOT_BITS | slot)
        return flow

    def _forget(self, slot: int) -> None:
        flow = self._slots[slot]
        del self._flows[flow.key]
        if self._ranking is not None:
            self._ranking.forget(flow)
        if slot >= len(self._declared):
            self._free_slots.append(slot)

    def _forget_first(self) -> None:
        """Drop the idle flow that virtual time has reached. From now on it would start like a new flow."""
        self._passed = heappop(self._heap)
        self._forget(self._passed & SLOT_MASK)

    def _forget_all(self) -> None:
        """Drop all flows. When all are idle, no flow has an advantage to remember."""
        self._flows.clear()
        self._heap.clear()
        del self._slots[len(self._declared) :]
        self._free_slots.clear()
        self._passed = 0
        self._idle = 0
        self._ranking = None

    def _forget_idle(self) -> None:
        """Drop flows whose items left without being served. Virtual time passes them only when an item is served."""
        if self._departed == self._pushed:
            self._forget_all()
        elif self._idle > 64 + len(self._flows) // 2:
            self._idle = 0
            passed = self._passed | SLOT_MASK
            keys = self._heap
            self._heap = [key for key in keys if key > passed or self._slots[key & SLOT_MASK].cost]
            heapify(self._heap)
            for slot in {key & SLOT_MASK for key in keys} - {key & SLOT_MASK for key in self._heap}:
                self._forget(slot)

    def _departs(self, flow: Flow[T], rank: int, cost: int) -> None:
        """Count an item that left without being served."""
        self._departed += 1
        self._idle += not flow.cost
        if self._used is not None:
            self._used.give_back(cost, rank)

    def _take_newest(self, flow: Flow[T], rank: int) -> tuple[T, int]:
        item, cost = flow.take_newest(rank)
        self._departs(flow, rank, cost)
        return item, cost

    def _restore(self, flow: Flow[T], rank: int, item: T, cost: int) -> None:
        """Undo `_take_newest`."""
        flow.put_back(rank, item, cost)
        self._departed -= 1
        if self._used is not None:
            self._used.take(cost, rank)
        if self._ranking is not None:
            self._ranking.grew(flow)

    def _ranked(self) -> FlowRanking[T]:
        if self._ranking is None:
            self._ranking = FlowRanking(self._flows.values())
        return self._ranking

    def _weight(self, key: Hashable) -> float:
        flow = self._flows.get(key)
        return require_weight("weight", self._weight_of(key)) if flow is None else flow.weight

    def _victim(self, exceeded: ExceededBound, key: Hashable, cost: int, rank: int) -> tuple[Flow[T], int] | None:
        """Return the flow and the rank to evict from, to make room for `cost` of the flow `key`."""
        own = self._flows.get(key)
        if exceeded == "flow_full":
            return (own, own.lowest_rank()) if own is not None and own.lowest_rank() > rank else None
        return self._ranked().victim_for(rank, (cost + (0 if own is None else own.cost)) / self._weight(key))
