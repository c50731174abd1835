"""The accounts of the fair queue: no push, eviction, removal or drain loses an item or exceeds a bound."""
# ruff: noqa: SLF001 - these tests read private state

from hypothesis import given, strategies as st

from kpl_core.fairness import FairQueue, QueueBounds
from kpl_core.fairness.flow import SLOT_MASK
from kpl_core.records.user_record import TIERS, Tier

flows = st.sampled_from("abcde")
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["push", "push_evicting"]), flows, st.integers(1, 9), st.sampled_from(TIERS)),
        st.tuples(st.sampled_from(["pop", "evict", "drain"])),
        st.tuples(st.just("remove"), flows, st.booleans()),
    ),
    max_size=80,
)


@given(
    steps,
    st.builds(
        QueueBounds,
        max_flow_items=st.none() | st.integers(1, 8),
        max_flow_cost=st.none() | st.integers(9, 40),
        max_items=st.none() | st.integers(2, 20),
        max_cost=st.none() | st.integers(9, 80),
        critical_share=st.sampled_from([0.0, 0.25, 0.5]),
    ),
)
def test_no_item_is_lost_or_duplicated_and_no_bound_is_exceeded(steps, bounds):  # noqa: C901 - one case for each operation
    weights = dict(zip("abcde", (1, 2, 3, 0.1, 7), strict=True))
    queue: FairQueue[int] = FairQueue(weight_of=lambda flow: weights[str(flow)], bounds=bounds)
    held: dict[int, tuple[str, int, Tier]] = {}
    for number, step in enumerate(steps):
        gone: list[int] = []
        match step:
            case ("push", flow, cost, tier):
                exceeded = queue.exceeded_bound(flow, cost, tier)
                assert queue.push(number, flow, cost, tier) == (exceeded is None)
                if exceeded is None:
                    held[number] = (flow, cost, tier)
            case ("push_evicting", flow, cost, tier):
                evicted = queue.push_evicting(number, flow, cost, tier)
                if evicted is not None:
                    assert all(TIERS.index(held[each][2]) >= TIERS.index(tier) for each in evicted)
                    held[number] = (flow, cost, tier)
                    gone = evicted
            case ("remove", flow, heads_only):
                gone = queue.remove(flow, lambda item: item % 2 == 0, heads_only=heads_only)
                assert all(held[each][0] == flow for each in gone)
            case ("drain",):
                gone = queue.drain()
                assert len(gone) == len(held)
            case ("evict",):
                gone = check_evicted(queue, held, weights)
            case _ if queue:
                gone = [queue.pop()]
        for each in gone:
            del held[each]
        check_books(queue, held, bounds)


def check_evicted(
    queue: FairQueue[int], held: dict[int, tuple[str, int, Tier]], weights: dict[str, float]
) -> list[int]:
    """Evict an item. It must be the newest one, of the lowest tier, of the flow with the longest backlog."""
    item = queue.evict()
    if not held:
        assert item is None
        return []
    lowest = max((tier for _, _, tier in held.values()), key=TIERS.index)
    rivals = {flow for flow, _, tier in held.values() if tier == lowest}
    backlog = {each: sum(cost for flow, cost, _ in held.values() if flow == each) / weights[each] for each in rivals}
    assert item is not None
    owner, _, tier = held[item]
    assert tier == lowest
    assert backlog[owner] == max(backlog.values())
    assert item == max(number for number, (flow, _, its_tier) in held.items() if (flow, its_tier) == (owner, tier))
    return [item]


def check_books(queue: FairQueue[int], held: dict[int, tuple[str, int, Tier]], bounds: QueueBounds) -> None:
    statistics = queue.statistics()
    assert statistics.items == len(queue) == len(held)
    assert bool(queue) == bool(held)
    assert statistics.cost == sum(cost for _, cost, _ in held.values())
    assert statistics.pushed == statistics.popped + statistics.evicted + statistics.removed + statistics.items
    assert set(queue.flows()) == {flow for flow, _, _ in held.values()}
    assert statistics.flows == len(set(queue.flows()))
    for flow in queue.flows():
        own = [number for number, (owner, _, _) in held.items() if owner == flow]
        assert list(queue.items(flow)) == sorted(own, key=lambda number: (TIERS.index(held[number][2]), number))
        if bounds.max_flow_items is not None:
            assert len(own) <= bounds.max_flow_items
        if bounds.max_flow_cost is not None:
            assert sum(held[number][1] for number in own) <= bounds.max_flow_cost or len(own) == 1
    if bounds.max_items is not None:
        assert len(held) <= bounds.max_items
        common = sum(tier != "critical" for _, _, tier in held.values())
        assert common <= bounds.max_items * (1 - bounds.critical_share)
    if bounds.max_cost is not None:
        assert statistics.cost <= bounds.max_cost or len(held) == 1
    # Each known flow has one key in the heap, and is in that key's slot.
    assert len(queue._heap) == len(queue._flows)
    assert {id(queue._slots[key & SLOT_MASK]) for key in queue._heap} == {id(flow) for flow in queue._flows.values()}
    assert len(queue._slots) <= 5
    assert queue._heap == [] or held
