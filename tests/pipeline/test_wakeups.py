import math

from hypothesis import given, strategies as st

from kpl_core.pipeline.wakeups import Wakeups


def test_no_member_wants_attention_at_first():
    wakeups: Wakeups[str] = Wakeups()
    assert wakeups.next_at == math.inf
    assert wakeups.take_due(1e9) == []
    assert len(wakeups) == 0


def test_a_member_that_is_due_is_returned_once_earliest_first():
    wakeups: Wakeups[str] = Wakeups()
    for member, at in [("late", 3.0), ("early", 1.0), ("middle", 2.0)]:
        wakeups.schedule(member, at)
    assert wakeups.next_at == 1.0
    assert wakeups.take_due(0.999) == []
    assert wakeups.take_due(2.0) == ["early", "middle"]
    assert wakeups.take_due(2.0) == []
    assert wakeups.next_at == 3.0
    assert len(wakeups) == 1


def test_becoming_earlier_counts_and_becoming_later_does_not():
    wakeups: Wakeups[str] = Wakeups()
    wakeups.schedule("shard", 2.0)
    wakeups.schedule("shard", 1.0)
    wakeups.schedule("shard", 5.0)
    assert wakeups.next_at == 1.0
    assert wakeups.take_due(10.0) == ["shard"]
    assert wakeups.next_at == math.inf


def test_never_is_no_wakeup():
    wakeups: Wakeups[str] = Wakeups()
    wakeups.schedule("shard", math.inf)
    assert len(wakeups) == 0


def test_all_can_be_forgotten():
    wakeups: Wakeups[str] = Wakeups()
    wakeups.schedule("shard", 1.0)
    wakeups.clear()
    assert wakeups.take_due(2.0) == []
    wakeups.schedule("shard", 3.0)
    assert wakeups.next_at == 3.0


def test_the_none_of_the_unpredicted_shard_is_a_member_like_any_other():
    wakeups: Wakeups[str | None] = Wakeups()
    wakeups.schedule(None, 1.0)
    assert wakeups.take_due(1.0) == [None]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100), st.booleans()), max_size=60),
)
def test_it_answers_like_a_dict_of_minima(steps):
    wakeups: Wakeups[int] = Wakeups()
    expected: dict[int, float] = {}
    for member, at, take in steps:
        if take:
            due = wakeups.take_due(at)
            assert sorted(due) == sorted(name for name, instant in expected.items() if instant <= at)
            assert [expected[name] for name in due] == sorted(expected[name] for name in due)
            for name in due:
                del expected[name]
        else:
            wakeups.schedule(member, at)
            expected[member] = min(at, expected.get(member, math.inf))
        assert wakeups.next_at == min(expected.values(), default=math.inf)
        assert len(wakeups) == len(expected)
