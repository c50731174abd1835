"""One flow: what it has queued, tier by tier, and how fast its virtual time runs.

Tags are whole numbers. A float would gather an error with every item (ten times 0.1 is
not 1.0), and flows that must tie would not. One unit of cost at weight 1 is `TAG_UNITS`
of virtual time. Every whole weight up to 16, and every tenth or thousandth of one, divides
it, so that `cost * step` is exact; for any other weight the remainder of the division is
carried to the flow's next item, and the error never exceeds one unit.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from kpl_core.options.policy import require_weight
from kpl_core.records.user_record import TIERS, Tier

__all__ = ["SLOT_BITS", "SLOT_MASK", "Flow", "rank_of", "require_cost"]

T = TypeVar("T")

TAG_UNITS: Final = 2**12 * 3**3 * 5**3 * 7 * 11 * 13

# A flow's key in the heap is its tag with the flow's slot in the lowest bits: comparing whole
# numbers costs a third of comparing tuples, and ties go to the lowest slot.
SLOT_BITS: Final = 24
SLOT_MASK: Final = 2**SLOT_BITS - 1

# 0 is served first and given up last.
_RANKS: Final[dict[Tier, int]] = {tier: rank for rank, tier in enumerate(TIERS)}


def rank_of(tier: Tier) -> int:
    """Return the place of a tier among the tiers, 0 for the one that goes first.

    Raises:
        ValueError: there is no such tier.
    """
    rank = _RANKS.get(tier)
    if rank is None:
        message = f"tier is {tier!r}; it must be one of {', '.join(TIERS)}"
        raise ValueError(message)
    return rank


def require_cost(cost: int) -> None:
    """Check a cost.

    Raises:
        ValueError: it is no whole number above 0.
    """
    if type(cost) is not int or cost < 1:
        message = f"cost is {cost!r}; it must be a whole number above 0, or its flow would starve the others"
        raise ValueError(message)


@lru_cache(maxsize=1024, typed=True)
def _virtual_time_per_cost(weight: float) -> tuple[int, int, int]:
    """Return how far one unit of cost moves a tag: numerator, denominator, and as a step of the heap key.

    The step is 0 where the division leaves remainders.
    """
    # A weight written 0.1 means one tenth, not the binary fraction next to it.
    speed = TAG_UNITS / Fraction(require_weight("weight", weight)).limit_denominator(1_000_000)
    return speed.numerator, speed.denominator, speed.numerator << SLOT_BITS if speed.denominator == 1 else 0


class Flow(Generic[T]):
    """A flow that has something queued, or whose last finish tag is still ahead of virtual time.

    It has one key in the heap: the start tag of its next item and, while it has none, the
    finish tag of its last. `cost` is the sum of what it has queued.

    A tier's queue holds an item, its cost, the next item, its cost, and so on: a pair object
    for each would be one more place to fetch from memory when ten thousand flows are queued.
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
        # One queue for each tier in use, first come, first served.
        self.queues: list[deque[Any] | None] = [None] * len(TIERS)
        # The queue served now: no queue of a higher tier has entries.
        self.tier = tier
        self.rank = rank_of(tier)
        self.entries: deque[Any] = deque()
        self.queues[self.rank] = self.entries

    def reweigh(self, weight: float) -> None:
        """Run at another weight from the next item on."""
        self.numerator, self.denominator, self.step = _virtual_time_per_cost(weight)
        self.weight = weight
        self.remainder = 0

    def advance(self, cost: int) -> int:
        """Return how far the heap key moves for `cost`, in the general case of a weight that leaves remainders."""
        units, self.remainder = divmod(cost * self.numerator + self.remainder, self.denominator)
        return units << SLOT_BITS

    def queue_at(self, rank: int) -> deque[Any]:
        """Return the queue of a tier, made if need be."""
        queue = self.queues[rank]
        if queue is None:
            queue = self.queues[rank] = deque()
        return queue

    def queue_of(self, tier: Tier) -> deque[Any]:
        """Return the queue of a tier to append to, and serve it next if it outranks the one served now."""
        rank = rank_of(tier)
        queue = self.queue_at(rank)
        if rank < self.rank:
            self.tier, self.rank, self.entries = tier, rank, queue
        return queue

    def serves_on(self) -> bool:
        """Go on to the highest tier that has entries; False: the flow is idle."""
        for rank, queue in enumerate(self.queues):
            if queue:
                self.tier, self.rank, self.entries = TIERS[rank], rank, queue
                return True
        return False

    def lowest_rank(self) -> int:
        """Return the rank of the lowest tier that has entries; -1 if none has."""
        return max((rank for rank, queue in enumerate(self.queues) if queue), default=-1)

    def take_newest(self, rank: int) -> tuple[T, int]:
        """Take out what came last in a tier that has entries: the item and its cost."""
        queue = self.queue_at(rank)
        cost = queue.pop()
        self.cost -= cost
        return queue.pop(), cost

    def put_back(self, rank: int, item: T, cost: int) -> None:
        """Undo `take_newest`."""
        self.queue_at(rank).extend((item, cost))
        self.cost += cost

    def take_matching(self, rank: int, matches: Callable[[T], bool], *, heads_only: bool) -> list[tuple[T, int]]:
        """Take out the items of one tier that match; with `heads_only`, those before the first that does not."""
        taken: list[tuple[T, int]] = []
        queue = self.queues[rank]
        if heads_only:
            while queue and matches(queue[0]):
                taken.append((queue.popleft(), queue.popleft()))
        elif queue:
            # Asked of all before any is moved: a predicate that raises must lose nothing.
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
        """Return how many items are queued."""
        first, second, third = self.queues
        return ((len(first) if first else 0) + (len(second) if second else 0) + (len(third) if third else 0)) // 2

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items in the order of their turns."""
        for queue in self.queues:
            if queue:
                yield from islice(queue, 0, None, 2)

    def backlog(self) -> float:
        """Return the queued cost for the flow's weight."""
        return self.cost / self.weight
