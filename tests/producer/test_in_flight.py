from collections import Counter

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kpl_core.producer.in_flight import InFlightRequests

MEMBERS = ["a", "b", "c", "d"]


def try_take(places: InFlightRequests[str], member: object) -> bool:
    """Take one place, or wait for one."""
    assert isinstance(member, str)
    is_free = places.free_for(member) > 0
    assert places.take(member, 1 if is_free else 0, wants_more=not is_free) is None
    return is_free


def test_a_place_is_taken_and_given_back():
    places = InFlightRequests[str](2)
    assert [try_take(places, "a") for _ in range(3)] == [True, True, False]
    assert places.total == 2
    assert places.release("a") == "a"
    assert try_take(places, "a")


def test_without_a_waiting_stream_none_is_called():
    places = InFlightRequests[str](1)
    assert try_take(places, "a")
    assert places.release("a") is None
    assert places.total == 0


def test_a_place_given_back_is_reserved_for_the_stream_that_was_called():
    places = InFlightRequests[str](1)
    try_take(places, "a")
    assert not try_take(places, "b")
    assert places.release("a") == "b"
    assert not try_take(places, "a")
    assert try_take(places, "b")


def test_a_stream_without_a_request_in_flight_goes_first():
    places = InFlightRequests[str](3)
    for _ in range(3):
        try_take(places, "greedy")
    assert not try_take(places, "greedy")
    assert not try_take(places, "modest")
    assert places.release("greedy") == "modest"


def test_streams_that_all_have_requests_take_turns():
    places = InFlightRequests[str](2)
    for member in ("a", "b"):
        assert try_take(places, member)
    for member in ("a", "b"):
        assert not try_take(places, member)
    order = []
    for finished in ("a", "b", "a", "b"):
        turn = places.release(finished)
        order.append(turn)
        assert try_take(places, turn)
        assert not try_take(places, turn)
    assert order == ["a", "b", "a", "b"]


def test_a_turn_that_a_stream_does_not_need_goes_to_the_next_in_line():
    """The place was lost until another request ended: the streams behind were not called."""
    places = InFlightRequests[str](1)
    try_take(places, "a")
    for member in ("b", "c"):
        assert not try_take(places, member)
    assert places.release("a") == "b"
    assert places.take("b", 0, wants_more=False) == "c"
    assert try_take(places, "c")


def test_taking_no_place_without_having_waited_changes_nothing():
    places = InFlightRequests[str](1)
    assert places.take("a", 0, wants_more=False) is None
    try_take(places, "a")
    assert not try_take(places, "b")
    assert places.take("b", 0, wants_more=False) is None
    assert places.release("a") is None


def test_a_stream_takes_all_the_places_it_needs_in_one_call():
    places = InFlightRequests[str](5)
    assert places.free_for("a") == 5
    assert places.take("a", 3, wants_more=False) is None
    assert places.free_for("b") == 2
    assert places.take("b", 2, wants_more=True) is None
    assert places.free_for("c") == 0
    assert places.take("c", 0, wants_more=True) is None
    assert places.release("a") == "c"
    assert (places.free_for("c"), places.free_for("b")) == (1, 0)


def test_a_hundred_streams_share_one_place_evenly():
    places = InFlightRequests[str](1)
    served: Counter[str] = Counter()
    names = [f"stream {number}" for number in range(100)]
    holder = names[0]
    assert try_take(places, holder)
    for name in names:
        assert not try_take(places, name)
    for _ in range(1_000):
        turn = places.release(holder)
        assert isinstance(turn, str)
        assert try_take(places, turn)
        served[turn] += 1
        assert not try_take(places, turn)
        holder = turn
    assert set(served.values()) == {10}


class Streams(RuleBasedStateMachine):
    """Streams that take places, wait, give back, and leave the line."""

    def __init__(self) -> None:
        super().__init__()
        self.places = InFlightRequests[str](2)
        self.in_flight: Counter[str] = Counter()
        self.waiting: set[str] = set()
        self.called: set[str] = set()

    def call(self, turn: object) -> None:
        if turn is not None:
            assert isinstance(turn, str)
            assert turn in self.waiting
            self.waiting.remove(turn)
            self.called.add(turn)

    @rule(member=st.sampled_from(MEMBERS))
    def take(self, member: str) -> None:
        was_called = member in self.called
        took = try_take(self.places, member)
        assert took or not was_called
        self.called.discard(member)
        if took:
            self.in_flight[member] += 1
            self.waiting.discard(member)
        else:
            self.waiting.add(member)

    @rule(member=st.sampled_from(MEMBERS))
    def release(self, member: str) -> None:
        if self.in_flight[member]:
            self.in_flight[member] -= 1
            self.call(self.places.release(member))

    @rule(member=st.sampled_from(MEMBERS))
    def leave_the_line(self, member: str) -> None:
        self.waiting.discard(member)
        self.called.discard(member)
        self.call(self.places.take(member, 0, wants_more=False))

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.places.total == self.in_flight.total() <= 2

    @invariant()
    def no_place_is_free_while_an_uncalled_stream_waits(self) -> None:
        assert not self.waiting or self.in_flight.total() + len(self.called) == 2


Streams.TestCase.settings = settings(max_examples=60)
TestStreams = Streams.TestCase
