"""An endpoint that accepts connections and never answers, and one that refuses them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield the URL of a port whose connections the kernel accepts and no process reads."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def refusing() -> Iterator[str]:
    """Yield the URL of a port that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
