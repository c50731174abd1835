"""Flows take turns on a late event loop. The laws run a simulated loop that serves one turn after the other."""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st

from kpl_core import ConfigError
from kpl_core.fairness import CpuTurns, StandingDelay, cpu_turns
from tests.support.oracles import mutant_of

ROUND = 0.005
LONGEST = 1.0
TICK = 0.01
TurnsClass = Callable[..., CpuTurns[Any]]
Law = Callable[[TurnsClass], None]


def late(turns: CpuTurns[Any], now: float = 0.0) -> float:
    """Let the delay of the loop stand until turns are taken. Return the time then."""
    while not turns.is_active:
        now += TICK
        turns.observe_delay(0.02, now)
    return now


class Loop:
    """An event loop with flows that send requests. A request costs CPU seconds and needs its connection's turn."""

    def __init__(self, turns: CpuTurns[Any], weights: dict[str, float]) -> None:
        self.turns = turns
        self.weights = weights
        self.now = late(turns)
        self.next_tick = self.now + TICK
        self.served: defaultdict[Hashable, float] = defaultdict(float)
        self.longest_pause = 0.0
        self._since: dict[Any, float] = {}

    def arrive(self, connection: Any, flow: str, cost: float) -> bool:
        """Serve a request at once, or let it wait. Return True if it was served."""
        if not self.turns.may_run(flow, self.now):
            self._since[connection] = self.now
            self.turns.wait(connection, flow, self.now, weight=self.weights[flow])
            return False
        self._serve(flow, cost)
        return True

    def _serve(self, flow: str, cost: float) -> None:
        self.now += cost
        self.served[flow] += cost
        self.turns.charge(flow, cost, weight=self.weights[flow])

    def run_round(self, costs: dict[str, float]) -> list[Any]:
        """Serve one round. Return the connections that had a turn; a connection is a tuple of its flow and a number."""
        self.turns.begin_round(self.now)
        had_turn = []
        while (turn := self.turns.next_turn(self.now)) is not None:
            self.longest_pause = max(self.longest_pause, self.now - self._since.pop(turn.item))
            self._serve(turn.item[0], 0.0 if turn.is_overdue else costs[turn.item[0]])
            had_turn.append(turn.item)
        if self.now >= self.next_tick:
            self.turns.observe_delay(self.now - self.next_tick, self.now)
            self.next_tick = self.now + TICK
        return had_turn

    def run(self, costs: dict[str, float], seconds: float, *, connections: int = 60) -> None:
        """Serve flows that always have requests on so many connections each: several rounds of them."""
        end = self.now + seconds
        ready = deque((flow, number) for number in range(connections) for flow in costs)
        while self.now < end:
            self.longest_pause = max([self.longest_pause, *(self.now - since for since in self._since.values())])
            for _ in range(len(ready)):
                connection = ready.popleft()
                if self.arrive(connection, connection[0], costs[connection[0]]):
                    ready.append(connection)
            ready.extend(self.run_round(costs))


weights = st.lists(st.integers(1, 8), min_size=2, max_size=5)
costs = st.lists(st.sampled_from([0.0005, 0.001, 0.002]), min_size=5, max_size=5)


def law_busy_flows_share_the_time_by_weight(turns_class: TurnsClass) -> None:
    @given(weights, costs)
    @settings(max_examples=40, phases=(Phase.generate,))
    def holds(numbers: list[int], each: list[float]) -> None:
        by_flow = {f"flow-{index}": float(number) for index, number in enumerate(numbers)}
        loop = Loop(turns_class(longest_wait_seconds=1e9), by_flow)
        loop.run(dict(zip(by_flow, each, strict=False)), 2.0)
        total = sum(loop.served.values())
        for flow, weight in by_flow.items():
            fair = total * weight / sum(by_flow.values())
            # A round may be ahead at the end.
            assert abs(loop.served[flow] - fair) <= 0.02 * total + 4 * ROUND

    holds()


