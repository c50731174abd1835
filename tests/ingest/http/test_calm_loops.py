"""A loop with little to do is measured less often, and a delay is found as soon as it uses its core. Virtual time."""

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from kpl_integrations.ingest.http.read_turns import ReadTurns
from tests.virtual_time import run_in_virtual_time


def ticks_of_a_second(monkeypatch: pytest.MonkeyPatch, used: Callable[[float], float]) -> list[float]:
    """Return when the timer ran, with `used` CPU seconds after so many seconds, while requests are answered."""

    async def scene() -> list[float]:
        now = asyncio.get_running_loop().time
        ticks: list[float] = []

        def plan_tick(at: float) -> None:
            ticks.append(at)
            planned(at)

        monkeypatch.setattr(time, "thread_time", lambda: used(now()))
        turns = ReadTurns(clock=now)
        planned = turns._plan_tick  # noqa: SLF001 - its timer has no other effect
        monkeypatch.setattr(turns, "_plan_tick", plan_tick)
        turns.wake(itertools.count().__next__)
        await asyncio.sleep(1.0)
        turns.end()
        await asyncio.sleep(0.2)
        return ticks

    return run_in_virtual_time(scene, backend="asyncio")


def test_a_loop_that_uses_a_fifth_of_a_core_is_measured_ten_times_a_second(monkeypatch):
    assert 9 <= len(ticks_of_a_second(monkeypatch, lambda now: 0.2 * now)) <= 12


def test_a_loop_that_uses_half_a_core_is_measured_fifty_times_a_second(monkeypatch):
    assert 45 <= len(ticks_of_a_second(monkeypatch, lambda now: 0.5 * now)) <= 52


def test_a_loop_that_becomes_busy_is_measured_often_within_a_tenth_of_a_second(monkeypatch):
    ticks = ticks_of_a_second(monkeypatch, lambda now: 0.05 * now + max(0.0, now - 0.5))
    busy = [at for at in ticks if at > 0.6 + 0.021]
    assert len([at for at in ticks if at < 0.5]) <= 7
    assert all(later - before < 0.021 for before, later in itertools.pairwise(busy))


def test_a_loop_without_answers_is_not_measured(monkeypatch):
    async def scene() -> bool:
        turns = ReadTurns(clock=asyncio.get_running_loop().time)
        turns.wake(lambda: 7)
        await asyncio.sleep(1.0)
        return turns.is_attentive

    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    # So the next request wakes it.
    assert run_in_virtual_time(scene, backend="asyncio")
