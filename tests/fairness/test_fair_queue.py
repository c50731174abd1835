"""The fair queue: the order of service, and which flows are remembered and forgotten."""

from collections import Counter

import pytest

from kpl_core.errors import ConfigError
from kpl_core.fairness import FairQueue, FairQueueStatistics


def queue_of(weights: dict[str, float] | None = None) -> FairQueue[str]:
    known = weights or {}
    return FairQueue(weight_of=lambda flow: known.get(str(flow), 1))


def push_all(queue: FairQueue[str], flow: str, count: int, *, cost: int = 1) -> None:
    for number in range(count):
        assert queue.push(f"{flow}{number}", flow, cost)


def pop_all(queue: FairQueue[str]) -> str:
    return " ".join(queue.pop() for _ in range(len(queue)))


def test_a_flow_with_many_items_does_not_delay_a_flow_with_few():
    queue = queue_of()
    push_all(queue, "flood", 10_000)
    queue.push("quiet0", "quiet", 1)

    assert queue.pop() == "flood0"
    assert queue.pop() == "quiet0"


def test_flows_take_turns():
    queue = queue_of()
    push_all(queue, "a", 3)
    push_all(queue, "b", 3)

    assert pop_all(queue) == "a0 b0 a1 b1 a2 b2"


def test_a_flow_is_served_in_order_of_arrival():
    queue = queue_of()
    push_all(queue, "a", 5)

    assert pop_all(queue) == "a0 a1 a2 a3 a4"


def test_flows_share_by_cost_and_not_by_the_number_of_items():
    queue = queue_of()
    push_all(queue, "big", 2, cost=300)
    push_all(queue, "small", 6, cost=100)

    assert pop_all(queue) == "big0 small0 small1 small2 big1 small3 small4 small5"


def test_a_weight_of_three_is_served_three_times_as_much():
    queue = queue_of({"heavy": 3})
    push_all(queue, "heavy", 6)
    push_all(queue, "light", 2)

    assert pop_all(queue) == "heavy0 light0 heavy1 heavy2 heavy3 light1 heavy4 heavy5"


def test_an_idle_flow_earns_no_credit():
    queue = queue_of()
    push_all(queue, "busy", 200)
    for _ in range(100):
        queue.pop()
    push_all(queue, "late", 100)

    assert Counter(queue.pop()[:4] for _ in range(100)) == {"busy": 50, "late": 50}


def test_a_flow_that_leaves_and_comes_back_has_no_advantage():
    queue = queue_of()
    push_all(queue, "busy", 300)
    served: Counter[str] = Counter()
    for turn in range(100):
        # The flow is always empty when it is served and comes back right after, so it never has two items queued.
        queue.push(f"hopper{turn}", "hopper", 1)
        served.update((queue.pop()[0], queue.pop()[0]))

    assert served["h"] <= 101


def test_a_finish_tag_is_kept_while_the_flow_has_no_items():
    queue = queue_of()
    push_all(queue, "b", 10)
    queue.push("a0", "a", 5)
    assert queue.pop() == "b0"
    assert queue.pop() == "a0"

    queue.push("a1", "a", 5)

    assert pop_all(queue) == "b1 b2 b3 b4 b5 a1 b6 b7 b8 b9"


def test_ties_go_to_declared_flows_in_declared_order():
    queue: FairQueue[str] = FairQueue(flows=["x", "y", "z"])
    for flow in ("other", "z", "y", "x"):
        push_all(queue, flow, 2)

    assert pop_all(queue) == "x0 y0 z0 other0 x1 y1 z1 other1"


def test_a_declared_flow_keeps_its_place_when_it_comes_back():
    queue: FairQueue[str] = FairQueue(flows=["x", "y"])
    for _ in range(3):
        push_all(queue, "other", 1)
        push_all(queue, "y", 1)
        push_all(queue, "x", 1)
        assert pop_all(queue) == "x0 y0 other0"


