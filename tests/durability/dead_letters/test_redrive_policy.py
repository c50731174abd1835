"""Which letters are redriven automatically, and when."""

import math

import pytest
from hypothesis import given, strategies as st

from kpl_core.durability.dead_letters.dead_letter_queue import redrive_at
from kpl_core.errors import ConfigError
from kpl_core.options.reliability import DeadLetterOptions
from kpl_core.records.record_result import REASONS, Reason

WAITING_FOR_A_PERSON = {"invalid", "oversize", "unserialisable"}


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_decides_whether_a_letter_is_ever_due(reason: Reason) -> None:
    due_at = redrive_at(DeadLetterOptions(), reason, redrives=0, now=100.0, chance=lambda: 0.5)
    assert (due_at is None) is (reason in WAITING_FOR_A_PERSON)


def test_the_longest_wait_doubles_up_to_the_cap() -> None:
    options = DeadLetterOptions(redrive_base_seconds=10, redrive_cap_seconds=60)
    waits = [redrive_at(options, "ttl", redrives=count, now=0.0, chance=lambda: 1.0) for count in range(5)]
    assert waits == [10, 20, 40, 60, 60]


@given(redrives=st.integers(0, 10_000), chance=st.floats(0, 1), now=st.floats(0, 4e9))
def test_a_letter_is_due_within_the_cap_after_any_number_of_failures(redrives: int, chance: float, now: float) -> None:
    options = DeadLetterOptions(redrive_base_seconds=1, redrive_cap_seconds=30)
    due_at = redrive_at(options, "throttled", redrives=redrives, now=now, chance=lambda: chance)
    assert due_at is not None
    assert now <= due_at <= now + 30


def test_after_max_redrives_a_letter_is_never_due() -> None:
    options = DeadLetterOptions(max_redrives=2)
    due = [redrive_at(options, "ttl", redrives=count, now=0.0, chance=lambda: 0.0) for count in range(3)]
    assert due == [0.0, 0.0, None]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("redrive_base_seconds", 0.0),
        ("redrive_base_seconds", math.inf),
        ("redrive_cap_seconds", 1.0),
        ("redrive_cap_seconds", math.nan),
        ("max_redrives", -1),
    ],
)
def test_options_out_of_bounds_are_rejected(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{option} is"):
        DeadLetterOptions(**{option: value})  # type: ignore[arg-type]