def law_no_time_is_unused_while_a_flow_waits(turns_class: TurnsClass) -> None:
    @given(weights, costs)
    @settings(max_examples=40, phases=(Phase.generate,))
    def holds(numbers: list[int], each: list[float]) -> None:
        by_flow = {f"flow-{index}": float(number) for index, number in enumerate(numbers)}
        loop = Loop(turns_class(), by_flow)
        idle_rounds = 0
        for _ in range(50):
            for flow, cost in zip(by_flow, each, strict=False):
                loop.arrive((flow, object()), flow, cost)
            idle_rounds += bool(len(loop.turns)) and not loop.run_round(dict(zip(by_flow, each, strict=False)))
        # What was used above a round is missing in the next ones, and an idle round takes no time.
        assert idle_rounds <= sum(loop.served.values()) / ROUND

    holds()


def law_a_flow_below_its_share_never_waits(turns_class: TurnsClass) -> None:
    @given(st.lists(st.floats(0.0001, 0.003), min_size=1, max_size=40), st.integers(1, 8))
    @settings(max_examples=40, phases=(Phase.generate,))
    def holds(requests: list[float], floods: int) -> None:
        flood_costs = {f"flood-{number}": 0.001 for number in range(floods)}
        loop = Loop(turns_class(), dict.fromkeys([*flood_costs, "quiet"], 1.0))
        for cost in requests:
            # The floods run long enough for its next request to be less than half of its share.
            loop.run(flood_costs, 2.0 * cost * (floods + 1) + 0.002, connections=1)
            for connection in list(loop.turns):
                loop.turns.leave(connection)
            assert loop.arrive(("quiet", 0), "quiet", cost)

    holds()


def law_no_connection_waits_longer_than_the_longest_pause(turns_class: TurnsClass) -> None:
    for connections, cost in itertools.product((1, 30, 300, 3_000), (0.0005, 0.01)):
        loop = Loop(turns_class(), {"flood": 1.0})
        loop.run({"flood": cost}, 2.5, connections=connections)
        # The request that the loop serves when the time is over, and one round.
        assert loop.longest_pause <= LONGEST + cost + 2 * ROUND


