"""The store through which workers coordinate: small named objects, and a conditional write.

A store has four calls. Each answer carries the store's own clock, so that workers with different clocks agree on the
age of a report. A version is an opaque string that changes with every write of the object.

`MemoryStore` is the store inside one process. The others are in `stores/`, one file each; `stores/__init__.py` opens
them by URL, with the `open_store` of each file.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import SplitResult

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

# The group of a store's URL that names none.
DEFAULT_GROUP: Final = "default"
# Seconds to connect to a store, and to wait for an answer: a sync must fail within seconds, and is retried anyway.
CONNECT_SECONDS: Final = 2.0
# How many calls of one process a store answers at a time. With fewer, the reports of a thousand workers cannot be read
# within an interval at 100 ms a call.
PARALLEL_CALLS: Final = 32
# As `expected` of a write: the object must not exist.
ABSENT: Final = ""


class StoreFailed(Exception):  # noqa: N818 - the name says what happened
    """The store could not be used this time. The message is one sentence without secrets.

    Args:
        reason: the metric's label: "down", "slow", "denied", "missing", "garbage", "clock" or "limit".
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Reading(NamedTuple):
    """An object; `body` is None if it does not exist. `at` is the store's clock, seconds since 1970."""

    body: bytes | None
    version: str
    at: float


class Written(NamedTuple):
    """The new version of an object; None if the condition failed and nothing was written."""

    version: str | None
    at: float


class Listing(NamedTuple):
    """The objects whose names have one prefix, by name."""

    bodies: Mapping[str, bytes]
    at: float


class CoordinationStore(Protocol):
    """The calls that a worker needs of a store. Each call raises only `StoreFailed`."""

    async def read(self, name: str) -> Reading:
        """Return one object."""

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object: always (None), only if it does not exist (ABSENT), or only if it still has this version."""

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`; one that is deleted meanwhile may be missing."""

    async def delete(self, name: str) -> None:
        """Delete an object; deleting one that does not exist succeeds."""

    async def aclose(self) -> None:
        """Close connections. The store is not used afterwards."""


class StoreAddress(NamedTuple):
    """A store's URL and its query, and the session and options of an AWS client (see `stores.open_store`)."""

    parts: SplitResult
    query: dict[str, str]
    session: "AioSession | None"
    client_options: dict[str, Any]


_shared: Final[dict[str, "MemoryStore"]] = {}


async def open_store(address: StoreAddress) -> "MemoryStore":
    """Open `memory://name`."""
    return MemoryStore.named(address.parts.netloc + address.parts.path)


class MemoryStore:
    """A store inside one process: for several producers of one program, and for tests.

    It is a dictionary with versions. No call waits, so each is atomic on an event loop.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._versions = itertools.count(1)

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """Return this process's store of that name."""
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
        """Keep all objects, because another producer of this process may use them."""
