"""The alarm is raised once per crossing of the threshold."""

import pytest
from hypothesis import given, strategies as st

from kpl_core.durability.dead_letters import DepthAlarm
from kpl_core.errors import ConfigError
from kpl_core.hooks import DeadLetterAlarm


def test_the_alarm_is_raised_at_the_threshold_and_cleared_at_half_of_it() -> None:
    alarm = DepthAlarm(100)
    changes = [alarm.update(depth) for depth in (0, 99, 100, 500, 51, 100, 50, 99, 100)]
    assert changes == [
        None,
        None,
        DeadLetterAlarm(True, 100, 100),
        None,
        None,
        None,
        DeadLetterAlarm(False, 50, 100),
        None,
        DeadLetterAlarm(True, 100, 100),
    ]


@given(depths=st.lists(st.integers(0, 20)), threshold=st.integers(1, 15), data=st.data())
def test_a_depth_that_varies_around_the_threshold_raises_one_alarm(
    depths: list[int], threshold: int, data: st.DataObject
) -> None:
    clear_at = data.draw(st.integers(0, threshold - 1))
    alarm = DepthAlarm(threshold, clear_at=clear_at)
    changes = [change for depth in depths if (change := alarm.update(depth)) is not None]
    for place, change in enumerate(changes):
        assert change.raised is (place % 2 == 0)
        assert change.depth <= clear_at if place % 2 else change.depth >= threshold


@pytest.mark.parametrize(("threshold", "clear_at"), [(0, None), (-1, None), (5, 5), (5, -1)])
def test_bounds_that_can_never_raise_an_alarm_are_rejected(threshold: int, clear_at: int | None) -> None:
    with pytest.raises(ConfigError, match="it must be"):
        DepthAlarm(threshold, clear_at=clear_at)
