"""A loop with short iterations is measured less often, and a delay is found soon after it begins. Virtual time."""

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from kpl_integrations.ingest.http.read_turns import ReadTurns
from tests.support.virtual_time import run_in_virtual_time


def ticks_of_a_second(monkeypatch: pytest.MonkeyPatch, iteration: Callable[[float], float]) -> tuple[list[float], bool]:
    """Return when an iteration was measured, and whether turns began; `iteration` says how long each one is.

    Requests are answered all the time.
    """

    async def scene() -> tuple[list[float], bool]:
        now = asyncio.get_running_loop().time
        measured: list[float] = []
        turns = ReadTurns(clock=now)

        def begin_iteration() -> None:
            measured.append(now())
            began = now() - iteration(now())
            turns._observe(began, began)  # noqa: SLF001 - as at the end of the iteration

        monkeypatch.setattr(time, "thread_time", now)
        monkeypatch.setattr(turns, "_begin_iteration", begin_iteration)
        turns.wake(itertools.count().__next__)
        await asyncio.sleep(1.0)
        found = measured.copy(), turns.is_active
        turns.end()
        await asyncio.sleep(0.2)
        return found

    return run_in_virtual_time(scene, backend="asyncio")


def test_short_iterations_are_measured_ten_times_a_second(monkeypatch):
    measured, is_active = ticks_of_a_second(monkeypatch, lambda _: 0.001)
    assert 9 <= len(measured) <= 12
    assert not is_active


def test_longer_iterations_are_measured_fifty_times_a_second(monkeypatch):
    measured, is_active = ticks_of_a_second(monkeypatch, lambda _: 0.003)
    assert 45 <= len(measured) <= 52
    assert not is_active


def test_iterations_that_become_long_are_found_within_a_fifth_of_a_second(monkeypatch):
    measured, is_active = ticks_of_a_second(monkeypatch, lambda now: 0.001 if now < 0.5 else 0.01)
    assert is_active
    # Turns begin after a tick that was planned before, and the window of the delay. Then no iteration is measured.
    assert measured[-1] < 0.5 + 0.1 + 0.1 + 0.021


def test_a_loop_without_answers_is_not_measured(monkeypatch):
    async def scene() -> bool:
        turns = ReadTurns(clock=asyncio.get_running_loop().time)
        turns.wake(lambda: 7)
        await asyncio.sleep(1.0)
        return turns.is_attentive

    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    # So the next request wakes it.
    assert run_in_virtual_time(scene, backend="asyncio")
