"""A full fair queue: which items are rejected, which are evicted, and in which order."""
# ruff: noqa: SLF001 - these tests read private state

import pytest

from kpl_core.errors import ConfigError
from kpl_core.fairness import FairQueue, QueueBounds
from kpl_core.records.user_record import Tier


def push_all(queue: FairQueue[str], flow: str, count: int, tier: Tier = "normal", *, cost: int = 1) -> list[bool]:
    return [queue.push(f"{flow}{number}", flow, cost, tier) for number in range(count)]


def test_a_flow_cannot_exceed_its_bound_on_items():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_flow_items=2))

    assert push_all(queue, "a", 3) == [True, True, False]
    assert push_all(queue, "b", 1) == [True]
    assert queue.exceeded_bound("a", 1) == "flow_full"
    assert queue.pop() == "a0"
    assert queue.exceeded_bound("a", 1) is None


def test_the_ranking_forgets_the_flows_that_the_queue_forgets():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_items=100))
    push_all(queue, "long", 100)
    # The queue was full once, so it has a ranking.
    assert queue.push_evicting("critical", "c", 1, "critical") == ["long99"]
    for number in range(5_000):
        queue.pop()
        push_all(queue, f"short{number}", 1)
        queue.remove(f"short{number}", lambda _: True)
        push_all(queue, "long", 1)
    assert queue._ranking is not None
    assert sum(map(len, queue._ranking._listed)) == sum(map(len, queue._ranking._listings)) < 200


def test_a_flow_cannot_exceed_its_bound_on_cost():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_flow_cost=100))

    assert push_all(queue, "a", 3, cost=50) == [True, True, False]
    assert queue.exceeded_bound("a", 1) == "flow_full"
    assert queue.exceeded_bound("b", 100) is None


def test_all_flows_together_cannot_exceed_the_bound_of_the_queue():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_items=3, max_cost=10))

    assert push_all(queue, "a", 2, cost=3) == [True, True]
    assert queue.exceeded_bound("b", 5) == "queue_full"
    assert push_all(queue, "b", 2, cost=1) == [True, False]
    assert queue.exceeded_bound("c", 1) == "queue_full"


def test_the_bound_of_the_flow_is_reported_before_that_of_the_queue():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_flow_items=1, max_items=1))
    push_all(queue, "a", 1)

    assert queue.exceeded_bound("a", 1) == "flow_full"
    assert queue.exceeded_bound("b", 1) == "queue_full"


def test_room_can_be_checked_for_several_items_at_once():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_flow_items=4, max_items=6))
    push_all(queue, "a", 2)

    assert queue.exceeded_bound("a", 20, items=2) is None
    assert queue.exceeded_bound("a", 20, items=3) == "flow_full"
    assert queue.exceeded_bound("b", 20, items=4) is None
    assert queue.exceeded_bound("b", 20, items=5) == "flow_full"


def test_without_bounds_there_is_always_room():
    queue: FairQueue[str] = FairQueue()

    assert all(push_all(queue, "a", 1_000, cost=10**9))
    assert queue.exceeded_bound("a", 10**12) is None


def test_an_item_above_a_cost_bound_enters_an_empty_flow_or_queue():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_flow_cost=10, max_cost=20))

    assert queue.push("huge", "a", 1_000)
    assert not queue.push("more", "a", 1)
    assert not queue.push("more", "b", 1)
    queue.pop()
    assert queue.push("more", "b", 1)


def test_a_rejected_new_flow_is_not_remembered():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_items=1))
    push_all(queue, "a", 1)
    for number in range(100):
        assert not queue.push("x", number, 1)

    assert queue.statistics().remembered_flows == 1
    assert queue.statistics().refused == 100


def test_reserved_room_is_only_for_the_critical_tier():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_items=10, critical_share=0.3))

    assert push_all(queue, "a", 5, "bulk") == [True] * 5
    assert push_all(queue, "b", 3, "normal") == [True, True, False]
    assert queue.exceeded_bound("c", 1, "bulk") == "queue_full"
    assert push_all(queue, "c", 4, "critical") == [True, True, True, False]


