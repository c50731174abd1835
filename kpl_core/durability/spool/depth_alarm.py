"""When the dead-letter queue is deep enough to wake somebody, once; pure.

The alarm is raised when the depth reaches `threshold` and cleared when it falls to
`clear_at`: between the two nothing changes, so a depth that trembles around the threshold
rings once.
"""

from enum import StrEnum

import msgspec

from kpl_core.errors import ConfigError

__all__ = ["AlarmChange", "DepthAlarm", "Escalation"]


class AlarmChange(StrEnum):
    """What a new depth changed."""

    RAISED = "raised"
    CLEARED = "cleared"


class Escalation(msgspec.Struct, frozen=True):
    """The fact told to whoever asked to be woken."""

    change: AlarmChange
    depth: int
    threshold: int


class DepthAlarm:
    """Watches a depth; `clear_at` defaults to half the threshold."""

    def __init__(self, threshold: int, *, clear_at: int | None = None) -> None:
        clear_at = threshold // 2 if clear_at is None else clear_at
        if threshold < 1:
            message = f"threshold is {threshold}; it must be at least 1 dead letter"
            raise ConfigError(message)
        if not 0 <= clear_at < threshold:
            message = f"clear_at is {clear_at}; it must be between 0 and below the threshold, {threshold}"
            raise ConfigError(message)
        self.threshold = threshold
        self.clear_at = clear_at
        self.raised = False

    def update(self, depth: int) -> Escalation | None:
        """Note the present depth; return what it changed, None for nothing."""
        if not self.raised and depth >= self.threshold:
            self.raised = True
            return Escalation(AlarmChange.RAISED, depth, self.threshold)
        if self.raised and depth <= self.clear_at:
            self.raised = False
            return Escalation(AlarmChange.CLEARED, depth, self.threshold)
        return None
