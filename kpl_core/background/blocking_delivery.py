"""A user record that a thread put: its place in the inbox, and the handle of its result."""

import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial

import msgspec

from kpl_core.event_loop import run_soon
from kpl_core.producer.delivery import Delivery, call_when_done, log_exceptions
from kpl_core.producer.lifecycle import require_timeout
from kpl_core.producer.producer import Producer
from kpl_core.records.record_result import Attempt, RecordResult
from kpl_core.records.user_record import UserRecord


class BlockingDelivery:
    """The handle of one user record put from a thread."""

    __slots__ = ("_changed", "_state")

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        # In the inbox: None, or the calls to make at the end. Later the producer's delivery, or why it took none.
        self._state: list[Callable[[], object]] | Delivery | RecordResult | None = None

    @property
    def done(self) -> bool:
        """Return True if the result is known."""
        with self._changed:
            return self._peek() is not None

    def result(self, timeout: float | None = None) -> RecordResult:
        """Wait up to `timeout` seconds for the result; works after the producer closed too.

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

    def add_done_callback(self, function: "Callable[[BlockingDelivery], object]") -> None:
        """Call `function(delivery)` once, when the result is known.

        If it is known already, the call happens now, in this thread. Otherwise it happens in the producer's thread: a
        function that blocks there holds up every record. It may put, and must not wait for a result. It sees the
        context variables of this call. An exception that it raises is logged.
        """
        with self._changed:
            state = self._state
            if state is None:
                state = self._state = []
            if isinstance(state, list):
                state.append(partial(copy_context().run, function, self))
                return
        if isinstance(state, Delivery):
            call_when_done(state, partial(function, self))
        else:
            log_exceptions(partial(function, self))

    def _peek(self) -> RecordResult | None:
        state = self._state
        if isinstance(state, Delivery):
            return state.peek()
        return state if isinstance(state, RecordResult) else None

    def handed_over(self, delivery: Delivery) -> None:
        """Take the result from `delivery` from now on."""
        for call in self._become(delivery):
            run_soon(partial(call_when_done, delivery, call))

    def refused(self, error_code: str, error_message: str, now: float) -> list[Callable[[], object]]:
        """Fail, because the producer never took the user record. Return the calls to make without the lock."""
        attempt = Attempt(False, error_code, error_message, now, now)  # noqa: FBT003
        return self._become(RecordResult(False, None, None, (attempt,)))  # noqa: FBT003

    def _become(self, state: Delivery | RecordResult) -> list[Callable[[], object]]:
        calls, self._state = self._state, state
        return calls if isinstance(calls, list) else []


class QueuedPut(msgspec.Struct, frozen=True):
    """One put in the inbox."""

    stream: str
    user_record: UserRecord
    size_bytes: int
    delivery: BlockingDelivery
    # The context of the put, if a hook asks for it: the loop takes over the puts of many threads.
    context: Context | None

    def put_into(self, producer: Producer) -> Delivery:
        """Hand it over; raises as `Producer.put_nowait`."""
        if self.context is None:
            return producer.internal.put_record_nowait(self.stream, self.user_record)
        return self.context.run(producer.internal.put_record_nowait, self.stream, self.user_record)
