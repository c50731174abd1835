"""Which connection is closed for a new one when connections run out.

It is the oldest one that has not shown valid credentials and whose request is not complete. So clients with credentials
get in, and keep the connections that they have. A gateway that verifies no credentials closes none.
"""

import asyncio
from itertools import islice
from typing import Final, Protocol

# At most this share of the connections is reserved, and at most so many.
_RESERVED_SHARE: Final = 10
_MOST_RESERVED: Final = 100
_MOST_LOOKED_AT: Final = 64


def reserved_connections(limit: int) -> int:
    """Return how many of `limit` connections are reserved for clients with valid credentials."""
    return min(_MOST_RESERVED, max(1, limit // _RESERVED_SHARE))


class PlacedConnection(Protocol):
    """What the choice needs to know of a connection."""

    transport: asyncio.Transport

    def is_answering(self) -> bool:
        """Return True if the application works on an answer."""

    def is_sending_body(self) -> bool:
        """Return True if the client has not sent all of a request's body."""


class ConnectionPlaces:
    """The open connections of one server without valid credentials, by their transports, the oldest first.

    `reserves`: connections are reserved for clients with valid credentials. A connection over HTTP/2 may have many
    requests, so they are counted: `http_2_requests` that run, `unverified_streams` of connections without verified
    credentials, and `unsent_bytes` of answers that wait for their clients.
    """

    def __init__(self, *, reserves: bool = True) -> None:
        self.reserves = reserves
        self.unverified: dict[asyncio.BaseTransport, PlacedConnection] = {}
        # Their clients send no more and wait for an answer, or have gone, which looks the same.
        self.half_closed: dict[asyncio.BaseTransport, PlacedConnection] = {}
        self.http_2_requests = self.unverified_streams = self.unsent_bytes = 0

    def take(self, connection: PlacedConnection, open_connections: int, limit: int | None) -> None:
        """Give a new connection a place. Of so many open ones, itself included, at most `limit` may be."""
        self.unverified[connection.transport] = connection
        if limit is None or open_connections <= limit - reserved_connections(limit):
            return
        if self.half_closed:
            self.half_closed.pop(next(iter(self.half_closed))).transport.abort()
        elif self.reserves:
            self._evict(connection)

    def keep(self, connection: PlacedConnection) -> None:
        """Keep a connection: it has shown valid credentials, or has ended."""
        self.unverified.pop(connection.transport, None)

    def replace(self, by: PlacedConnection) -> None:
        """Give the place of the connection with the same transport to this one, which is as new as it."""
        if by.transport in self.unverified:
            self.unverified[by.transport] = by

    def _evict(self, newest: PlacedConnection) -> None:
        """Close the oldest of the others: an idle one, else one that sends a body."""
        others = [each for each in islice(self.unverified.values(), _MOST_LOOKED_AT) if each is not newest]
        idle = (each for each in others if not each.is_answering())
        evicted = next(idle, None) or next((each for each in others if each.is_sending_body()), None)
        if evicted is not None:
            self.keep(evicted)
            evicted.transport.abort()
