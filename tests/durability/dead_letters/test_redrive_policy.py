"""Which letters are redriven automatically, and when."""

import math

import pytest
from hypothesis import given, strategies as st

from kpl_core.durability.dead_letters.dead_letter_queue import REDRIVEN_AUTOMATICALLY, RedrivePolicy
from kpl_core.durability.spool.envelope import REASONS, Reason
from kpl_core.errors import ConfigError


def test_every_reason_has_a_row() -> None:
    assert set(REDRIVEN_AUTOMATICALLY) == set(REASONS)


@pytest.mark.parametrize(("reason", "automatically"), REDRIVEN_AUTOMATICALLY.items())
def test_each_reason_decides_whether_a_letter_is_ever_due(reason: Reason, automatically: bool) -> None:
    due_at = RedrivePolicy().due_at(reason, redrives=0, now=100.0, chance=lambda: 0.5)
    assert (due_at is not None) is automatically


def test_the_longest_wait_doubles_up_to_the_cap() -> None:
    policy = RedrivePolicy(base_seconds=10, cap_seconds=60)
    waits = [policy.due_at("ttl", redrives=count, now=0.0, chance=lambda: 1.0) for count in range(5)]
    assert waits == [10, 20, 40, 60, 60]


@given(redrives=st.integers(0, 10_000), chance=st.floats(0, 1), now=st.floats(0, 4e9))
def test_a_letter_is_due_within_the_cap_after_any_number_of_failures(redrives: int, chance: float, now: float) -> None:
    due_at = RedrivePolicy(base_seconds=1, cap_seconds=30).due_at(
        "throttled", redrives=redrives, now=now, chance=lambda: chance
    )
    assert due_at is not None
    assert now <= due_at <= now + 30


def test_after_max_redrives_a_letter_is_never_due() -> None:
    policy = RedrivePolicy(max_redrives=2)
    due = [policy.due_at("ttl", redrives=count, now=0.0, chance=lambda: 0.0) for count in range(3)]
    assert due == [0.0, 0.0, None]


@pytest.mark.parametrize(
    "options",
    [
        {"base_seconds": 0.0},
        {"base_seconds": math.inf},
        {"cap_seconds": 1.0},
        {"cap_seconds": math.nan},
        {"max_redrives": -1},
    ],
)
def test_a_policy_out_of_bounds_is_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="it must be"):
        RedrivePolicy(**options)  # type: ignore[arg-type]
