"""Flows share one server in proportion to their weights, however much each of them queues.

Start-time fair queuing: Goyal, Vin and Cheng, "Start-time Fair Queuing: A Scheduling
Algorithm for Integrated Services Packet Switching Networks" (SIGCOMM 1996). An item
gets a start tag and a finish tag in *virtual time*; the smallest start tag goes first:

    start  = max(virtual time, finish tag of the flow's item before)
    finish = start + cost / weight

Virtual time is the start tag of the item last served, so an idle flow earns no credit.
What follows, for flows that have something queued all the while:

    share     any two flows' served cost / weight differ by at most one item of each
    waiting   a flow is served again after at most `ceil(weight of the other / its own weight)`
              items of every other flow, if all items cost the same: sum(weights) / weight
              items, plus what it takes that items are not divisible

Where the setting differs from the paper's link:

* An item is a user record or a chunk, its cost usually bytes, and the server is whoever
  calls `pop`: nothing is known of its speed. The algorithm does not need it.
* Tags are whole numbers, see `flow.py`.
* Only a flow's first item needs its tag, so each flow has one place in the heap, whatever
  it has queued, and keeps it when its queue runs empty: under its last finish tag, until
  virtual time passes there. A push to a flow known this way touches no heap.
* A flow's items may be of three tiers. Within the flow the higher tier goes first, so a
  flow that mislabels its items harms itself alone; when room runs out the lowest tier
  goes first, and within it the flow with the longest queue for its weight.
* An item may leave without being served (expired, rerouted, evicted): it is not charged.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

from kpl_core.fairness.bounds import QueueBounds, Refusal, Room
from kpl_core.fairness.flow import SLOT_BITS, SLOT_MASK, Flow, rank_of, require_cost
from kpl_core.fairness.ranking import FlowRanking
from kpl_core.fairness.statistics import FairQueueStatistics, FlowBacklog
from kpl_core.options.policy import require_weight
from kpl_core.records.user_record import TIERS, Tier

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of many flows; `push` and `pop` take O(log n) for n flows.

    Forgets a flow as soon as it can have no influence any more, at the latest when the whole
    queue is empty. Reads no clock. Not thread-safe.

    Args:
        weight_of: the weight of a flow, a number between 1e-6 and 1e6; asked once each time
            the flow becomes active. By default every flow weighs 1.
        flows: flows that win ties against all others, and among them in this order.
            Other ties go to the flow whose place in the queue was free first.
        bounds: the most it holds; without them it grows as long as it is pushed to.
    """

    __slots__ = (
        "_declared", "_departed", "_evicted", "_flows", "_free_slots", "_heap", "_idle", "_passed",
        "_pushed", "_ranking", "_refused", "_removed", "_room", "_slots", "_weight_of",
    )  # fmt: skip

    def __init__(
        self,
        *,
        weight_of: Callable[[Any], float] = lambda _flow: 1,
        flows: Iterable[Hashable] = (),
        bounds: QueueBounds | None = None,
    ) -> None:
        self._weight_of = weight_of
        self._room = None if bounds is None else Room(bounds)
        self._declared = {flow: slot for slot, flow in enumerate(flows)}
        # Invariant: each flow in `_flows` has one key in the heap, and stands in that key's slot;
        # there is none while nothing is queued. A slot that no key names is free, whoever stands in it.
        self._flows: dict[Hashable, Flow[T]] = {}
        self._heap: list[int] = []
        self._slots: list[Flow[T]] = [Flow(None, 1, "normal")] * len(self._declared)
        self._free_slots: list[int] = []
        # The heap key that virtual time has come to; its slot bits mean nothing.
        self._passed = 0
        # How often a flow's last item left without being served, since that was looked into.
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
        """Queue `item` behind the others of its flow and tier; False if a bound refuses it.

        Raises:
            ValueError: a cost that is no whole number above 0, or an unknown tier.
            ConfigError: `weight_of(flow)` is out of range.
        """
        if type(cost) is not int or cost < 1:
            require_cost(cost)
        state = self._flows.get(flow)
        room = self._room
        rank = 0
        if room is not None:
            rank = state.rank if state is not None and state.tier == tier else rank_of(tier)
            held_items, held_cost = (0, 0) if state is None else (state.items(), state.cost)
            if room.refusal(1, cost, rank, held_items, held_cost) is not None:
                self._refused += 1
                return False
        if state is None:
            state = self._begin(flow, tier)
        entries = state.entries if state.tier == tier else state.queue_of(tier)
        entries.append(item)
        entries.append(cost)
        state.cost += cost
        self._pushed += 1
        if room is not None:
            room.take(cost, rank)
        if self._ranking is not None:
            self._ranking.grew(state)
        return True

    def pop(self) -> T:
        """Remove and return the item whose turn it is.

        Raises:
            IndexError: nothing is queued.
        """
        heap = self._heap
        while heap:
            key = heap[0]
            flow = self._slots[key & SLOT_MASK]
            entries = flow.entries
            if not entries:
                if flow.serves_on():
                    entries = flow.entries
                else:
                    self._forget_first()
                    continue
            item: T = entries.popleft()
            cost: int = entries.popleft()
            # Served: virtual time is here, and the flow's next item starts where this one finishes.
            self._passed = key
            heapreplace(heap, key + (cost * flow.step or flow.advance(cost)))
            flow.cost -= cost
            self._departed += 1
            if self._room is not None:
                self._room.give_back(cost, flow.rank)
            if self._departed == self._pushed:
                self._forget_all()
            return item
        message = "pop from an empty FairQueue"
        raise IndexError(message)

    def peek(self) -> T:
        """Return the item whose turn it is; `pop` returns the same if nothing happens in between.

        Raises:
            IndexError: nothing is queued.
        """
        head: T = self._turn().entries[0]
        return head

    def next_flow(self) -> Hashable:
        """Return the flow of the item whose turn it is.

        Raises:
            IndexError: nothing is queued.
        """
        return self._turn().key

    def refusal(self, flow: Hashable, cost: int, tier: Tier = "normal", *, items: int = 1) -> Refusal | None:
        """Say which bound would refuse `items` of `flow`, of `cost` together; None: there is room."""
        if self._room is None:
            return None
        state = self._flows.get(flow)
        if state is None:
            return self._room.refusal(items, cost, rank_of(tier), 0, 0)
        return self._room.refusal(items, cost, rank_of(tier), state.items(), state.cost)

    def push_evicting(self, item: T, flow: Hashable, cost: int, tier: Tier = "normal") -> list[T] | None:
        """Queue `item`, evicting what must go first; return the evicted, or None if `item` itself is refused.

        Who goes first: in a full flow, its own lower tiers. In a full queue, the lowest tier,
        and in the item's own tier the flow with the longest queue for its weight; if that is
        the item's flow, the item is refused. The newest goes before the older. A refusal
        changes nothing.

        Raises:
            ValueError, ConfigError: as `push`.
        """
        require_cost(cost)
        self._weight(flow)
        evicted: list[tuple[Flow[T], int, T, int]] = []
        while (refusal := self.refusal(flow, cost, tier)) is not None:
            victim = self._victim(refusal, flow, cost, rank_of(tier))
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

    def longest_flow(self, for_tier: Tier = "critical") -> FlowBacklog | None:
        """Return the flow that gives way first to an item of `for_tier`, and in which tier.

        The tier is the lowest that has anything queued, `for_tier` at best; the flow is the
        one with the longest queue for its weight that has something in that tier. None: only
        higher tiers have anything queued. The first question looks at every flow, later ones
        take O(log n).
        """
        victim = self._ranked().longest(rank_of(for_tier))
        if victim is None:
            return None
        flow, rank = victim
        return FlowBacklog(flow.key, TIERS[rank], flow.weight, flow.items(), flow.cost)

    def evict(self, for_tier: Tier = "critical") -> T | None:
        """Remove and return the newest item, in that tier, of the flow that `longest_flow(for_tier)` names."""
        victim = self._ranked().longest(rank_of(for_tier))
        if victim is None:
            return None
        item, _ = self._take_newest(*victim)
        self._evicted += 1
        self._forget_idle()
        return item

    def remove(self, flow: Hashable, matches: Callable[[T], bool], *, heads_only: bool = False) -> list[T]:
        """Take out the items of `flow` that match, in order of arrival within each tier; they are not charged.

        `heads_only` looks no further than the first that does not match in each tier: enough,
        and O(removed), where the oldest expire first.
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
        """Take out everything, in the order in which it would have been served."""
        removed = [self.pop() for _ in range(len(self))]
        self._removed += len(removed)
        return removed

    def flows(self) -> Iterator[Hashable]:
        """Iterate over the flows that have something queued; the queue must not change meanwhile."""
        return (key for key, flow in self._flows.items() if flow.cost)

    def items(self, flow: Hashable) -> Iterator[T]:
        """Iterate over what `flow` has queued, in the order of its turns; the queue must not change meanwhile."""
        return iter(self._flows.get(flow, ()))

    def backlog(self, flow: Hashable) -> FlowBacklog:
        """Return what `flow` has queued in all tiers."""
        state = self._flows.get(flow)
        if state is None:
            return FlowBacklog(flow, None, self._weight(flow), 0, 0)
        return FlowBacklog(flow, None, state.weight, state.items(), state.cost)

    def reweigh(self) -> None:
        """Ask `weight_of` again for every flow, because weights changed. Tags already given stay.

        Raises:
            ConfigError: a weight is out of range; flows asked before it have their new one.
        """
        self._ranking = None
        for key, flow in self._flows.items():
            flow.reweigh(self._weight_of(key))

    def statistics(self) -> FairQueueStatistics:
        """Count; takes a look at every flow."""
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
        """Let a flow in at virtual time: it has no past."""
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
        del self._flows[self._slots[slot].key]
        if slot >= len(self._declared):
            self._free_slots.append(slot)

    def _forget_first(self) -> None:
        """Drop the idle flow that virtual time has come to: from here on it would start like a new one."""
        self._passed = heappop(self._heap)
        self._forget(self._passed & SLOT_MASK)

    def _forget_all(self) -> None:
        """Everybody is idle, and nobody has an advantage to remember."""
        self._flows.clear()
        self._heap.clear()
        del self._slots[len(self._declared) :]
        self._free_slots.clear()
        self._passed = 0
        self._idle = 0
        self._ranking = None

    def _forget_idle(self) -> None:
        """Drop flows whose items left without being served; while nothing is, virtual time would never pass them."""
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

    def _turn(self) -> Flow[T]:
        while self._heap:
            flow = self._slots[self._heap[0] & SLOT_MASK]
            if flow.entries or flow.serves_on():
                return flow
            self._forget_first()
        message = "nothing is queued; ask `if queue` before"
        raise IndexError(message)

    def _departs(self, flow: Flow[T], rank: int, cost: int) -> None:
        """Count an item that left without being served."""
        self._departed += 1
        self._idle += not flow.cost
        if self._room is not None:
            self._room.give_back(cost, rank)

    def _take_newest(self, flow: Flow[T], rank: int) -> tuple[T, int]:
        item, cost = flow.take_newest(rank)
        self._departs(flow, rank, cost)
        return item, cost

    def _restore(self, flow: Flow[T], rank: int, item: T, cost: int) -> None:
        """Undo `_take_newest`."""
        flow.put_back(rank, item, cost)
        self._departed -= 1
        if self._room is not None:
            self._room.take(cost, rank)
        if self._ranking is not None:
            self._ranking.grew(flow)

    def _ranked(self) -> FlowRanking[T]:
        if self._ranking is None:
            self._ranking = FlowRanking(self._flows.values())
        return self._ranking

    def _weight(self, key: Hashable) -> float:
        flow = self._flows.get(key)
        return require_weight("weight", self._weight_of(key)) if flow is None else flow.weight

    def _victim(self, refusal: Refusal, key: Hashable, cost: int, rank: int) -> tuple[Flow[T], int] | None:
        """Return the flow, and the rank of its tier, that gives way to `cost` of the flow `key`."""
        own = self._flows.get(key)
        if refusal == "flow_full":
            return (own, own.lowest_rank()) if own is not None and own.lowest_rank() > rank else None
        return self._ranked().gives_way(rank, (cost + (0 if own is None else own.cost)) / self._weight(key))