LAWS: list[Law] = [
    law_busy_flows_share_the_time_by_weight,
    law_no_time_is_unused_while_a_flow_waits,
    law_a_flow_below_its_share_never_waits,
    law_no_connection_waits_longer_than_the_longest_pause,
]
# For each law a change that breaks it.
MUTANTS = [
    (LAWS[0], ("cpu_seconds / found.weight", "cpu_seconds")),
    (LAWS[0], ("elif tag < flow.tag:", "elif tag < 0.0:")),
    (LAWS[1], ("self._spent = max(0.0, self._spent - self._round)", "self._spent += self._round")),
    (LAWS[2], ("* found.weight <= self._round", "* found.weight <= -1.0")),
    (LAWS[3], ("is_overdue = waited >= self._longest or (", "is_overdue = (False and ")),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law_holds(law: Law):
    law(CpuTurns)


@pytest.mark.parametrize(("law", "change"), MUTANTS, ids=[f"{law.__name__}: {old}" for law, (old, _) in MUTANTS])
def test_the_law_fails_for_broken_turns(law: Law, change: tuple[str, str]):
    with pytest.raises(AssertionError):
        law(mutant_of(cpu_turns, change).CpuTurns)


def test_a_flow_alone_may_use_all_of_the_time():
    loop = Loop(CpuTurns(), {"only": 0.1})
    loop.run({"only": 0.0005}, 1.0)
    assert loop.served["only"] == pytest.approx(1.0, abs=0.01)


def test_of_two_flows_the_one_that_has_used_less_has_the_next_turn():
    turns: CpuTurns[str] = CpuTurns()
    now = late(turns)
    turns.charge("greedy", 0.5)
    turns.charge("modest", 0.1)
    for item, flow in (("g1", "greedy"), ("m1", "modest"), ("m2", "modest")):
        turns.wait(item, flow, now)
    turns.begin_round(now)
    taken: list[str] = []
    # What they have used so far counts against the next rounds.
    while len(taken) < 3:
        turn = turns.next_turn(now)
        if turn is None:
            turns.begin_round(now)
        else:
            taken.append(turn.item)
    assert taken == ["m1", "m2", "g1"]


def test_a_round_ends_when_its_time_is_used_and_the_rest_counts_in_the_next():
    turns: CpuTurns[int] = CpuTurns(round_seconds=ROUND)
    now = late(turns)
    for number in range(4):
        turns.wait(number, "flood", now)
    turns.begin_round(now)
    assert turns.next_turn(now) == (0, False)
    turns.charge("flood", 2.5 * ROUND)
    assert turns.next_turn(now) is None
    for expected in (None, (1, False)):
        turns.begin_round(now)
        assert turns.next_turn(now) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_the_parts_of_a_flow_take_turns(steps):
    """Each part that waits has a turn before another one has two, whatever arrives and leaves meanwhile."""
    turns: CpuTurns[Any] = CpuTurns(round_seconds=1e9, longest_wait_seconds=1e9)
    now = late(turns)
    waiting: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
    turns_since: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for number, (part, is_arrival) in enumerate(steps):
        if is_arrival:
            if not waiting[part]:
                turns_since[part] = dict.fromkeys(range(6), 0)
            waiting[part].append((part, number))
            turns.wait((part, number), "flow", now, part=part)
            continue
        turns.begin_round(now)
        turn = turns.next_turn(now)
        assert (turn is None) is not any(waiting.values())
        if turn is not None:
            had = turn.item[0]
            assert waiting[had].popleft() == turn.item
            turns_since[had] = dict.fromkeys(range(6), 0)
            for other, items in waiting.items():
                if items and other != had:
                    turns_since[other][had] += 1
                    assert turns_since[other][had] <= 1
    assert len(turns) == sum(map(len, waiting.values()))


def test_an_overdue_item_has_its_turn_even_if_the_round_is_over():
    turns: CpuTurns[str] = CpuTurns()
    now = late(turns)
    turns.charge("flood", 100.0)
    turns.wait("old", "flood", now)
    turns.charge("flood", 100.0)
    turns.begin_round(now + LONGEST)
    assert turns.next_turn(now + LONGEST - 0.001) is None
    assert turns.next_turn(now + LONGEST + 0.001) == ("old", True)


def test_a_flow_that_waits_alone_is_overdue_only_when_the_round_is_over():
    turns: CpuTurns[Any] = CpuTurns()
    now = late(turns)
    for item in range(4):
        turns.wait(item, "a", now)
    # The machine stopped for two seconds.
    turns.begin_round(now + 2.0)
    found = []
    while (turn := turns.next_turn(now + 2.0)) is not None:
        found.append(turn.is_overdue)
        turns.charge("a", ROUND / 2)
    assert found == [False, False, True, True]


def test_a_flow_that_cannot_wait_may_run_at_its_share_of_the_time():
    turns: CpuTurns[str] = CpuTurns()
    now = started = late(turns)
    used = {"a": 0.0, "b": 0.0}
    while now < started + 2.0:
        for flow, weight in (("a", 1.0), ("b", 3.0)):
            if turns.may_run(flow, now):
                turns.charge(flow, 0.001, weight=weight)
                used[flow] += 0.001
        turns.observe_delay(0.0, now)
        now += 0.001
    assert used["b"] / used["a"] == pytest.approx(3.0, rel=0.05)
    assert sum(used.values()) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("delays", "stands"),
    [
        ([0.2], False),
        ([0.2, 0.0, 0.2, 0.0], False),
        ([0.006] * 10, False),
        ([0.006] * 11, True),
        ([0.005] * 50, False),
        ([0.006] * 10 + [0.004] + [0.006] * 10, False),
    ],
    ids=["a spike", "two spikes", "almost a window", "a window", "at the target", "interrupted"],
)
def test_a_delay_stands_if_its_minimum_over_a_window_is_above_the_target(delays: Sequence[float], stands):
    delay = StandingDelay(target_seconds=0.005, window_seconds=0.1)
    # The binary fractions of these instants are exact.
    assert [delay.observe(each, 1.0 + number / 100) for number, each in enumerate(delays)][-1] is stands


