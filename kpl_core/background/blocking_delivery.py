"""The handle of a user record put from a thread, and what it waits in until the loop takes it."""

import threading
from contextvars import Context
from typing import TYPE_CHECKING

import msgspec

from kpl_core.producer.delivery import Delivery
from kpl_core.producer.lifecycle import require_timeout
from kpl_core.records.record_result import Attempt, RecordResult
from kpl_core.records.user_record import UserRecord

if TYPE_CHECKING:
    from kpl_core.producer.producer import Producer

__all__ = ["BlockingDelivery", "Parcel"]


class BlockingDelivery:
    """The handle of one user record put from a thread."""

    __slots__ = ("_changed", "_delivery", "_failed")

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._delivery: Delivery | None = None
        self._failed: RecordResult | None = None

    @property
    def done(self) -> bool:
        """Say whether the result is known."""
        with self._changed:
            return self._peek() is not None

    def result(self, timeout: float | None = None) -> RecordResult:
        """Wait for the result, `timeout` seconds at most; works after the producer closed too.

        Raises:
            TimeoutError: the result is not known yet.
            ValueError: the timeout is negative or NaN.
        """
        require_timeout(timeout)
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            if not self._changed.wait_for(lambda: self._peek() is not None, timeout):
                message = f"this user record has no result after {timeout} s; wait longer, or flush the producer"
                raise TimeoutError(message)
            result = self._peek()
        assert result is not None  # noqa: S101 - waited for
        return result

    def _peek(self) -> RecordResult | None:
        if self._failed is not None:
            return self._failed
        return None if self._delivery is None else self._delivery.peek()

    def handed_over(self, delivery: Delivery) -> None:
        """From now on the producer knows the result."""
        self._delivery = delivery

    def refused(self, error_code: str, error_message: str, now: float) -> None:
        """Fail, because the producer never took the user record."""
        attempt = Attempt(False, error_code, error_message, now, now)  # noqa: FBT003
        self._failed = RecordResult(False, None, None, (attempt,))  # noqa: FBT003


class Parcel(msgspec.Struct, frozen=True):
    """What waits in the inbox."""

    stream: str
    user_record: UserRecord
    size_bytes: int
    delivery: BlockingDelivery
    # The context of the put, where a hook asks for it: the loop takes over what many threads put.
    context: Context | None

    def put_into(self, producer: "Producer") -> Delivery:
        """Hand it over; raises as `Producer.put_nowait`."""
        if self.context is None:
            return producer.put_record_nowait(self.stream, self.user_record)
        return self.context.run(producer.put_record_nowait, self.stream, self.user_record)
