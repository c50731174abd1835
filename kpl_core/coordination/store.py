"""The meeting place: named small objects, and a write that succeeds only if nobody wrote in between.

Four calls are all that a store must offer. Every answer carries the store's own clock, so that
workers whose clocks disagree agree on how old a report is. A version is an opaque word that
differs whenever the object was written again.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

__all__ = ["ABSENT", "CoordinationStore", "Listing", "Reading", "StoreFailed", "Written"]

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
