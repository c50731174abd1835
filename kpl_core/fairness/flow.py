"""One flow with its queued items, tier by tier, and the ranking of flows by backlog.

Tags are whole numbers. A float gathers an error with every item (ten times 0.1 is not 1.0), so flows that must tie
would not. One unit of cost at weight 1 is `TAG_UNITS` of virtual time. Every whole weight up to 16, and every tenth
or thousandth of one, divides `TAG_UNITS`, so `cost * step` is exact. For any other weight the remainder of the
division is carried to the flow's next item, and the error never exceeds one unit.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from itertools import count, islice
from typing import Any, Final, Generic, TypeAlias, TypeVar

from sortedcontainers import SortedList

from kpl_core.options.policy import require_weight
from kpl_core.options.validation import Bound, require_number
from kpl_core.records.user_record import TIERS, Tier, rank_of

T = TypeVar("T")

TAG_UNITS: Final = 2**12 * 3**3 * 5**3 * 7 * 11 * 13

# A flow's key in the heap is its tag, with the flow's slot in the lowest bits. Comparing whole numbers costs a third
# of comparing tuples, and ties go to the lowest slot.
SLOT_BITS: Final = 24
SLOT_MASK: Final = 2**SLOT_BITS - 1

_COST: Final = Bound(1, math.inf, "", whole=True)


def require_cost(cost: int) -> None:
    """Check a cost. At a cost of 0 its flow would starve the others.

    Raises:
        ValueError: it is not a whole number above 0.
    """
    require_number("cost", cost, _COST, error=ValueError)


@lru_cache(maxsize=1024, typed=True)
def _virtual_time_per_cost(weight: float) -> tuple[int, int, int]:
    """Return how far one unit of cost moves a tag: numerator, denominator, and the step of the heap key.

    The step is 0 if the division leaves remainders.
    """
    from fractions import Fraction  # noqa: PLC0415 - most producers have no flows

    # A weight of 0.1 means one tenth, not the closest binary fraction.
    speed = TAG_UNITS / Fraction(require_weight("weight", weight)).limit_denominator(1_000_000)
    return speed.numerator, speed.denominator, speed.numerator << SLOT_BITS if speed.denominator == 1 else 0


class Flow(Generic[T]):
    """A flow that has queued items, or whose last finish tag is still ahead of virtual time.

    It has one key in the heap: the start tag of its next item or, while it has none, the finish tag of its last.
    `cost` is the sum over its queued items.

    A tier's queue is a sequence of item, cost, item, cost and so on. A pair object for each item would be one more
    memory access when ten thousand flows are queued.
    """

    __slots__ = (
        "cost",
        "denominator",
        "entries",
        "key",
        "numerator",
        "queues",
        "rank",
        "remainder",
        "step",
        "tier",
        "weight",
    )

    def __init__(self, key: Hashable, weight: float, tier: Tier) -> None:
        self.numerator, self.denominator, self.step = _virtual_time_per_cost(weight)
        self.remainder = 0
        self.key = key
        self.weight = weight
        self.cost = 0
        # One FIFO queue for each tier in use.
        self.queues: list[deque[Any] | None] = [None] * len(TIERS)
        # The queue that is served now. No queue of a higher tier has entries.
        self.tier = tier
        self.rank = rank_of(tier)
        self.entries: deque[Any] = deque()
        self.queues[self.rank] = self.entries

    def advance(self, cost: int) -> int:
        """Return how far the heap key moves for `cost` if the weight leaves remainders."""
        units, self.remainder = divmod(cost * self.numerator + self.remainder, self.denominator)
        return units << SLOT_BITS

    def queue_at(self, rank: int) -> deque[Any]:
        """Return the queue of a tier. Create it if it does not exist."""
        queue = self.queues[rank]
        if queue is None:
            queue = self.queues[rank] = deque()
        return queue

    def queue_of(self, tier: Tier) -> deque[Any]:
        """Return the queue of a tier to append to. Serve it next if its tier is higher than the one served now."""
        rank = rank_of(tier)
        queue = self.queue_at(rank)
        if rank < self.rank:
            self.tier, self.rank, self.entries = tier, rank, queue
        return queue

    def serve_next_tier(self) -> bool:
        """Switch to the highest tier that has entries. Return False if the flow is idle."""
        for rank, queue in enumerate(self.queues):
            if queue:
                self.tier, self.rank, self.entries = TIERS[rank], rank, queue
                return True
        return False

    def lowest_rank(self) -> int:
        """Return the rank of the lowest tier that has entries, or -1 if none has."""
        return max((rank for rank, queue in enumerate(self.queues) if queue), default=-1)

    def take_newest(self, rank: int) -> tuple[T, int]:
        """Remove the newest item of a tier that has entries. Return it with its cost."""
        queue = self.queue_at(rank)
        cost = queue.pop()
        self.cost -= cost
        return queue.pop(), cost

    def put_back(self, rank: int, item: T, cost: int) -> None:
        """Undo `take_newest`."""
        self.queue_at(rank).extend((item, cost))
        self.cost += cost

    def take_matching(self, rank: int, matches: Callable[[T], bool], *, heads_only: bool) -> list[tuple[T, int]]:
        """Remove the matching items of one tier. With `heads_only`, stop at the first that does not match."""
        taken: list[tuple[T, int]] = []
        queue = self.queues[rank]
        if heads_only:
            while queue and matches(queue[0]):
                taken.append((queue.popleft(), queue.popleft()))
        elif queue:
            # Call the predicate for all items before any is moved, so an exception loses no item.
            entries = list(zip(islice(queue, 0, None, 2), islice(queue, 1, None, 2), strict=True))
            verdicts = [matches(item) for item, _ in entries]
            queue.clear()
            for entry, is_match in zip(entries, verdicts, strict=True):
                if is_match:
                    taken.append(entry)
                else:
                    queue.extend(entry)
        self.cost -= sum(cost for _, cost in taken)
        return taken

    def items(self) -> int:
        """Return the number of queued items."""
        first, second, third = self.queues
        return ((len(first) if first else 0) + (len(second) if second else 0) + (len(third) if third else 0)) // 2

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items in the order in which they will be served."""
        for queue in self.queues:
            if queue:
                yield from islice(queue, 0, None, 2)

    def backlog(self) -> float:
        """Return the queued cost divided by the flow's weight."""
        return self.cost / self.weight


