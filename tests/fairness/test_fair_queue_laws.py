"""The laws of fair queuing. Each must hold for the queue, and fail for a queue that is broken on purpose.

A law takes the class that it tests. `PaperFairQueue` and `max_min_shares` are independent references (oracles.py).
"""

import math
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from typing import Any

import pytest
from hypothesis import Phase, Verbosity, given, settings, strategies as st

from kpl_core.fairness import FairQueue, QueueBounds, flow as flow_module, queue as queue_module
from tests.support.oracles import PaperFairQueue, max_min_shares, mutant_of

MAX_COST = 50
QueueClass = Callable[..., FairQueue[Any]]
Law = Callable[[QueueClass], None]

whole_weights = st.integers(1, 12)
# Many weights that leave remainders, and multiples of each other, so that flows must tie.
odd_weights = st.sampled_from([1, 2, 17, 34, 51, 19, 38, 23, 0.1, 0.25, 1.7, 1.9]) | st.integers(1, 1000)
costs = st.integers(1, MAX_COST)


def named(weights: Sequence[float]) -> dict[str, float]:
    return {f"flow-{number}": weight for number, weight in enumerate(weights)}


def make(queue_class: QueueClass, weights: dict[str, float], **options: Any) -> FairQueue[Any]:
    return queue_class(weight_of=weights.__getitem__, flows=weights, **options)


def law_the_order_is_the_papers(queue_class: QueueClass) -> None:
    @given(
        st.lists(whole_weights | st.sampled_from([0.1, 0.5, 2.5]), min_size=1, max_size=5).map(named),
        st.lists(st.tuples(st.integers(0, 4), costs) | st.none(), min_size=40, max_size=120),
    )
    def law(weights: dict[str, float], steps: list[tuple[int, int] | None]) -> None:
        queue, paper = make(queue_class, weights), PaperFairQueue(weights)
        flows = list(weights)
        # The load is never served completely: the first flow always waits, the others come and go.
        for number in range(10):
            queue.push(-number, flows[0], MAX_COST)
            paper.push(-number, flows[0], MAX_COST)
        for number, step in enumerate(steps):
            if step is not None:
                flow = flows[step[0] % len(flows)]
                queue.push(number, flow, step[1])
                paper.push(number, flow, step[1])
            elif queue:
                assert queue.pop() == paper.pop()
        while queue:
            assert queue.pop() == paper.pop()

    law()


def law_backlogged_flows_follow_the_smallest_emitted_for_weight(queue_class: QueueClass) -> None:
    @given(st.lists(odd_weights, min_size=1, max_size=6).map(named))
    def law(weights: dict[str, float]) -> None:
        queue, paper = make(queue_class, weights), PaperFairQueue(weights)
        for flow in weights:
            for _ in range(60):
                queue.push(flow, flow, 1)
                paper.push(flow, flow, 1)
        assert [queue.pop() for _ in range(60)] == [paper.pop() for _ in range(60)]

    law()


def law_a_backlogged_flow_is_served_again_soon(queue_class: QueueClass) -> None:
    @given(st.lists(whole_weights, min_size=2, max_size=6).map(named), st.integers(1, MAX_COST))
    def equal_items(weights: dict[str, float], cost: int) -> None:
        queue = make(queue_class, weights)
        for flow in weights:
            for _ in range(100):
                queue.push(flow, flow, cost)
        served = [queue.pop() for _ in range(100)]
        for flow, weight in weights.items():
            patience = sum(math.ceil(other / weight) for other in weights.values())
            if all(other % weight == 0 for other in weights.values()):
                assert patience == sum(weights.values()) / weight
            waits = gaps(served, flow)
            assert max(waits) <= patience

    @given(st.lists(st.tuples(whole_weights, st.lists(costs, min_size=30, max_size=30)), min_size=2, max_size=5))
    def any_items(flows: list[tuple[int, list[int]]]) -> None:
        weights = named([weight for weight, _ in flows])
        queue = make(queue_class, weights)
        for flow, (_, own_costs) in zip(weights, flows, strict=True):
            for cost in own_costs:
                queue.push((flow, cost), flow, cost)
        waited = dict.fromkeys(weights, 0)
        allowed = dict.fromkeys(weights, len(weights) * MAX_COST)
        while set(queue.flows()) == set(weights):
            flow, cost = queue.pop()
            assert waited[flow] <= allowed[flow]
            waited = {other: 0 if other == flow else waited[other] + cost for other in weights}
            # How much the others may be served meanwhile: their share of this item's time, and one item each.
            allowed[flow] = sum(weights[other] * cost / weights[flow] + MAX_COST for other in weights if other != flow)

    equal_items()
    any_items()


def gaps(served: list[str], flow: str) -> list[int]:
    turns = [-1, *(turn for turn, each in enumerate(served) if each == flow), len(served)]
    return [later - earlier for earlier, later in pairwise(turns)]


