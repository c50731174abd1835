"""A worker's listening socket, which outlives the worker as long as there is hope for another.

On Linux each worker has its own, and the kernel goes on dealing connections to it while it is open. So one whose
workers die again and again is shut, and bound anew for the next: that one does not listen before its worker does.
Elsewhere the workers share one socket, and the others answer.
"""

import sys
from socket import socket
from typing import Final

from kpl_integrations.ingest.http.listening import shared_socket

__all__ = ["Door"]

_IS_OWN: Final = sys.platform == "linux"


class Door:
    """One worker's, over all its lives; `listening` is what the first one gets."""

    def __init__(self, listening: socket) -> None:
        self._socket = listening
        self._is_shut = False
        self._host, self._port = listening.getsockname()[:2]

    def descriptor(self) -> int:
        """Return the number of the open file for the next life; OSError if the address cannot be had any more."""
        if self._is_shut:
            self._socket = shared_socket(self._host, self._port)
            self._is_shut = False
        return self._socket.fileno()

    def shut(self) -> None:
        """Have the others get all connections until the next life listens.

        Who waits in its line is cut, and may come again.
        """
        if _IS_OWN and not self._is_shut:
            self._is_shut = True
            self._socket.close()

    def close(self) -> None:
        """Close it for good."""
        self._socket.close()