def test_turns_end_after_a_calm_second_and_nothing_of_them_is_remembered():
    turns: CpuTurns[str] = CpuTurns()
    now = late(turns)
    turns.charge("flood", 10.0)
    assert not turns.may_run("flood", now)
    turns.wait("one", "flood", now)
    for _ in range(300):
        now += TICK
        turns.observe_delay(0.0, now)
    assert turns.is_active
    assert turns.leave("one")
    assert not turns.leave("one")
    ended = now
    while turns.is_active:
        now += TICK
        turns.observe_delay(0.0, now)
    assert now - ended == pytest.approx(1.0, abs=0.05)
    late(turns, now)
    assert turns.may_run("flood", now)


def test_all_waiting_items_are_returned_at_the_end():
    turns: CpuTurns[int] = CpuTurns()
    now = late(turns)
    for number in range(5):
        turns.wait(number, number % 2, now)
    assert turns.take_all() == [0, 1, 2, 3, 4]
    assert (len(turns), turns.is_active, turns.next_turn(now)) == (0, False, None)


def test_a_tenant_whose_weight_changes_has_its_new_share():
    loop = Loop(CpuTurns(), {"a": 1.0, "b": 1.0})
    loop.run({"a": 0.001, "b": 0.001}, 1.0)
    loop.weights["a"] = 3.0
    loop.served.clear()
    loop.run({"a": 0.001, "b": 0.001}, 1.0)
    assert loop.served["a"] / loop.served["b"] == pytest.approx(3.0, rel=0.05)


def test_a_weight_that_is_no_weight_is_refused():
    turns: CpuTurns[str] = CpuTurns()
    with pytest.raises(ConfigError, match="weight"):
        turns.charge("flow", 1.0, weight=0.0)


def test_a_changed_weight_counts_before_the_next_window():
    for weight, may_run in ((1.0, True), (9.0, False)):
        turns: CpuTurns[str] = CpuTurns()
        now = late(turns)
        turns.charge("a", 0.1)
        turns.charge("b", 0.02)
        turns.charge("a", 0.1, weight=weight)
        # With weight 1 both are equal, and half of these 50 ms is b's.
        turns.observe_delay(0.0, now + 0.05)
        assert turns.may_run("b", now + 0.05) is may_run


def test_what_tenants_may_use_of_the_time_falls_once_a_window():
    turns: CpuTurns[Any] = CpuTurns(window_seconds=0.1)
    now = late(turns)
    for _ in range(21):
        now += TICK
        turns.observe_delay(0.02, now)
    # Two windows have passed, so 0.9 * 0.9 of the elapsed time counts.
    turns.charge("busy", 0.081 + ROUND)
    turns.begin_round(now + 0.098)
    assert not turns.may_run("busy", now + 0.098)
    turns.begin_round(now + 0.102)
    assert turns.may_run("busy", now + 0.102)


def test_flows_below_their_share_use_none_of_the_time_of_a_round():
    turns: CpuTurns[str] = CpuTurns(round_seconds=ROUND)
    now = late(turns)
    turns.charge("busy", 1.0)
    turns.observe_delay(0.0, now + 0.5)
    turns.wait("item", "flood", now + 0.5)
    # What the busy flow used is paid back, 5 ms in each round.
    for _ in range(201):
        turns.begin_round(now + 0.5)
    for number in range(10):
        turns.charge(f"quiet {number}", 0.8 * ROUND)
    assert turns.next_turn(now + 0.5) == ("item", False)


def test_a_delay_stands_from_the_end_of_its_window_on():
    delay = StandingDelay(target_seconds=0.005, window_seconds=0.5)
    assert [delay.observe(0.006, now) for now in (0.0, 0.25, 0.5)] == [False, False, True]
