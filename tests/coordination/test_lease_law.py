"""The invariant of the lease table, under any interleaving that Hypothesis finds."""

from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from kpl_core.coordination.lease_sync import SUMMARY_NAME
from kpl_core.coordination.lease_table import FORGOTTEN_INTERVALS
from kpl_core.coordination.store_objects import Summary, decode
from kpl_core.options.coordination_options import ALONE_SHARE
from tests.coordination.stepping import LIMIT, RESOURCE, RESOURCES, SteppedWorker, SteppingStore

MAX_WORKERS = 8
INTERVAL = 5.0
EPOCH = 1_800_000_000.0

indices = st.integers(0, MAX_WORKERS - 1)
# The wait; the new demand of some workers for the first or the other resource; the workers that sync at once; the
# workers whose sync advances by so many calls; what happens to the store: it goes down or comes back, its clock steps
# by so many seconds, or it loses what was written in the last round. (After a step of ten minutes a summary is of
# yesterday, and ignored.)
rounds = st.tuples(
    st.floats(0.1, 2.0),
    st.dictionaries(st.tuples(indices, st.booleans()), st.sampled_from([0.0, 50.0, 5000.0]), max_size=2),
    st.lists(indices, max_size=3),
    st.lists(st.tuples(indices, st.integers(1, 4)), max_size=3),
    st.sampled_from([*[None] * 20, "breaks", "breaks", "forgets", 400.0, -400.0, 7.0, -7.0, -3.0]),
)


