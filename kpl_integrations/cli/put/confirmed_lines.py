"""How much of the input has arrived, counted from its beginning without a gap.

Results come in any order; a later run may go on only after a line before which
every line is delivered.
"""

from collections import deque
from typing import NamedTuple

from kpl_core import Delivery, RecordResult

__all__ = ["ConfirmedLines"]


class _Line(NamedTuple):
    """A line that was put. Its own size is what lies between `begins_at` and the next."""

    number: int
    begins_at: int
    delivery: Delivery


class ConfirmedLines:
    """Follows the lines of an input in their order; numbers are from 1, `begins_at` in bytes from the beginning."""

    def __init__(self) -> None:
        self._last_number = 0
        self._last_end = 0
        self._unconfirmed: deque[_Line] = deque()
        self.first_failure: tuple[int, RecordResult] | None = None

    def put(self, number: int, begins_at: int, size_bytes: int, delivery: Delivery) -> None:
        """Follow the delivery of a line."""
        self._unconfirmed.append(_Line(number, begins_at, delivery))
        self.passed_over(number, begins_at, size_bytes)

    def passed_over(self, number: int, begins_at: int, size_bytes: int) -> None:
        """Note a line that has nothing to deliver: it is blank, or an earlier run confirmed it."""
        self._last_number = number
        self._last_end = begins_at + size_bytes

    @property
    def line_count(self) -> int:
        """Return after how many lines of the input another run may go on."""
        return self._unconfirmed[0].number - 1 if self._unconfirmed else self._last_number

    @property
    def byte_count(self) -> int:
        """Return the size of those lines, with their ends."""
        return self._unconfirmed[0].begins_at if self._unconfirmed else self._last_end

    def advance(self) -> None:
        """Look at the results that came meanwhile, up to the first line that has none or failed."""
        while self._unconfirmed and self.first_failure is None:
            line = self._unconfirmed[0]
            if not line.delivery.done:
                return
            result = line.delivery.result()
            if result.successful:
                self._unconfirmed.popleft()
            else:
                self.first_failure = line.number, result
