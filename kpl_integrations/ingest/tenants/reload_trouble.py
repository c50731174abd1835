"""What went wrong when the tenants were to be read anew: told, but not every second."""

import logging
from typing import Final

__all__ = ["QUIET_SECONDS", "ReloadTrouble"]

_logger: Final = logging.getLogger("kpl_integrations.ingest.tenants")
# A directory that works every other time would fill the log as well as one that never does.
QUIET_SECONDS: Final = 60.0


class ReloadTrouble:
    """Tells each kind of exception once until the directory works again, and at most once a minute.

    Instants are in seconds, on any clock that only goes forward.
    """

    __slots__ = ("_told",)

    def __init__(self) -> None:
        # When each kind was told last.
        self._told: dict[type[Exception], float] = {}

    def failed(self, error: Exception, now: float) -> None:
        """Take note of what a directory raised."""
        kind = type(error)
        if kind in self._told:
            return
        self._told[kind] = now
        _logger.warning(
            "the tenants could not be read anew (%s); they stay as they are, and it is tried again",
            kind.__qualname__,
            exc_info=error,
        )

    def worked(self, now: float) -> None:
        """Take note that it works, so that later trouble is trouble anew."""
        if self._told:
            self._told = {kind: told for kind, told in self._told.items() if now - told < QUIET_SECONDS}