_Listing: TypeAlias = tuple[float, int, Flow[T]]


class FlowRanking(Generic[T]):
    """The flow with the longest backlog (queued cost divided by weight) in each tier.

    It is only needed when a queue is full, and costs nothing before: the first lookup ranks all flows at once. After
    that, a flow that grows past its listed backlog is listed again, and a flow that shrank is corrected when it
    comes up first. So no later lookup or push visits all flows.

    Invariant: a flow with entries in a tier is listed there once, under at least its present backlog.
    """

    def __init__(self, flows: Iterable[Flow[T]]) -> None:
        self._serial = count()
        # By tier: the listings (backlog, serial, flow) in order, and the listing of each flow.
        self._listings: list[SortedList[_Listing[T]]] = [SortedList() for _ in TIERS]
        self._listed: list[dict[Flow[T], _Listing[T]]] = [{} for _ in TIERS]
        for flow in flows:
            self.grew(flow)

    def grew(self, flow: Flow[T]) -> None:
        """Update the ranking after an item was queued for `flow`."""
        backlog = flow.backlog()
        for rank, queue in enumerate(flow.queues):
            if queue:
                listing = self._listed[rank].get(flow)
                if listing is None or backlog > listing[0]:
                    self._list(rank, flow, backlog)

    def _list(self, rank: int, flow: Flow[T], backlog: float) -> None:
        """List a flow under this backlog, and no longer under another one."""
        before = self._listed[rank].get(flow)
        if before is not None:
            self._listings[rank].remove(before)
        listing = self._listed[rank][flow] = (backlog, -next(self._serial), flow)
        self._listings[rank].add(listing)

    def forget(self, flow: Flow[T]) -> None:
        """Remove a flow that the queue does not remember any more."""
        for listings, listed in zip(self._listings, self._listed, strict=True):
            listing = listed.pop(flow, None)
            if listing is not None:
                listings.remove(listing)

    def longest(self, highest_rank: int) -> tuple[Flow[T], int] | None:
        """Return the longest flow of the lowest tier in use, and the tier's rank.

        Return None if only tiers above `highest_rank` are in use.
        """
        for rank in range(len(TIERS) - 1, highest_rank - 1, -1):
            flow = self._longest_of(rank)
            if flow is not None:
                return flow, rank
        return None

    def victim_for(self, rank: int, backlog: float) -> tuple[Flow[T], int] | None:
        """Return the flow and rank to evict from when an item of tier `rank` arrives.

        It is the longest flow of a lower tier, else a flow of the same tier that is longer than `backlog`.
        """
        victim = self.longest(rank)
        if victim is None or victim[1] > rank or victim[0].backlog() > backlog:
            return victim
        return None

    def _longest_of(self, rank: int) -> Flow[T] | None:
        listings = self._listings[rank]
        while listings:
            listing: _Listing[T] = listings[-1]
            listed, _, flow = listing
            backlog = flow.backlog()
            if not flow.queues[rank]:
                del self._listed[rank][flow], listings[-1]
            elif backlog < listed:
                self._list(rank, flow, backlog)
            else:
                return flow
        return None
