"""Which dead letters are tried again by themselves, and when; pure.

Exponential backoff with full jitter, per letter: `chance * min(cap, base * 2**redrives)`.
What no retry can cure waits for a person.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from kpl_core.errors import ConfigError
from kpl_core.pipeline.backoff import backoff_seconds
from kpl_core.records.failure_reason import INCURABLE, REASONS, Reason

__all__ = ["REDRIVEN_AUTOMATICALLY", "RedrivePolicy"]

# What fails again whenever it is tried, `kpl dlq redrive` tries on demand.
REDRIVEN_AUTOMATICALLY: Final[Mapping[Reason, bool]] = MappingProxyType(
    {reason: reason not in INCURABLE for reason in REASONS}
)


class RedrivePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How patiently letters are tried again.

    Args:
        base_seconds: the longest wait before the first redrive; each further one may wait twice as long.
        cap_seconds: the longest wait of all.
        max_redrives: after as many the letter waits for a person; None: for ever.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    base_seconds: float = 10.0
    cap_seconds: float = 3_600.0
    max_redrives: int | None = None

    def __post_init__(self) -> None:
        """Check every bound."""
        if not 0.0 < self.base_seconds < math.inf:
            message = f"base_seconds is {self.base_seconds!r}; it must be a finite number of seconds above 0"
            raise ConfigError(message)
        if not self.base_seconds <= self.cap_seconds < math.inf:
            message = f"cap_seconds is {self.cap_seconds!r}; it must be at least base_seconds ({self.base_seconds:g})"
            raise ConfigError(message)
        if self.max_redrives is not None and self.max_redrives < 0:
            message = f"max_redrives is {self.max_redrives}; it must be 0 or more, or None"
            raise ConfigError(message)

    def due_at(self, reason: Reason, *, redrives: int, now: float, chance: Callable[[], float]) -> float | None:
        """Return when a letter that was redriven `redrives` times is due, None for never."""
        if not REDRIVEN_AUTOMATICALLY[reason]:
            return None
        if self.max_redrives is not None and redrives >= self.max_redrives:
            return None
        return now + backoff_seconds(
            redrives + 1, base_seconds=self.base_seconds, cap_seconds=self.cap_seconds, chance=chance()
        )
