"""A store inside one process: for several producers of one program, and for tests."""

import itertools
import time
from collections.abc import Callable
from typing import Final

from kpl_core.coordination.store import ABSENT, Listing, Reading, Written

__all__ = ["MemoryStore"]

_shared: Final[dict[str, "MemoryStore"]] = {}


class MemoryStore:
    """A dictionary with versions; no call ever waits, so each is atomic on an event loop.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._versions = itertools.count(1)

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """Return the store of that name in this process."""
        return _shared.setdefault(name, cls())

    async def read(self, name: str) -> Reading:
        """Return one object."""
        body, version = self._objects.get(name, (None, ABSENT))
        return Reading(body, version, self._clock())

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version."""
        known = self._objects.get(name)
        if expected is not None and expected != (ABSENT if known is None else known[1]):
            return Written(None, self._clock())
        version = str(next(self._versions))
        self._objects[name] = (body, version)
        return Written(version, self._clock())

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`."""
        bodies = {name: body for name, (body, _) in self._objects.items() if name.startswith(prefix)}
        return Listing(bodies, self._clock())

    async def delete(self, name: str) -> None:
        """Remove an object."""
        self._objects.pop(name, None)

    async def aclose(self) -> None:
        """Keep everything: another producer of this process may use it."""
