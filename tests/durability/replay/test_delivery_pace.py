"""Rate, records in flight and pauses, with literal times."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from kpl_core.durability.delivery_pace import DeliveryPace


def pace(
    *,
    records_per_second: float = 1e6,
    bytes_per_second: float = 1e9,
    in_flight_records: int = 1_000,
    in_flight_bytes: int = 1_000_000,
    chance: Callable[[], float] = lambda: 1.0,
) -> DeliveryPace:
    return DeliveryPace(
        records_per_second=records_per_second,
        bytes_per_second=bytes_per_second,
        in_flight_records=in_flight_records,
        in_flight_bytes=in_flight_bytes,
        chance=chance,
    )


def test_the_record_rate_is_limited_and_ready_at_says_when_to_continue() -> None:
    each = pace(records_per_second=10)
    assert each.try_send(1, 0.0)
    assert not each.try_send(1, 0.0)
    assert each.ready_at(1, 0.0) == pytest.approx(0.1)
    assert each.try_send(1, each.ready_at(1, 0.0))


def test_the_byte_rate_is_limited() -> None:
    each = pace(bytes_per_second=1_000)
    assert each.try_send(500, 0.0)
    assert each.ready_at(100, 0.0) == pytest.approx(0.5)


@pytest.mark.parametrize("bound", [{"in_flight_records": 2}, {"in_flight_bytes": 20}])
def test_records_in_flight_are_bounded_until_a_result_arrives(bound: dict[str, int]) -> None:
    each = pace(**bound)  # type: ignore[arg-type]
    assert each.try_send(10, 0.0)
    assert each.try_send(10, 0.0)
    assert not each.try_send(10, 0.0)
    assert each.ready_at(10, 0.0) == math.inf
    each.succeeded(10)
    assert each.try_send(10, 0.0)


def test_a_record_larger_than_every_bound_is_sent_alone() -> None:
    each = pace(in_flight_bytes=20)
    assert each.try_send(500, 0.0)
    assert not each.try_send(1, 0.0)


def test_pauses_double_up_to_five_seconds_until_a_success() -> None:
    each = pace()
    now, pauses = 0.0, []
    for _ in range(9):
        assert each.try_send(1, now)
        each.failed(1, now)
        pauses.append(each.ready_at(1, now) - now)
        assert not each.try_send(1, now)
        now = each.ready_at(1, now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    each.try_send(1, now)
    each.succeeded(1)
    each.try_send(1, now)
    each.failed(1, now)
    assert each.ready_at(1, now) == now + 0.5


def test_failures_during_a_pause_count_once() -> None:
    each = pace()
    for _ in range(3):
        each.try_send(1, 0.0)
    for at in (0.0, 0.1, 0.2):
        each.failed(1, at)
    assert each.ready_at(1, 0.2) == 0.5


@given(
    sizes=st.lists(st.integers(0, 100_000), max_size=60),
    waits=st.lists(st.floats(0, 1), min_size=60, max_size=60),
)
def test_rate_and_in_flight_bounds_hold_together(sizes: list[int], waits: list[float]) -> None:
    each = pace(records_per_second=50, bytes_per_second=1_000_000, in_flight_records=3, in_flight_bytes=150_000)
    now, flying, sent = 0.0, list[int](), 0
    for size, wait in zip(sizes, waits, strict=False):
        now += wait
        if each.try_send(size, now):
            flying.append(size)
            sent += 1
        elif flying:
            each.succeeded(flying.pop(0))
        assert len(flying) <= 3
        assert sum(flying) <= 150_000
        assert sent <= 50 * 0.1 + 50 * now + 1e-6
