"""One stream's trouble in the log, for those who look at no result and have no hook.

A line when requests begin to fail, one when that is over, and one for user records that were lost: each once
a minute at most, however many records there are.
"""

import logging
import math
from collections.abc import Mapping
from typing import Final

from kpl_core.pipeline.send_queue import FAILURES_IN_A_ROW
from kpl_core.records.put_records import PutRecordsAnswer, RequestFailure

__all__ = ["QUIET_SECONDS", "TroubleLog"]

_logger: Final = logging.getLogger("kpl_core")
QUIET_SECONDS: Final = 60.0


class TroubleLog:
    """Tells what went wrong with one stream. Instants are seconds on the producer's clock."""

    __slots__ = ("_failed_since", "_failures", "_losses_from", "_outages_from", "_stream", "_told")

    def __init__(self, stream: str) -> None:
        self._stream = stream
        # Requests that failed as a whole, one after the other.
        self._failures = 0
        # Since when they do, if that was told.
        self._failed_since: float | None = None
        # From when on the next line of each kind may come.
        self._outages_from = self._losses_from = -math.inf
        # User records by error code, as they were when the last line told them.
        self._told: dict[str, int] = {}

    def answered(self, answer: PutRecordsAnswer, now: float) -> None:
        """Note how a request ended."""
        if not isinstance(answer, RequestFailure):
            self._failures = 0
            if self._failed_since is not None:
                _logger.info(
                    "requests to stream %r are answered again, after %.1f s", self._stream, now - self._failed_since
                )
                self._failed_since = None
            return
        self._failures += 1
        if self._failures < FAILURES_IN_A_ROW or self._failed_since is not None or now < self._outages_from:
            return
        self._failed_since = now
        self._outages_from = now + QUIET_SECONDS
        _logger.warning(
            "requests to stream %r fail (%s: %s); what another attempt may cure is tried again",
            self._stream,
            answer.code,
            answer.message,
        )

    def look(self, failed: Mapping[str, int], now: float) -> None:
        """Tell of user records that failed since the last line; `failed` counts all of them by error code."""
        if failed and now >= self._losses_from and failed != self._told:
            self.tell_losses(failed)
            self._losses_from = now + QUIET_SECONDS

    def tell_losses(self, failed: Mapping[str, int]) -> None:
        """Tell it now, because there is no later."""
        fresh = {code: count - self._told.get(code, 0) for code, count in failed.items()}
        self._told = dict(failed)
        reasons = ", ".join(f"{count:,} {code}" for code, count in sorted(fresh.items()) if count)
        if reasons:
            _logger.warning(
                "user records of stream %r were not delivered: %s; told once a minute at most, "
                "each delivery has its attempts",
                self._stream,
                reasons,
            )
