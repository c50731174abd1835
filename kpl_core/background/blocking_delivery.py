"""The handles of the results of user records that a thread has put."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

from kpl_core.producer.delivery import Deliveries, call_when_done, wait_for_result, wait_in_thread
from kpl_core.producer.lifecycle import require_timeout
from kpl_core.records.outcome import Outcome, ResultHandle
from kpl_core.records.record_result import RecordResult


class BlockingDelivery(ResultHandle, gc=False, eq=False):
    """The handle of one user record put from a thread."""

    def result(self, timeout: float | None = None) -> RecordResult:
        """Wait up to `timeout` seconds for the result; works after the producer closed too.

        Raises:
            TimeoutError: the result is not known yet.
            ValueError: the timeout is negative or NaN.
        """
        require_timeout(timeout)
        if not wait_for_result(self, timeout):
            message = f"this user record has no result after {timeout} s; wait longer, or flush the producer"
            raise TimeoutError(message)
        result = self.peek()
        assert result is not None  # noqa: S101 - waited for
        return result

    def add_done_callback(self, function: "Callable[[BlockingDelivery], object]") -> None:
        """Call `function(delivery)` once, when the result is known.

        If it is known already, the call happens now, in this thread. Otherwise it happens in the producer's thread: a
        function that blocks there holds up every record. It may put, and must not wait for a result. It sees the
        context variables of this call. An exception that it raises is logged.
        """
        call_when_done(self, partial(function, self))


class BlockingDeliveries(Sequence[BlockingDelivery]):
    """What `put_many` of a `BlockingProducer` returns: a delivery for each record, made when it is asked for."""

    __slots__ = ("_deliveries",)

    def __init__(self, deliveries: Deliveries) -> None:
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
            return BlockingDeliveries(found)
        return BlockingDelivery(found.outcome, found.index)

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
        open_outcomes = self._deliveries.open_outcomes

        def is_open(outcome: Outcome) -> bool:
            # Some of its user records may have moved to other Kinesis records.
            return outcome.moved is None or outcome in open_outcomes()

        if not wait_in_thread(open_outcomes, is_open, timeout):
            message = f"not all user records have a result after {timeout} s; wait longer, or flush the producer"
            raise TimeoutError(message)
