"""A call instead of an await: for those who must hear of many results without a task for each."""

from collections.abc import Callable

from kpl_core.records.outcome import ResultHandle
from kpl_core.records.record_result import RecordResult

__all__ = ["ResultCallback"]


class ResultCallback:
    """Calls `finished` once, when a delivery has its result: a waiter, as the outcome knows them.

    It is called in the middle of the pipeline's work: take note, and touch no pipeline.
    """

    __slots__ = ("_delivery", "_finished")

    def __init__(self, delivery: ResultHandle, finished: Callable[[RecordResult], object]) -> None:
        self._delivery = delivery
        self._finished = finished
        self.set()

    def set(self) -> None:
        """Look again: the outcome is settled, or the user record has moved to another."""
        outcome = self._delivery.follow()
        if outcome.settled:
            self._finished(outcome.result_of(self._delivery.index))
        elif outcome.waiters is None:
            outcome.waiters = [self]
        else:
            outcome.waiters.append(self)
