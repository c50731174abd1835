"""How many bytes of bodies may be on their way at once, from all clients together; pure.

One body has a bound of its own; ten thousand connections that each send one slowly would hold ten thousand times that.
Only what waits for its rest counts: a body that came whole is decoded in the same step.
"""

from typing import Final

from kpl_core.options.kinesis_limits import MIB

__all__ = ["BodyRoom"]

_MOST_BYTES: Final = 256 * MIB


class BodyRoom:
    """Counts the bytes received of bodies that are not whole."""

    __slots__ = ("held_bytes", "most_bytes")

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0

    def try_take(self, size_bytes: int) -> bool:
        """Take room for another piece; False if there is none. The first body always has room."""
        if self.held_bytes and self.held_bytes + size_bytes > self.most_bytes:
            return False
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give back what was taken."""
        self.held_bytes -= size_bytes
