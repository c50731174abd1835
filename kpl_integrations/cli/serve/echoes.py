"""Signals that reach a worker twice: from whoever stops its whole group, and passed on by its crew; pure."""

import math
import signal
from typing import Final

__all__ = ["Echoes"]

# A busy crew may pass a signal on late; who wants to hurry comes again after that.
_ECHO_SECONDS: Final = 1.0


class Echoes:
    """Tells which signals are new; one for a process."""

    def __init__(self) -> None:
        self._counted_at: dict[signal.Signals, float] = {}

    def is_echo(self, number: signal.Signals, now: float) -> bool:
        """Say whether the same signal was counted less than 1 s before `now`, in seconds; else it is counted now."""
        if now - self._counted_at.get(number, -math.inf) < _ECHO_SECONDS:
            return True
        self._counted_at[number] = now
        return False