def test_ten_steps_of_one_tenth_add_up_to_one():
    # 0.1 is not a binary fraction: ten floats of it do not add up to 1.0, and the flows would not tie.
    queue: FairQueue[str] = FairQueue(weight_of={"tenth": 0.1, "one": 1}.__getitem__, flows=["tenth", "one"])
    push_all(queue, "tenth", 3)
    push_all(queue, "one", 30)

    turns = [queue.pop() for _ in range(33)]

    assert [turns.index(f"tenth{number}") for number in range(3)] == [0, 11, 22]


def test_an_empty_queue_has_no_next_item():
    queue = queue_of()

    with pytest.raises(IndexError, match="empty"):
        queue.pop()
    assert not queue
    assert len(queue) == 0
    assert queue.drain() == []
    assert queue.evict() is None


def test_len_and_bool_reflect_the_queued_items():
    queue = queue_of()
    push_all(queue, "a", 2)
    push_all(queue, "b", 1)

    lengths = []
    while queue:
        lengths.append(len(queue))
        queue.pop()

    assert lengths == [3, 2, 1]


def test_an_idle_flow_is_forgotten_once_virtual_time_passes_it():
    queue = queue_of()
    push_all(queue, "busy", 1_000)
    for number in range(500):
        queue.push("x", f"visitor-{number}", 1)
        queue.pop()
        queue.pop()

    assert queue.statistics().remembered_flows <= 3


def test_flows_whose_items_expire_are_forgotten_even_if_no_item_is_served():
    queue = queue_of()
    push_all(queue, "stuck", 2)
    queue.pop()
    for number in range(10_000):
        queue.push("x", f"visitor-{number}", 1)
        queue.remove(f"visitor-{number}", lambda _: True)

    assert queue.statistics().remembered_flows <= 200
    assert queue.drain() == ["stuck1"]


def test_a_served_flow_is_remembered_while_others_expire():
    queue = queue_of()
    push_all(queue, "b", 10)
    queue.push("a0", "a", 5)
    assert [queue.pop(), queue.pop()] == ["b0", "a0"]
    for number in range(1_000):
        queue.push("x", f"visitor-{number}", 1)
        queue.remove(f"visitor-{number}", lambda _: True)
    queue.push("a1", "a", 5)

    assert pop_all(queue) == "b1 b2 b3 b4 b5 a1 b6 b7 b8 b9"


def test_an_empty_queue_remembers_no_flow():
    queue = queue_of()
    for number in range(100):
        queue.push("x", number, 10)
    queue.drain()

    assert queue.statistics().remembered_flows == 0


def test_tags_start_at_zero_after_all_flows_were_idle():
    queue = queue_of()
    push_all(queue, "a", 10, cost=10**6)
    pop_all(queue)
    push_all(queue, "a", 2)
    push_all(queue, "b", 2)

    assert pop_all(queue) == "a0 b0 a1 b1"


def test_a_flow_serves_its_higher_tier_first():
    queue = queue_of()
    for tier in ("bulk", "normal", "critical"):
        queue.push(f"{tier}0", "a", 1, tier)
        queue.push(f"{tier}1", "a", 1, tier)

    assert pop_all(queue) == "critical0 critical1 normal0 normal1 bulk0 bulk1"


def test_a_flow_of_only_critical_items_does_not_reduce_the_share_of_others():
    queue = queue_of()
    for number in range(100):
        queue.push(f"liar{number}", "liar", 1, "critical")
    push_all(queue, "honest", 100)

    assert Counter(queue.pop()[:4] for _ in range(100)) == {"liar": 50, "hone": 50}


def test_a_critical_item_is_served_before_the_bulk_of_its_own_flow():
    queue = queue_of()
    for number in range(3):
        queue.push(f"bulk{number}", "a", 1, "bulk")
    assert queue.pop() == "bulk0"
    queue.push("alarm", "a", 1, "critical")
    assert queue.pop() == "alarm"
    queue.push("note", "a", 1, "normal")
    assert pop_all(queue) == "note bulk1 bulk2"


