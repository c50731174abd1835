"""A port for a program that a test starts and that cannot choose one itself."""

import random
import socket

# For port 0 the system gives out higher ones (32768 and up on Linux), so no server on port 0 can get one of these.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    """Return a random port of 127.0.0.1 that nothing listens on."""
    # Not from the shared generator: a seed would give two processes the same ports.
    chance = random.SystemRandom()
    while True:
        port = chance.choice(_PORTS)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