def test_critical_items_beyond_their_reserve_use_the_common_room():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_cost=100, critical_share=0.2))

    assert push_all(queue, "a", 5, "critical", cost=10) == [True] * 5
    assert push_all(queue, "b", 6, "bulk", cost=10) == [True] * 5 + [False]


def test_reserved_room_is_free_again_when_items_leave():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_items=4, critical_share=0.5))
    push_all(queue, "a", 2, "bulk")
    push_all(queue, "a", 2, "critical")

    assert queue.pop() == "a0"
    assert queue.exceeded_bound("a", 1, "critical") is None
    assert queue.exceeded_bound("a", 1, "bulk") == "queue_full"
    queue.drain()
    assert push_all(queue, "a", 3, "bulk") == [True, True, False]


def test_the_longest_flow_is_the_one_with_the_most_cost_for_its_weight():
    weights = {"heavy": 10, "light": 1}
    queue: FairQueue[str] = FairQueue(weight_of=lambda flow: weights[str(flow)])
    push_all(queue, "heavy", 50)
    push_all(queue, "light", 6)

    assert queue.evict() == "light5"
    push_all(queue, "heavy", 15)
    assert queue.evict() == "heavy14"


def test_the_longest_flow_is_right_after_a_flow_shrinks():
    queue: FairQueue[str] = FairQueue()
    push_all(queue, "a", 10)
    push_all(queue, "b", 8)
    longest = []
    while (newest := queue.evict()) is not None:
        longest.append(newest[0])
        queue.remove(newest[0], lambda _: True)

    assert longest == ["a", "b"]


def test_eviction_starts_with_the_lowest_tier_of_any_flow():
    queue: FairQueue[str] = FairQueue()
    push_all(queue, "long", 100, "normal")
    push_all(queue, "alarm", 10, "critical")
    push_all(queue, "short", 2, "bulk")

    assert [queue.evict() for _ in range(4)] == ["short1", "short0", "long99", "long98"]


def test_an_item_never_evicts_items_of_a_higher_tier():
    queue: FairQueue[str] = FairQueue()
    push_all(queue, "a", 2, "critical")
    push_all(queue, "b", 1, "normal")

    assert queue.evict("bulk") is None
    assert queue.evict("normal") == "b0"
    assert queue.evict("normal") is None
    assert queue.evict("critical") == "a1"


def test_the_newest_item_of_a_flow_is_evicted_first():
    queue: FairQueue[str] = FairQueue()
    push_all(queue, "a", 3)

    assert queue.evict() == "a2"
    assert queue.pop() == "a0"


def test_evicting_the_last_item_empties_the_queue():
    queue: FairQueue[str] = FairQueue()
    push_all(queue, "a", 1)

    assert queue.evict() == "a0"
    assert not queue
    assert queue.statistics().evicted == 1
    assert push_all(queue, "a", 1) == [True]


def test_a_full_queue_never_evicts_from_a_short_flow():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_items=100))
    for number in range(1_000):
        queue.push_evicting(f"noisy{number}", "noisy", 1)
        if number % 50 == 0:
            assert queue.push_evicting(f"quiet{number}", "quiet", 1) is not None

    assert len(list(queue.items("quiet"))) == 20
    assert len(list(queue.items("noisy"))) == 80


def test_a_new_item_of_the_longest_flow_is_rejected():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_items=3))
    push_all(queue, "a", 3)

    assert queue.push_evicting("more", "a", 1) is None
    assert list(queue.items("a")) == ["a0", "a1", "a2"]
    assert queue.push_evicting("b0", "b", 1) == ["a2"]
    assert queue.push_evicting("b1", "b", 1) is None


def test_a_critical_item_evicts_bulk_items():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_cost=100))
    push_all(queue, "a", 10, "bulk", cost=10)

    assert queue.push_evicting("alarm", "b", 25, "critical") == ["a9", "a8", "a7"]
    assert queue.statistics().cost == 95


def test_a_full_flow_evicts_from_its_own_lower_tiers():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_flow_items=3))
    push_all(queue, "a", 2, "bulk")
    push_all(queue, "a", 1, "normal")
    push_all(queue, "other", 3, "bulk")

    assert queue.push_evicting("alarm", "a", 1, "critical") == ["a1"]
    assert queue.push_evicting("note", "a", 1, "normal") == ["a0"]
    assert queue.push_evicting("debug", "a", 1, "bulk") is None
    assert queue.push_evicting("note", "a", 1, "normal") is None
    assert queue.push_evicting("alarm", "a", 1, "critical") == ["note"]


