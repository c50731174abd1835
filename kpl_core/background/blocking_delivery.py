"""User records that a thread put: the place of each in the inbox, and the handles of their results."""

import threading
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Self, overload

import msgspec

from kpl_core.event_loop import run_soon
from kpl_core.producer.delivery import Deliveries, Delivery, call_when_done, log_exceptions
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

    @classmethod
    def of(cls, changed: threading.Condition, delivery: Delivery) -> Self:
        """Return the handle of a user record that the producer has."""
        made = cls(changed)
        made._state = delivery
        return made

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


class BlockingDeliveries(Sequence[BlockingDelivery]):
    """What `put_many` of a `BlockingProducer` returns: a delivery for each record, made when it is asked for."""

    __slots__ = ("_changed", "_deliveries")

    def __init__(self, changed: threading.Condition, deliveries: Deliveries) -> None:
        self._changed = changed
        self._deliveries = deliveries

    def __len__(self) -> int:
        return len(self._deliveries)

    @overload
    def __getitem__(self, position: int) -> BlockingDelivery: ...
    @overload
    def __getitem__(self, position: slice) -> "BlockingDeliveries": ...
    def __getitem__(self, position: int | slice) -> "BlockingDelivery | BlockingDeliveries":
        found = self._deliveries[position]
        if isinstance(found, Deliveries):
            return BlockingDeliveries(self._changed, found)
        return BlockingDelivery.of(self._changed, found)

    def __repr__(self) -> str:
        return f"<BlockingDeliveries of {len(self)} user records>"

    def results(self, timeout: float | None = None) -> list[RecordResult]:
        """Wait up to `timeout` seconds (None: forever) for all results; return them in the order of the records.

        Raises:
            TimeoutError: not all results are known yet.
            ValueError: the timeout is negative or NaN.
        """
        self._wait(timeout)
        results = self._deliveries.known_results()
        assert results is not None  # noqa: S101 - waited for
        return results

    def failures(self, timeout: float | None = None) -> dict[int, RecordResult]:
        """Wait as `results`; return those of failed puts, by the position of their records."""
        self._wait(timeout)
        return self._deliveries.known_failures()

    def all_successful(self, timeout: float | None = None) -> bool:
        """Wait as `results`; return True if no put failed."""
        return not self.failures(timeout)

    def _wait(self, timeout: float | None) -> None:
        require_timeout(timeout)
        waiting = self._deliveries.open_outcomes()

        def are_known() -> bool:
            while waiting:
                if not (waiting[-1].settled or waiting[-1].moved):
                    return False
                waiting.pop()
            # User records may have moved to other Kinesis records.
            waiting.extend(self._deliveries.open_outcomes())
            return not waiting

        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            if not self._changed.wait_for(are_known, timeout):
                message = f"not all user records have a result after {timeout} s; wait longer, or flush the producer"
                raise TimeoutError(message)


def call_soon(callbacks: list[Callable[[], object]]) -> None:
    """Call the callbacks of refused records. The caller does not hold the lock, which they may need."""
    for callback in callbacks:
        run_soon(partial(log_exceptions, callback))


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