class Fleet:
    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.clock_offset = 0.0
        self.store = SteppingStore(lambda: EPOCH + self.now + self.clock_offset)
        self.kept = self.store.remembered()
        self.workers = [
            SteppedWorker(f"w{index}", self.store, lambda: self.now, max_workers=MAX_WORKERS) for index in range(count)
        ]

    def settle(self) -> None:
        """Run until the table is warm and settled, with different demands."""
        for second in range(12):
            for index, worker in enumerate(self.workers):
                worker.demand = 5000.0 if (index + second) % 3 == 0 else 0.0
                worker.measure()
                if second % 2:
                    worker.sync()
            self.wait(1.0)

    def calm_down(self) -> None:
        """Run until all reports are old, because capacity is unassigned."""
        for worker in self.workers:
            worker.demand, worker.other_demand = 30.0, 10.0
        self.wait(15 * INTERVAL)

    def total(self, dimension: int = 0, resource: str = RESOURCE) -> float:
        """Return the sum of the shares. A worker that no store has answered yet has what it started with.

        It probes for more, which the shards bound by throttling, and these do not throttle (`test_probed_share.py`).
        """
        alone = LIMIT[dimension] * ALONE_SHARE / MAX_WORKERS
        shares = [
            (worker.share(dimension, resource), worker.holder.state(self.now) == "alone") for worker in self.workers
        ]
        return sum(min(share, alone) if is_alone else share for share, is_alone in shares)

    def assert_within_the_limits(self) -> None:
        for resource in RESOURCES:
            assert self.total(0, resource) <= LIMIT[0] * (1 + 1e-9), resource
            assert self.total(1, resource) <= LIMIT[1] * (1 + 1e-9), resource

    def wait(self, seconds: float) -> None:
        """Let time pass; every worker reports within its lifetime unless the store is down."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            if not self.store.is_down:
                for worker in self.workers:
                    if self.now - worker.met_at > 0.5 * INTERVAL:
                        worker.sync()

    def do(
        self,
        seconds: float,
        demands: dict[tuple[int, bool], float],
        meeting: list[int],
        stepping: list[tuple[int, int]],
        befalling: str | float | None,
    ) -> None:
        before = self.store.remembered()
        for (index, is_other), demand in demands.items():
            if is_other:
                self.worker(index).other_demand = demand
            else:
                self.worker(index).demand = demand
        self.wait(seconds)
        for index in meeting:
            self.worker(index).sync()
        for index, calls in stepping:
            for _ in range(calls):
                self.worker(index).step()
        match befalling:
            case "breaks":
                self.store.is_down = not self.store.is_down
            case "forgets":
                self.forget()
            case float() if self._knows_a_summary_after(befalling):
                self.clock_offset += befalling
        # A lost state never returns.
        self.kept = self.store.remembered() if befalling == "forgets" else before

    def _knows_a_summary_after(self, step: float) -> bool:
        """Return True unless steps of the clock, together, make the latest summary one of yesterday."""
        known = self.store.remembered().get(SUMMARY_NAME)
        if known is None:
            return True
        at = EPOCH + self.now + self.clock_offset + step
        return abs(at - decode(known[0], Summary).computed_at) <= FORGOTTEN_INTERVALS * INTERVAL

    def forget(self) -> None:
        """Let the store lose the last round, then let every worker sync: before that no worker could know."""
        self.store.go_back_to(self.kept)
        self.store.is_down = False
        for worker in self.workers * 2:  # twice, because a sync in progress has read the old contents
            worker.sync()

    def worker(self, index: int) -> SteppedWorker:
        return self.workers[index % len(self.workers)]


# A third worker joins, and the store's clock steps twice, so that both summaries are of another time.
TWO_STEPS: list[Any] = [
    (4.5, {}, [], [(0, 1)], None),
    (0.5, {}, [], [], 400.0),
    (2.0, {}, [], [(0, 1)], 400.0),
    (1.0, {}, [], [], None),
]

# It steps back, two workers report, and it steps forward again: their reports seemed to be of workers that had ended.
BACK_AND_FORTH: list[Any] = [
    (0.5, {(0, True): 0.0, (2, False): 5000.0}, [5, 2, 4], [(5, 2), (1, 3)], -400.0),
    (0.7, {(1, False): 50.0, (6, True): 0.0}, [], [(6, 2)], 400.0),
    (0.6, {}, [], [(7, 1)], None),
    (1.5, {(3, True): 5000.0}, [], [(7, 1), (7, 2), (4, 4)], None),
    (0.8, {(0, False): 5000.0}, [7, 1, 1], [(7, 1), (5, 4), (0, 3)], None),
]


@given(
    st.integers(1, MAX_WORKERS), st.sampled_from(["cold", "settled", "calm"]), st.lists(rounds, min_size=5, max_size=40)
)
@example(3, "cold", TWO_STEPS)
@example(2, "calm", BACK_AND_FORTH)
@settings(max_examples=150)
def test_the_sum_of_all_shares_is_within_the_limit_in_any_order(count, start, actions):
    fleet = Fleet(count)
    if start != "cold":
        fleet.settle()
    if start == "calm":
        fleet.calm_down()
    for action in actions:
        fleet.do(*action)
        fleet.assert_within_the_limits()


# The store's clock steps back four times within six seconds, by 20 s in all.
STEPS_BACK: list[Any] = [
    (1.0, {}, [], [], "forgets"),
    (2.0, {}, [], [], -3.0),
    (1.75, {}, [], [], -7.0),
    (2.5, {}, [], [], None),
    (0.5, {}, [], [], -3.0),
    (0.25, {}, [], [], -7.0),
]


@given(st.integers(1, MAX_WORKERS), st.lists(rounds, max_size=20))
@example(1, STEPS_BACK)
@settings(max_examples=30)
def test_after_any_history_nearly_all_of_the_limit_is_used_within_four_intervals(count, actions):
    # Six after steps back: what was written before them stays valid for up to four intervals.
    steps_back = any(isinstance(befalling, float) and befalling < 0 for *_, befalling in actions)
    fleet = Fleet(count)
    for action in actions:
        fleet.do(*action)
    fleet.store.is_down = False
    for worker in fleet.workers:
        worker.demand = 5000.0
        worker.sync()
    for _ in range(120 if steps_back else 80):
        fleet.now += INTERVAL / 20
        for worker in fleet.workers:
            worker.measure()
            if worker.holder.sync_due(fleet.now, usual_seconds=INTERVAL):
                worker.sync()
    assert fleet.total() >= 0.95 * LIMIT[0]
    assert max(worker.share() for worker in fleet.workers) <= 1.1 * min(worker.share() for worker in fleet.workers)


@given(st.integers(2, MAX_WORKERS), st.lists(rounds, max_size=20))
@settings(max_examples=30)
def test_no_share_changes_while_a_store_is_down_that_has_answered(count, actions):
    fleet = Fleet(count)
    for action in actions:
        fleet.do(*action)
    fleet.store.is_down = False
    for worker in fleet.workers * 2:  # twice, because a sync in progress has failed
        worker.sync()
    fleet.store.is_down = True
    for worker in fleet.workers:
        worker.sync()
    before = [worker.share() for worker in fleet.workers]
    for _ in range(60):
        fleet.now += 1.0
        for worker in fleet.workers:
            worker.demand = 5000.0
            worker.sync()
    assert [worker.share() for worker in fleet.workers] == pytest.approx(before)


@pytest.mark.parametrize("seconds", [-3_600.0, -600.0, -8.0, 600.0, 3_600.0])
@pytest.mark.parametrize("dying", [0, 3])
def test_a_step_of_the_stores_clock_blocks_neither_leases_nor_computing(seconds, dying):
    """For example by NTP on the machine of a folder. A worker dies while it computes, so its claim stays."""
    fleet = Fleet(6)
    fleet.settle()
    for worker in fleet.workers:
        worker.demand = 5000.0
    fleet.wait(20.0)
    computing = fleet.workers.pop()
    fleet.now += 0.5 * INTERVAL
    while decode(fleet.store.remembered()[SUMMARY_NAME][0], Summary).claimed_until == 0.0:
        computing.step()
    del fleet.workers[:dying]
    fleet.clock_offset += seconds
    for _ in range(100):
        fleet.now += INTERVAL / 20
        for worker in fleet.workers:
            worker.measure()
            if worker.holder.sync_due(fleet.now, usual_seconds=INTERVAL):
                worker.sync()
        assert fleet.total() <= LIMIT[0] * (1 + 1e-9)
    assert fleet.total() >= 0.95 * LIMIT[0]