def test_removed_heads_are_not_charged():
    queue = queue_of()
    push_all(queue, "a", 4, cost=100)
    push_all(queue, "b", 4, cost=100)

    assert queue.remove("a", lambda item: item in {"a0", "a1", "a3"}, heads_only=True) == ["a0", "a1"]
    assert pop_all(queue) == "a2 b0 a3 b1 b2 b3"


def test_matching_items_are_removed_from_all_tiers_and_positions():
    queue = queue_of()
    for number in range(6):
        queue.push(f"{number}", "a", 1, "bulk" if number % 3 else "critical")

    assert queue.remove("a", lambda item: int(item) % 2 == 0) == ["0", "2", "4"]
    assert list(queue.items("a")) == ["3", "1", "5"]
    assert pop_all(queue) == "3 1 5"


def test_removing_the_last_item_empties_the_queue():
    queue = queue_of()
    push_all(queue, "a", 3)

    assert queue.remove("a", lambda _: True) == ["a0", "a1", "a2"]
    assert not queue
    assert queue.statistics().removed == 3


def test_a_predicate_that_raises_loses_no_item():
    queue = queue_of()
    push_all(queue, "a", 3)

    def picky(item: str) -> bool:
        if item == "a2":
            raise LookupError
        return True

    with pytest.raises(LookupError):
        queue.remove("a", picky)
    assert list(queue.items("a")) == ["a0", "a1", "a2"]
    assert len(queue) == 3


def test_removing_from_an_unknown_flow_removes_nothing():
    assert queue_of().remove("nobody", lambda _: True) == []


def test_drain_returns_the_items_in_the_order_of_service():
    queue = queue_of({"a": 2})
    push_all(queue, "a", 4)
    push_all(queue, "b", 2)

    assert queue.drain() == ["a0", "b0", "a1", "a2", "b1", "a3"]
    assert not queue
    assert queue.statistics() == FairQueueStatistics(
        items=0, cost=0, flows=0, remembered_flows=0, pushed=6, popped=0, refused=0, evicted=0, removed=6
    )


def test_the_queued_items_of_a_flow_can_be_read():
    queue = queue_of({"a": 2})
    push_all(queue, "a", 3, cost=10)
    queue.push("alarm", "a", 5, "critical")

    assert list(queue.items("a")) == ["alarm", "a0", "a1", "a2"]
    assert queue.statistics().cost == 35
    assert list(queue.items("nobody")) == []


@pytest.mark.parametrize("cost", [0, -1, 1.5, float("nan"), float("inf"), True, "1", None])
def test_a_cost_must_be_a_whole_number_above_zero(cost):
    queue = queue_of()

    with pytest.raises(ValueError, match="cost is"):
        queue.push("x", "a", cost)
    with pytest.raises(ValueError, match="cost is"):
        queue.push_evicting("x", "a", cost)
    assert not queue


@pytest.mark.parametrize("known", [False, True])
def test_an_unknown_tier_is_rejected(known):
    queue = queue_of()
    if known:
        queue.push("a0", "a", 1)

    for act in (
        lambda: queue.push("x", "a", 1, "urgent"),  # type: ignore[arg-type]
        lambda: queue.evict("urgent"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="tier is 'urgent'; it must be one of critical, normal, bulk"):
            act()
    assert len(queue) == known


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), -float("inf"), 1e-7, 1e7, True, "3", None])
def test_a_weight_outside_the_bounds_is_rejected_and_nothing_is_queued(weight):
    queue: FairQueue[str] = FairQueue(weight_of=lambda _: weight)

    with pytest.raises(ConfigError, match="weight is"):
        queue.push("x", "a", 1)
    assert not queue
    assert queue.statistics().flows == 0
