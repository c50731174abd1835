"""The meeting place: named small objects, and a write that succeeds only if nobody wrote in between.

Four calls are all that a store must offer. Every answer carries the store's own clock, so that
workers whose clocks disagree agree on how old a report is. A version is an opaque word that
differs whenever the object was written again.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

__all__ = ["ABSENT", "CoordinationStore", "Listing", "MemoryStore", "Reading", "StoreFailed", "Written"]

# As `expected` of a write: there must be no such object.
ABSENT: Final = ""


class StoreFailed(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The store could not be used this time. The text is one sentence and holds no secret.

    Args:
        reason: a word for metrics: "down", "slow", "denied", "missing", "garbage", "clock" or "limit".
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Reading(NamedTuple):
    """An object, `body` None if there is none; `at` is the store's clock, seconds since 1970."""

    body: bytes | None
    version: str
    at: float


class Written(NamedTuple):
    """The new version of an object; None: the condition did not hold, and nothing was written."""

    version: str | None
    at: float


class Listing(NamedTuple):
    """The objects whose names begin alike, by name."""

    bodies: Mapping[str, bytes]
    at: float


class CoordinationStore(Protocol):
    """What a worker needs of a store. Each call raises StoreFailed, and nothing else, if it cannot answer."""

    async def read(self, name: str) -> Reading:
        """Return one object."""

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object: in any case (None), if there is none (ABSENT), or if it still has a version."""

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`; one deleted meanwhile may be missing."""

    async def delete(self, name: str) -> None:
        """Remove an object; one that does not exist is removed already."""

    async def aclose(self) -> None:
        """Give up connections; the store is not used afterwards."""


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
