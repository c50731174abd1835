"""The listening sockets of the gateway.

A single process has one socket. On Linux each worker has its own socket on the same port, and the kernel distributes
new connections over them (SO_REUSEPORT). The supervisor keeps all sockets open, and every worker has all of them: while
one is dead, another accepts its connections (`SpareSockets`). On other systems the workers share one socket.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

if sys.platform != "win32":
    import resource

BACKLOG: Final = 2_048
# Whether each worker has a listening socket of its own.
HAS_OWN_SOCKETS: Final = sys.platform == "linux"
# How many connections of another worker's socket are accepted in one round of the loop, and the pause without
# descriptors for more.
_ACCEPTS: Final = 8
_PAUSE_SECONDS: Final = 1.0
# Descriptors for files, for connections to Kinesis, and for accepting a connection before another one is closed.
_OTHER_DESCRIPTORS: Final = 128

_log: Final = logging.getLogger(__name__)


def connection_limit(max_connections: int) -> int:
    """Return how many connections this process can have, and raise its limit of open files for them if possible.

    Without descriptors left, no client could connect and the gateway could not reach Kinesis.
    """
    if sys.platform == "win32":
        return max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            most = max(1, soft - _OTHER_DESCRIPTORS)
            _log.warning("max_connections is %d, but the limit of open files allows %d", max_connections, most)
            return most
    return max_connections


def listening_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Return `count` sockets that listen on one port; raises OSError if the address is not available."""
    # Bind exclusively first. A shared port would admit a second gateway of the same user, which is a mistake.
    with bound_socket(host, port) as first:
        port = first.getsockname()[1]
        if not HAS_OWN_SOCKETS:
            first.listen(BACKLOG)
            return [first.dup() for _ in range(count)]
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(bound_socket(host, port, is_shared=True))
            sockets[-1].listen(BACKLOG)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


class SpareSockets:
    """The listening sockets of the other workers. This one accepts from them while those workers are dead.

    `serve` gets each connection; it runs in the event loop, and its errors concern that connection only.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._accepting: set[int] = set()
        self._serve: Callable[[socket.socket], object] = socket.socket.close

    def start(self, serve: Callable[[socket.socket], object]) -> None:
        """Note what serves the connections. Call it before `accept_from`."""
        self._serve = serve
        self._loop = asyncio.get_running_loop()

    def accept_from(self, numbers: Collection[int]) -> None:
        """Accept from the sockets of these workers, and from no others; after `close` from none."""
        for number in self._accepting - set(numbers):
            self._loop.remove_reader(self._sockets[number])
        wanted = set(numbers) & self._sockets.keys()
        added, self._accepting = wanted - self._accepting, wanted
        for number in added:
            listening = self._sockets[number]
            listening.settimeout(0)
            # It does not listen if its worker died before it was ready.
            listening.listen(BACKLOG)
            self._watch(number)

    def close(self) -> None:
        """Accept no more, and close the sockets: if their workers end, no connection waits here."""
        self.accept_from(())
        for each in self._sockets.values():
            each.close()
        self._sockets = {}

    def _watch(self, number: int) -> None:
        if number in self._accepting:
            self._loop.add_reader(self._sockets[number], partial(self._accept, number))

    def _accept(self, number: int) -> None:
        listening = self._sockets[number]
        for _ in range(_ACCEPTS):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # No descriptor is left. The connections wait for one, or for their own worker.
                _log.warning("connections of worker %d cannot be accepted: %s", number, error.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_SECONDS, self._watch, number)
                return
            connection.settimeout(0)
            self._serve(connection)


def bound_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet; raises OSError if the address is not available.

    `is_shared`: one more socket for a port of `listening_sockets`; Linux only.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
