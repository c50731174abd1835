"""A label with a bound on its values: whoever comes late is "other"."""

from typing import Final

__all__ = ["OTHER", "BoundedLabel"]

OTHER: Final = "other"


class BoundedLabel:
    """Lets the first `limit` distinct values through and calls every further one "other".

    A monitoring system pays for every combination of label values for ever; a stream that is
    resharded daily, or an error code with an id in it, must not be what fills its memory.
    """

    __slots__ = ("_known", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """Return `value`, or "other"."""
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value
