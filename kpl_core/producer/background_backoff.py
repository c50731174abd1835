"""How long calls beside the journey wait before they are tried again: growing, with jitter, for ever.

From 1 s on, 1.5 times as long each (KPL, `shard_map.h`). Between half and the whole of that: never a
storm, never much too late.
"""

from collections.abc import Callable
from typing import Final

__all__ = ["BackgroundBackoff"]

FIRST_SECONDS: Final = 1.0
GROWTH: Final = 1.5


class BackgroundBackoff:
    """The waits of one call that fails again and again. `chance` draws from [0, 1)."""

    def __init__(self, chance: Callable[[], float], *, longest_seconds: float) -> None:
        self._chance = chance
        self._longest_seconds = longest_seconds
        self._seconds = FIRST_SECONDS

    def next_seconds(self) -> float:
        """Return how long to wait before the next attempt."""
        seconds = self._seconds * (1 + self._chance()) / 2
        self._seconds = min(self._longest_seconds, self._seconds * GROWTH)
        return seconds