def law_backlogged_flows_share_by_weight(queue_class: QueueClass) -> None:
    @settings(max_examples=20)
    @given(st.lists(st.integers(1, 10), min_size=2, max_size=5).map(named), st.integers(5_000, 6_000))
    def law(weights: dict[str, float], prefix: int) -> None:
        queue = make(queue_class, weights)
        served = dict.fromkeys(weights, 0)
        for flow in [*weights] * 2:
            queue.push(flow, flow, 1)
        for _ in range(prefix):
            flow = queue.pop()
            served[flow] += 1
            queue.push(flow, flow, 1)
        for flow, weight in weights.items():
            assert abs(served[flow] / prefix - weight / sum(weights.values())) <= 0.002

    law()


def law_no_flow_gets_ahead_by_more_than_an_item(queue_class: QueueClass) -> None:
    @given(
        st.lists(st.tuples(odd_weights, st.lists(costs, min_size=25, max_size=25)), min_size=2, max_size=5),
        st.integers(0, 60),
    )
    def law(flows: list[tuple[float, list[int]]], head_start: int) -> None:
        """Theorem 1 of the paper: over any interval in which both are backlogged."""
        weights = named([weight for weight, _ in flows])
        first, *others = weights
        queue = make(queue_class, weights)
        for number in range(head_start + 25):
            queue.push((first, flows[0][1][number % 25]), first, flows[0][1][number % 25])
        for _ in range(head_start):
            queue.pop()
        for flow, (_, own_costs) in zip(others, flows[1:], strict=True):
            for cost in own_costs:
                queue.push((flow, cost), flow, cost)
        served = dict.fromkeys(weights, 0)
        while set(queue.flows()) == set(weights):
            flow, cost = queue.pop()
            served[flow] += cost
            for one in weights:
                for other in weights:
                    ahead = served[one] / weights[one] - served[other] / weights[other]
                    assert ahead <= MAX_COST / weights[one] + MAX_COST / weights[other] + 1e-6

    law()


def law_what_is_served_is_max_min_fair(queue_class: QueueClass) -> None:
    loads = st.tuples(whole_weights, st.lists(costs, min_size=1, max_size=4), st.integers(0, 60))

    @given(st.lists(loads, min_size=1, max_size=8), st.integers(0, 5_000))
    def law(flows: list[tuple[int, list[int], int]], capacity: int) -> None:
        weights = named([weight for weight, _, _ in flows])
        queue = make(queue_class, weights)
        demands = dict.fromkeys(weights, 0)
        for flow, (_, own_costs, items) in zip(weights, flows, strict=True):
            for cost in islice(cycle(own_costs), items):
                queue.push((flow, cost), flow, cost)
                demands[flow] += cost
        served = dict.fromkeys(weights, 0)
        while queue and sum(served.values()) < capacity:
            flow, cost = queue.pop()
            served[flow] += cost
        shares = max_min_shares(demands, weights, sum(served.values()))
        # The flows that want more than their share. Each flow may be ahead of virtual time by one of its items, and
        # the other flows get less for it, in proportion to their weights.
        competing = sum(weight for flow, weight in weights.items() if shares[flow] < demands[flow])
        for flow, weight in weights.items():
            behind = len(weights) * weight / competing if competing else 0
            assert served[flow] <= shares[flow] + MAX_COST
            assert served[flow] >= shares[flow] - (1 + behind) * MAX_COST

    law()


