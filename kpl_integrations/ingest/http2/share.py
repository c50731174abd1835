"""What one HTTP/2 connection may have of what all connections have together, which `http/places.py` counts.

A connection without verified credentials has little, so that such clients cannot take the memory and the tasks of those
that have them. Each connection may have one request in any case.
"""

from typing import Final

from kpl_core.options.kinesis_limits import MIB
from kpl_integrations.ingest.http.places import ConnectionPlaces

MOST_STREAMS: Final = 100
"""The most requests in progress on one connection."""
MOST_UNVERIFIED: Final = 10
"""The most requests of a connection without verified credentials that run, or whose answers wait for their client."""
MOST_UNVERIFIED_STREAMS: Final = 10_000
"""The most requests in progress on all such connections."""
MOST_UNSENT_BYTES: Final = 64 * MIB
"""The most bytes of answers that wait for their clients, on all connections."""
FEW_UNSENT_BYTES: Final = 65_536
"""What each connection may have of them in any case."""


class ConnectionShare:
    """The requests and unsent bytes of one connection. `most_connections` is a bound on all requests that run, too."""

    def __init__(self, places: ConnectionPlaces, most_connections: int | None) -> None:
        self._places = places
        self._most_connections = most_connections
        self._is_verified = not places.reserves

    def has_place(self, in_progress: int) -> bool:
        """Return True if one more request may be in progress beside so many."""
        if in_progress >= MOST_STREAMS:
            return False
        return self._is_verified or not in_progress or self._places.unverified_streams < MOST_UNVERIFIED_STREAMS

    def begins(self) -> None:
        """Count a request in progress."""
        if not self._is_verified:
            self._places.unverified_streams += 1

    def ends(self) -> None:
        """Count it no more."""
        if not self._is_verified:
            self._places.unverified_streams -= 1

    def verify(self, in_progress: int) -> None:
        """Note that the client has shown valid credentials."""
        if not self._is_verified:
            self._places.unverified_streams -= in_progress
            self._is_verified = True

    def may_run(self, running: int, unsent: int) -> bool:
        """Return True if one more request may run beside so many, and so many unsent answers."""
        most = self._most_connections
        if most is not None and self._places.http_2_requests >= most:
            return not running
        return self._is_verified or running + unsent < MOST_UNVERIFIED

    def waits(self, size_bytes: int) -> None:
        """Count bytes of answers that wait for their client, or no longer (negative)."""
        self._places.unsent_bytes += size_bytes

    def may_wait(self, unsent_bytes: int) -> bool:
        """Return True if so many bytes of this connection may wait."""
        return unsent_bytes <= FEW_UNSENT_BYTES or self._places.unsent_bytes <= MOST_UNSENT_BYTES
