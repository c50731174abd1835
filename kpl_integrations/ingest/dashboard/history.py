"""The last 15 minutes of a gateway's rates and delays, so that a page which is opened shows them. Pure, and bounded."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

KEPT_SECONDS: Final = 900.0
STEP_SECONDS: Final = 5.0
"""The time between two points, at least."""


class ChartHistory:
    """Points of event documents. There are at most `KEPT_SECONDS / STEP_SECONDS` of them, and one more."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, dict[str, Any]]] = deque()

    @property
    def latest_at(self) -> float | None:
        """The instant of the latest point, None without one."""
        return self._points[-1][0] if self._points else None

    def add(self, document: Mapping[str, Any], now: float) -> None:
        """Keep what the charts show of a document, unless the latest point is too recent, and forget old points."""
        latest = self.latest_at
        if latest is None or now - latest >= STEP_SECONDS:
            shown = document["now"]
            point = {"accepted": shown["accepted"], "delivered": shown["delivered"], **document["late"]}
            self._points.append((now, point))
        while self._points and now - self._points[0][0] > KEPT_SECONDS:
            self._points.popleft()

    def shown(self, now: float) -> list[dict[str, Any]]:
        """Return the points, the oldest first, each with its age in seconds as `ago`."""
        return [{"ago": now - at, **point} for at, point in self._points]