def law_offered_rates_are_served_max_min_fair(queue_class: QueueClass) -> None:
    loads = st.tuples(whole_weights, st.integers(1, 20), costs)
    seconds = 50

    @given(st.lists(loads, min_size=1, max_size=6), st.integers(20, 400))
    def law(flows: list[tuple[int, int, int]], capacity_per_second: int) -> None:
        """Each flow offers items of one size at a steady rate. The server serves one second's worth."""
        weights = named([weight for weight, _, _ in flows])
        queue = make(queue_class, weights)
        offered = dict.fromkeys(weights, 0)
        served = dict.fromkeys(weights, 0)
        room = 0
        for _ in range(seconds):
            for flow, (_, per_second, cost) in zip(weights, flows, strict=True):
                for _ in range(per_second):
                    queue.push((flow, cost), flow, cost)
                    offered[flow] += cost
            room += capacity_per_second
            while queue and room > 0:
                flow, cost = queue.pop()
                served[flow] += cost
                room -= cost
            room = min(room, 0)
        rates = {flow: offered[flow] // seconds for flow in weights}
        shares = max_min_shares(rates, weights, capacity_per_second)
        for flow, (_, _, cost) in zip(weights, flows, strict=True):
            slack = cost + len(weights) * MAX_COST
            assert abs(served[flow] - shares[flow] * seconds) <= slack + rates[flow]

    law()


def law_bounds_hold_and_room_is_never_refused(queue_class: QueueClass) -> None:
    @given(
        st.lists(st.none() | st.tuples(st.sampled_from("abc"), costs), max_size=80),
        st.integers(1, 5),
        st.integers(1, 12),
    )
    def law(steps: list[tuple[str, int] | None], flow_bound: int, total_bound: int) -> None:
        bounds = QueueBounds(max_flow_items=flow_bound, max_items=total_bound)
        queue = queue_class(bounds=bounds)
        held = {"a": 0, "b": 0, "c": 0}
        for step in steps:
            if step is None:
                if queue:
                    held[queue.pop()] -= 1
                continue
            has_room = held[step[0]] < flow_bound and sum(held.values()) < total_bound
            assert queue.push(step[0], step[0], step[1]) == has_room
            held[step[0]] += has_room
            assert held[step[0]] <= flow_bound
            assert len(queue) == sum(held.values()) <= total_bound

    law()


LAWS: list[Law] = [
    law_the_order_is_the_papers,
    law_backlogged_flows_follow_the_smallest_emitted_for_weight,
    law_a_backlogged_flow_is_served_again_soon,
    law_backlogged_flows_share_by_weight,
    law_no_flow_gets_ahead_by_more_than_an_item,
    law_what_is_served_is_max_min_fair,
    law_offered_rates_are_served_max_min_fair,
    law_bounds_hold_and_room_is_never_refused,
]


@pytest.mark.parametrize("law", LAWS)
def test_the_law_holds(law):
    law(FairQueue)


def broken_queue(*replacements: tuple[str, str], **names: Any) -> QueueClass:
    queue_class: QueueClass = mutant_of(queue_module, *replacements, **names).FairQueue
    return queue_class


def broken_flow(*replacements: tuple[str, str]) -> QueueClass:
    return broken_queue(Flow=mutant_of(flow_module, *replacements).Flow)


START_AT_VIRTUAL_TIME = "self._passed >> SLOT_BITS << SLOT_BITS | slot"
SERVED = "heapreplace(heap, key + (cost * flow.step or flow.advance(cost)))"

BREAKS: list[tuple[str, Law, Callable[[], QueueClass]]] = [
    (
        "an idle flow earns credit",
        law_the_order_is_the_papers,
        lambda: broken_queue((START_AT_VIRTUAL_TIME, "slot")),
    ),
    (
        "an idle flow earns credit, seen from the others",
        law_no_flow_gets_ahead_by_more_than_an_item,
        lambda: broken_queue((START_AT_VIRTUAL_TIME, "slot")),
    ),
    (
        "a flow that goes idle is not charged for its last item",
        law_the_order_is_the_papers,
        lambda: broken_queue((SERVED, "heapreplace(heap, key + (cost * flow.step) if flow.cost > cost else key)")),
    ),
    (
        "remainders are dropped",
        law_backlogged_flows_follow_the_smallest_emitted_for_weight,
        lambda: broken_flow(
            (
                "divmod(cost * self.numerator + self.remainder, self.denominator)",
                "(cost * self.numerator // self.denominator, 0)",
            )
        ),
    ),
    (
        "the first flow is served as long as it has anything",
        law_a_backlogged_flow_is_served_again_soon,
        lambda: broken_queue((SERVED, "heapreplace(heap, key)")),
    ),
    (
        "a weight counts double",
        law_backlogged_flows_share_by_weight,
        lambda: broken_queue(("Flow(key, self._weight_of(key), tier)", "Flow(key, self._weight_of(key) ** 2, tier)")),
    ),
    (
        "every item costs one",
        law_no_flow_gets_ahead_by_more_than_an_item,
        lambda: broken_queue((SERVED, "heapreplace(heap, key + (flow.step or flow.advance(1)))")),
    ),
    (
        "all flows weigh the same",
        law_what_is_served_is_max_min_fair,
        lambda: broken_queue(("Flow(key, self._weight_of(key), tier)", "Flow(key, 1, tier)")),
    ),
    (
        "a flow that comes back is served at once",
        law_offered_rates_are_served_max_min_fair,
        lambda: broken_queue((SERVED, "heapreplace(heap, key + flow.step)")),
    ),
    (
        "bounds are off by one",
        law_bounds_hold_and_room_is_never_refused,
        lambda: broken_queue(
            (
                "used.exceeded_bound(1, cost, rank, flow_items, flow_cost)",
                "used.exceeded_bound(0, cost, rank, flow_items, flow_cost)",
            )
        ),
    ),
]


@pytest.mark.parametrize(("law", "break_it"), [pytest.param(law, break_it, id=name) for name, law, break_it in BREAKS])
def test_a_law_fails_on_a_broken_queue(law, break_it):
    broken = break_it()
    # The same examples each time, so the result is the same in every run.
    profile = settings(
        phases=[Phase.generate],
        max_examples=400,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    settings.register_profile("breaking", profile)
    before = settings.get_current_profile_name()
    settings.load_profile("breaking")
    try:
        with pytest.raises(AssertionError):
            law(broken)
    finally:
        settings.load_profile(before)


def test_every_law_has_a_broken_case():
    assert {law for _, law, _ in BREAKS} == set(LAWS)
