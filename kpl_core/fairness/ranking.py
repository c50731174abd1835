"""Which flow has the longest queue for its weight, tier by tier.

Asked only when a queue is full, so it costs nothing before: the first question ranks
all flows at once. From then on a flow that grows past the backlog it is listed under is
listed again; one that shrank is corrected when it comes up first. So no question and no
push ever looks at all flows, however many there are.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final, Generic, TypeVar

from kpl_core.fairness.flow import Flow
from kpl_core.records.user_record import TIERS

__all__ = ["FlowRanking"]

T = TypeVar("T")

# Listings that outlived their use are dropped when there are this many for each flow.
_LISTINGS_PER_FLOW: Final = 4


class FlowRanking(Generic[T]):
    """Flows by backlog for weight, the longest first; one list for each tier they have entries in.

    Invariant: a flow with entries in a tier is listed there under at least its present backlog.
    """

    __slots__ = ("_listed", "_listings", "_serial")

    def __init__(self, flows: Iterable[Flow[T]]) -> None:
        self._serial = count()
        # The largest backlog each flow is listed under, by tier, and the listings as heaps.
        self._listed: list[dict[Flow[T], float]] = [{} for _ in TIERS]
        self._listings: list[list[tuple[float, int, Flow[T]]]] = [[] for _ in TIERS]
        for flow in flows:
            self.grew(flow)

    def grew(self, flow: Flow[T]) -> None:
        """Take note that something was queued for `flow`."""
        backlog = flow.backlog()
        for rank, queue in enumerate(flow.queues):
            if queue and backlog > self._listed[rank].get(flow, 0.0):
                self._listed[rank][flow] = backlog
                heappush(self._listings[rank], (-backlog, next(self._serial), flow))
                if len(self._listings[rank]) > 64 + _LISTINGS_PER_FLOW * len(self._listed[rank]):
                    self._drop_outlived(rank)

    def longest(self, highest_rank: int) -> tuple[Flow[T], int] | None:
        """Return the longest flow of the lowest tier in use, and that tier's rank, `highest_rank` at least."""
        for rank in range(len(TIERS) - 1, highest_rank - 1, -1):
            flow = self._longest_of(rank)
            if flow is not None:
                return flow, rank
        return None

    def gives_way(self, rank: int, backlog: float) -> tuple[Flow[T], int] | None:
        """Return whose item leaves for one of a tier whose flow has `backlog`: a lower tier's, or a longer flow's."""
        victim = self.longest(rank)
        if victim is None or victim[1] > rank or victim[0].backlog() > backlog:
            return victim
        return None

    def _longest_of(self, rank: int) -> Flow[T] | None:
        listed = self._listed[rank]
        listings = self._listings[rank]
        while listings:
            negative, _, flow = listings[0]
            if listed.get(flow) != -negative:
                heappop(listings)  # listed again since, under more or under less
            elif not flow.queues[rank]:
                heappop(listings)
                del listed[flow]
            elif (backlog := flow.backlog()) < -negative:
                listed[flow] = backlog
                heapreplace(listings, (-backlog, next(self._serial), flow))
            else:
                return flow
        return None

    def _drop_outlived(self, rank: int) -> None:
        listed = {flow: flow.backlog() for flow in self._listed[rank] if flow.queues[rank]}
        self._listed[rank] = listed
        self._listings[rank] = [(-backlog, next(self._serial), flow) for flow, backlog in listed.items()]
        heapify(self._listings[rank])
