"""What is on its way to Kinesis when an application's life ends: lines and spans that have senders of their own.

uvicorn, alone or under gunicorn, ends a process by the very signal it was sent, once the application has shut
down: nothing registered with `atexit` runs then. The end of the lifespan is the last moment there is.
"""

import weakref
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["begin_last_flushes", "has_parts", "take_part"]


class LastFlush(Protocol):
    """Who sends in the background."""

    def begin_last_flush(self) -> Callable[[], object] | None:
        """Begin to send what is there; return what waits for it, in bounded time, None where nothing is."""


_parts: Final["weakref.WeakSet[LastFlush]"] = weakref.WeakSet()


def take_part(part: LastFlush) -> None:
    """Be flushed at the end of each lifespan, as long as anybody refers to `part`."""
    _parts.add(part)


def has_parts() -> bool:
    """Say whether anybody takes part."""
    return bool(_parts)


def begin_last_flushes() -> list[Callable[[], object]]:
    """Let all begin at once; return what waits for each, to be called in a thread that may wait."""
    return [wait for part in list(_parts) if (wait := part.begin_last_flush()) is not None]