def test_a_rejected_item_restores_the_evicted_items():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_cost=100))
    push_all(queue, "a", 2, "bulk", cost=10)
    push_all(queue, "b", 4, "critical", cost=20)
    before = [list(queue.items(flow)) for flow in "ab"]
    statistics = queue.statistics()

    # Evicting all bulk items is not enough, and the critical flow is not longer than the new item's flow.
    assert queue.push_evicting("big", "c", 90, "normal") is None

    assert [list(queue.items(flow)) for flow in "ab"] == before
    assert queue.statistics().refused == statistics.refused + 1
    assert (queue.statistics().evicted, len(queue), queue.statistics().cost) == (0, 6, 100)
    assert queue.evict() == "a1"
    assert queue.drain() == ["a0", "b0", "b1", "b2", "b3"]


def test_an_item_too_large_for_its_flow_evicts_no_item():
    queue: FairQueue[str] = FairQueue(bounds=QueueBounds(max_flow_cost=100))
    push_all(queue, "a", 1, "bulk", cost=10)
    push_all(queue, "a", 1, "critical", cost=90)

    assert queue.push_evicting("big", "a", 50, "critical") is None
    assert [*queue.items("a")] == ["a0", "a0"]
    assert queue.statistics().evicted == 0


def test_an_invalid_weight_of_a_new_flow_evicts_no_item():
    queue: FairQueue[str] = FairQueue(
        weight_of=lambda flow: {"a": 1.0, "bad": 0.0}[str(flow)], bounds=QueueBounds(max_items=2)
    )
    push_all(queue, "a", 2)

    with pytest.raises(ConfigError, match="weight is"):
        queue.push_evicting("x", "bad", 1)
    assert list(queue.items("a")) == ["a0", "a1"]
    assert queue.statistics().evicted == 0


@pytest.mark.parametrize("field", ["max_flow_items", "max_flow_cost", "max_items", "max_cost"])
@pytest.mark.parametrize("bound", [0, -1, 1.5, True, "3", float("inf")])
def test_a_bound_must_be_a_whole_number_above_zero(field, bound):
    with pytest.raises(ConfigError, match=f"{field} is"):
        QueueBounds(**{field: bound})


@pytest.mark.parametrize("share", [-0.1, 1.0, 2, float("nan")])
def test_the_critical_share_must_be_below_one(share):
    with pytest.raises(ConfigError, match="critical_share is"):
        QueueBounds(critical_share=share)


def test_the_ranking_drops_outdated_listings_and_stays_right():
    queue: FairQueue[tuple[str, int]] = FairQueue()
    held = dict.fromkeys("abcde", 0)
    for number in range(1, 2_001):
        flow = "abcde"[number * 7 % 5]
        cost = number % 13 + 1
        queue.push((flow, cost), flow, cost, "bulk" if number % 3 else "normal")
        held[flow] += cost
        if number % 4 == 0:
            flow, cost = queue.pop()
            held[flow] -= cost
        # The ranking is read rarely. In between, listings are only added and would accumulate.
        if number % 100 == 0:
            evicted = queue.evict()
            assert evicted is not None
            flow, cost = evicted
            assert held[flow] == max(held.values())
            held[flow] -= cost
        if queue._ranking is not None:
            assert max(map(len, queue._ranking._listings)) <= 64 + 4 * 5


def test_the_ranking_lists_no_flow_that_has_left():
    queue: FairQueue[str] = FairQueue()
    push_all(queue, "stays", 2)
    assert queue.evict() == "stays1"
    for number in range(300):
        push_all(queue, f"passes-{number}", 2)
        queue.remove(f"passes-{number}", lambda _: True)

    assert queue._ranking is not None
    assert max(map(len, queue._ranking._listings)) <= 64 + 4 * 300
    assert queue.evict() == "stays0"
    assert queue.statistics().remembered_flows <= 200
