from collections import Counter

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kpl_core.producer.in_flight import InFlightRequests

MEMBERS = ["a", "b", "c", "d"]


def test_a_place_is_taken_and_given_back():
    places = InFlightRequests(2)
    assert [places.try_take("a") for _ in range(3)] == [True, True, False]
    assert places.total == 2
    assert places.release("a") == "a"
    assert places.try_take("a")


def test_nobody_waits_nobody_is_called():
    places = InFlightRequests(1)
    assert places.try_take("a")
    assert places.release("a") is None
    assert places.total == 0


def test_a_place_given_back_is_kept_for_whoever_was_called():
    places = InFlightRequests(1)
    places.try_take("a")
    assert not places.try_take("b")
    assert places.release("a") == "b"
    assert not places.try_take("a")
    assert places.try_take("b")


def test_a_stream_without_a_request_in_flight_goes_before_the_greedy():
    places = InFlightRequests(3)
    for _ in range(3):
        places.try_take("greedy")
    assert not places.try_take("greedy")
    assert not places.try_take("modest")
    assert places.release("greedy") == "modest"


def test_streams_that_all_have_requests_take_turns():
    places = InFlightRequests(2)
    for member in ("a", "b"):
        assert places.try_take(member)
    for member in ("a", "b"):
        assert not places.try_take(member)
    order = []
    for finished in ("a", "b", "a", "b"):
        turn = places.release(finished)
        order.append(turn)
        assert places.try_take(turn)
        assert not places.try_take(turn)
    assert order == ["a", "b", "a", "b"]


def test_a_turn_nobody_needs_goes_to_the_next_in_line():
    """The place was lost until another request ended: those behind were not told of it."""
    places = InFlightRequests(1)
    places.try_take("a")
    for member in ("b", "c"):
        assert not places.try_take(member)
    assert places.release("a") == "b"
    assert places.give_up("b") == "c"
    assert places.try_take("c")


def test_giving_up_without_having_waited_changes_nothing():
    places = InFlightRequests(1)
    assert places.give_up("a") is None
    places.try_take("a")
    assert not places.try_take("b")
    assert places.give_up("b") is None
    assert places.release("a") is None


def test_a_hundred_streams_share_one_place_evenly():
    places = InFlightRequests(1)
    served: Counter[str] = Counter()
    names = [f"stream {number}" for number in range(100)]
    holder = names[0]
    assert places.try_take(holder)
    for name in names:
        assert not places.try_take(name)
    for _ in range(1_000):
        turn = places.release(holder)
        assert isinstance(turn, str)
        assert places.try_take(turn)
        served[turn] += 1
        assert not places.try_take(turn)
        holder = turn
    assert set(served.values()) == {10}


class Streams(RuleBasedStateMachine):
    """Streams that take, wait, give back and lose interest, each only when told or of its own accord."""

    def __init__(self) -> None:
        super().__init__()
        self.places = InFlightRequests(2)
        self.in_flight: Counter[str] = Counter()
        self.waiting: set[str] = set()
        self.told: set[str] = set()

    def tell(self, turn: object) -> None:
        if turn is not None:
            assert isinstance(turn, str)
            assert turn in self.waiting
            self.waiting.remove(turn)
            self.told.add(turn)

    @rule(member=st.sampled_from(MEMBERS))
    def take(self, member: str) -> None:
        was_told = member in self.told
        took = self.places.try_take(member)
        assert took or not was_told
        self.told.discard(member)
        if took:
            self.in_flight[member] += 1
            self.waiting.discard(member)
        else:
            self.waiting.add(member)

    @rule(member=st.sampled_from(MEMBERS))
    def release(self, member: str) -> None:
        if self.in_flight[member]:
            self.in_flight[member] -= 1
            self.tell(self.places.release(member))

    @rule(member=st.sampled_from(MEMBERS))
    def give_up(self, member: str) -> None:
        self.waiting.discard(member)
        self.told.discard(member)
        self.tell(self.places.give_up(member))

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.places.total == self.in_flight.total() <= 2

    @invariant()
    def no_place_is_free_while_somebody_waits_untold(self) -> None:
        assert not self.waiting or self.in_flight.total() + len(self.told) == 2


Streams.TestCase.settings = settings(max_examples=60)
TestStreams = Streams.TestCase
