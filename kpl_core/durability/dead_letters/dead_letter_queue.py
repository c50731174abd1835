"""The dead-letter queue: what was not delivered, kept in the spool's file until somebody redrives it.

A record that leaves the spool for here does so in one transaction. The queue decides when a
letter is due again (`RedrivePolicy`) and wakes somebody when it grows deep (`DepthAlarm`);
who sends letters again is `Redriver` (by itself) and `operations` (on demand).
"""

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple

from kpl_core.durability.dead_letters.redrive_policy import RedrivePolicy
from kpl_core.durability.spool.dead_letter_table import (
    LetterFilter,
    StoredLetter,
    count_letters,
    letter_row,
    letters_due,
    letters_matching,
    newest_number,
    next_due_after,
)
from kpl_core.durability.spool.depth_alarm import AlarmChange, DepthAlarm, Escalation
from kpl_core.durability.spool.envelope import DeadLetter, Reason, SpooledRecord, dead_letter_of, letter_id
from kpl_core.durability.spool.spool import Spool
from kpl_core.durability.spool.spool_writer import new_future
from kpl_core.durability.spool.store import SpoolStore
from kpl_core.records.record_result import RecordResult

__all__ = ["DeadLetterQueue", "DueLetters", "producer_version"]

_log: Final = logging.getLogger(__name__)


def producer_version() -> str:
    """Return the version of this distribution, "unknown" if it is not installed."""
    try:
        return version("kpl-integrations")
    except PackageNotFoundError:
        return "unknown"


class DueLetters(NamedTuple):
    """The letters due at one instant, and the seconds from it until another is; None: none ever will be."""

    letters: list[StoredLetter]
    next_due_in: float | None


class DeadLetterQueue:
    """The dead letters of an open `spool`. Thread-safe.

    Args:
        spool: where they are stored.
        policy: when letters are tried again by themselves.
        alarm: the depth that escalates; None: never.
        on_escalation: called on the spool's thread, once per crossing; be quick. The log has it in any case.
        wall_clock: Unix seconds.
        chance: 0 .. 1, for the jitter.
        entropy: random bytes, for the ids.
    """

    def __init__(
        self,
        spool: Spool,
        *,
        policy: RedrivePolicy | None = None,
        alarm: DepthAlarm | None = None,
        on_escalation: Callable[[Escalation], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.spool = spool
        self.policy = RedrivePolicy() if policy is None else policy
        self._alarm = alarm
        self._alarm_lock = threading.Lock()
        self._on_escalation = on_escalation
        self._wall_clock = wall_clock
        self._chance = chance
        self._entropy = entropy
        self._version = producer_version()
        self._listeners: list[Callable[[], None]] = []
        # Letters stored since this queue was made, by reason; changed on the spool's thread only.
        self.buried: Counter[Reason] = Counter()

    @property
    def depth(self) -> int:
        """Dead letters stored, and being stored."""
        return self.spool.statistics().letters

    def letter(
        self, record: SpooledRecord, reason: Reason, *, result: RecordResult | None = None, wall_offset: float = 0.0
    ) -> DeadLetter:
        """Return the dead letter of `record`, with a new id; see `dead_letter_of`."""
        return dead_letter_of(
            record,
            id=letter_id(self._wall_clock(), self._entropy(8)),
            reason=reason,
            producer_version=self._version,
            result=result,
            wall_offset=wall_offset,
        )

    def bury_nowait(self, letters: Sequence[DeadLetter], *, spooled_ids: Iterable[int] = ()) -> "Future[None]":
        """Store letters, and drop the spooled records they come from, in one transaction.

        Raises:
            SpoolFull: there is no room; nothing was stored or dropped.
            SpoolError: the spool is closed or broken. The future raises `SpoolUnavailable` if the disk fails.
        """
        now = self._wall_clock()
        rows = [
            letter_row(letter, due_at=self.policy.due_at(letter.reason, redrives=0, now=now, chance=self._chance))
            for letter in letters
        ]

        def settled(stored: bool) -> None:  # noqa: FBT001 - as the spool tells it
            if stored:
                self.buried.update(letter.reason for letter in letters)
            self._changed(stored)

        return self.spool.bury_nowait(rows, spooled_ids=spooled_ids, settled=settled)

    def due_nowait(self, limit: int) -> "Future[DueLetters]":
        """Read up to `limit` letters that are due, critical first, and how long it is until others are."""
        now = self._wall_clock()

        def read(store: SpoolStore) -> DueLetters:
            due_at = next_due_after(store.connection, now)
            letters = letters_due(store.connection, now, limit, latest=now + self.policy.cap_seconds)
            return DueLetters(letters, None if due_at is None else due_at - now)

        return self.spool.ask(read)

    def select_nowait(
        self, wanted: LetterFilter, limit: int, *, after: tuple[int, int] = (-1, 0)
    ) -> "Future[list[StoredLetter]]":
        """Read up to `limit` letters that match, critical first; see `letters_matching`."""
        return self.spool.ask(lambda store: letters_matching(store.connection, wanted, limit, after=after))

    def count_nowait(self, wanted: LetterFilter) -> "Future[dict[Reason, int]]":
        """Count the letters that match, by reason."""
        return self.spool.ask(lambda store: count_letters(store.connection, wanted))

    def newest_nowait(self) -> "Future[int]":
        """Read the number of the letter that came last, 0 if there is none."""
        return self.spool.ask(lambda store: newest_number(store.connection))

    def remove(self, letters: Iterable[StoredLetter]) -> "Future[None]":
        """Forget letters: they were delivered, exported or purged. Removing one twice is harmless."""
        return self.spool.change_letters(removed=[stored.number for stored in letters], settled=self._changed)

    def try_later(self, letters: Iterable[StoredLetter]) -> "Future[None]":
        """Count one redrive more for each letter, and set when it is due again."""
        now = self._wall_clock()
        rescheduled = []
        for stored in letters:
            redrives = stored.redrives + 1
            due_at = None
            if stored.letter is not None:
                due_at = self.policy.due_at(stored.letter.reason, redrives=redrives, now=now, chance=self._chance)
            rescheduled.append((due_at, redrives, stored.number))
        return self.spool.change_letters(rescheduled=rescheduled, settled=self._changed)

    def watch_depth(self) -> None:
        """Compare the depth with the alarm's threshold now; after each change that happens by itself.

        To be called once after the spool was opened, for what it held before.
        """
        if self._alarm is None:
            return
        with self._alarm_lock:
            escalation = self._alarm.update(self.depth)
        if escalation is not None:
            self._escalate(escalation)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever letters changed, on the spool's thread; be quick."""
        self._listeners.append(listener)

    def _changed(self, _: bool) -> None:  # noqa: FBT001 - as the spool tells it
        self.watch_depth()
        for listener in self._listeners:
            listener()

    def _escalate(self, escalation: Escalation) -> None:
        if escalation.change is AlarmChange.RAISED:
            _log.error(
                "dead-letter queue: %d letters, the alarm's threshold is %d; look at `kpl dlq list`, "
                "cure the cause, then `kpl dlq redrive`",
                escalation.depth,
                escalation.threshold,
            )
        else:
            _log.info("dead-letter queue: %d letters, the alarm is over", escalation.depth)
        if self._on_escalation is not None:
            # As the callback of a future, so that what it raises is logged and kills no thread of ours.
            told: Future[Escalation] = new_future()
            callback = self._on_escalation
            told.add_done_callback(lambda future: callback(future.result()))
            told.set_result(escalation)
