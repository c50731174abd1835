"""Computes summaries and does nothing else: a process of its own, where workers are many or may not read reports.

Workers step in only when it is late, so it may be stopped, moved, or run twice.
"""

from typing import Literal

from kpl_core.coordination.lease_meeting import SUMMARY_NAME, Complain, compute
from kpl_core.coordination.lease_table import TableRules, is_claimed
from kpl_core.coordination.proportional_meeting import sum_up
from kpl_core.coordination.report import UnreadableObject
from kpl_core.coordination.store import CoordinationStore, StoreFailed
from kpl_core.coordination.summary import decode_summary
from kpl_core.options.coordination_options import CoordinationPolicy

__all__ = ["Coordinator"]


class Coordinator:
    """One round at a time; the caller sleeps in between.

    Args:
        store: where the workers meet.
        policy: as theirs.
        interval_seconds: as theirs.
        max_workers: the least to plan for; workers report their own.
        staleness_seconds: proportional only: objects older than this do not count.
        complain: hears the reason and a sentence of each object that cannot be read.
    """

    def __init__(
        self,
        store: CoordinationStore,
        *,
        policy: CoordinationPolicy,
        interval_seconds: float,
        max_workers: int = 1,
        staleness_seconds: float = 15.0,
        complain: Complain,
    ) -> None:
        self._store = store
        self._policy: CoordinationPolicy = policy
        self._rules = TableRules(interval_seconds=interval_seconds, max_workers=max_workers, dedicated=True)
        self._staleness = staleness_seconds
        self._complain = complain

    async def compute_once(self) -> tuple[int, Literal["computed", "overtaken"]]:
        """Compute a summary; return how many workers count, and whether it was this process that wrote it.

        Raises:
            StoreFailed: it could not be done.
        """
        if self._policy == "proportional":
            summed = await sum_up(self._store, staleness_seconds=self._staleness, complain=self._complain)
            return summed.active_workers, "computed"
        reading = await self._store.read(SUMMARY_NAME)
        try:
            head = None if reading.body is None else decode_summary(reading.body)
        except UnreadableObject as error:
            if error.reason == "version":
                message = f"{SUMMARY_NAME}: {error}"
                raise StoreFailed(message, reason="version") from error
            self._complain(error.reason, f"{SUMMARY_NAME}: {error}")
            head = None
        if head is not None and is_claimed(head, self._rules.interval_seconds, at=reading.at):
            return head.member_count, "overtaken"
        summary = await compute(self._store, head, reading.version, self._rules, at=reading.at, complain=self._complain)
        if summary is None:
            return 0 if head is None else head.member_count, "overtaken"
        return summary.member_count, "computed"
