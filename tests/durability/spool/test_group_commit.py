"""When a group commits, with literal times."""

import math

import pytest
from hypothesis import given, strategies as st

from kpl_core.durability.spool.group_commit import GroupCommit


def group() -> GroupCommit:
    return GroupCommit(interval=0.004, max_records=100, max_bytes=1_000)


def test_without_work_no_commit_is_due() -> None:
    assert group().due_at() == math.inf


def test_later_appends_do_not_extend_the_interval_of_the_first() -> None:
    each = group()
    each.add(records=1, size_bytes=10, now=5.0)
    each.add(records=1, size_bytes=10, now=5.003)
    assert each.due_at() == 5.004


def test_enough_records_or_bytes_commit_at_once() -> None:
    for records, size_bytes in ((100, 0), (0, 1_000)):
        each = group()
        each.add(records=records, size_bytes=size_bytes, now=5.0)
        assert each.due_at() == -math.inf


def test_work_scheduled_for_later_does_not_delay_new_work() -> None:
    each = group()
    each.add(records=0, size_bytes=0, now=6.0)
    assert each.due_at() == 6.004
    each.add(records=1, size_bytes=1, now=5.0)
    assert each.due_at() == 5.004


def test_a_new_group_starts_after_a_commit() -> None:
    each = group()
    each.add(records=100, size_bytes=0, now=5.0)
    each.committed()
    assert each.due_at() == math.inf


@pytest.mark.parametrize("full", [{"records": 100, "size_bytes": 0}, {"records": 0, "size_bytes": 1_000}])
def test_a_new_group_counts_from_zero(full: dict[str, int]) -> None:
    each = group()
    each.add(**full, now=5.0)
    each.committed()
    nearly = {name: max(0, most - 1) for name, most in full.items()}
    each.add(**nearly, now=6.0)
    assert each.due_at() == 6.004
    each.add(**{name: full[name] - nearly[name] for name in full}, now=6.0)
    assert each.due_at() == -math.inf


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 600), st.floats(0, 10)), min_size=1))
def test_no_work_waits_longer_than_the_interval(work: list[tuple[int, int, float]]) -> None:
    each = group()
    for records, size_bytes, now in work:
        each.add(records=records, size_bytes=size_bytes, now=now)
    assert each.due_at() <= min(now for _, _, now in work) + 0.004
