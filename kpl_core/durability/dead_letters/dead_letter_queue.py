"""The dead-letter queue: records that were not delivered, stored in the spool's file until they are redriven or purged.

A record moves from the spool to this queue in one transaction. `redrive_at` decides when a letter is due again.
`DepthAlarm` decides when the queue is deep enough to alert a person. `redriver.py` sends letters again.

`LetterReader` reads and exports letters without a lock, so it works while another process owns the spool. `purge`
deletes letters, so it needs the spool itself.
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.durability.spool.envelope import DeadLetter, SpooledRecord, dead_letter_of, letter_id, letter_to_json
from kpl_core.durability.spool.group_commit import new_future
from kpl_core.durability.spool.read_only_spool import ExportReport, ReadOnlySpool
from kpl_core.durability.spool.spool import Spool
from kpl_core.durability.spool.spool_error import SpoolError, SpoolFull
from kpl_core.durability.spool.store import SpoolStore
from kpl_core.durability.spool.tables import (
    LetterFilter,
    StoredLetter,
    count_letters,
    find_letter,
    letter_row,
    letters_due,
    letters_matching,
    newest_number,
    next_due_after,
)
from kpl_core.hooks import DeadLetterAlarm
from kpl_core.options.reliability import DeadLetterOptions
from kpl_core.options.validation import require
from kpl_core.records.record_result import INCURABLE, Reason, RecordResult
from kpl_core.version import producer_version

PAGE_LETTERS: Final = 500
# Before the first letter in the order of a page: the rank of its tier, its number.
FIRST_LETTER: Final = (-1, 0)


def redrive_at(
    options: DeadLetterOptions, reason: Reason, *, redrives: int, now: float, chance: Callable[[], float]
) -> float | None:
    """Return when a letter that was redriven `redrives` times is due, by exponential backoff with full jitter.

    The result is None for letters that wait for a person: no retry can cure their reason, or `max_redrives` is reached.
    """
    if reason in INCURABLE or (options.max_redrives is not None and redrives >= options.max_redrives):
        return None
    backoff = ExponentialBackoff(base_seconds=options.redrive_base_seconds, cap_seconds=options.redrive_cap_seconds)
    return now + backoff.seconds(redrives + 1, chance)


class DepthAlarm:
    """Raised when the depth reaches `threshold`, cleared when it falls to `clear_at` (default: half of it); pure.

    Between the two bounds nothing changes, so a depth that varies around the threshold alerts once.
    """

    def __init__(self, threshold: int, *, clear_at: int | None = None) -> None:
        clear_at = threshold // 2 if clear_at is None else clear_at
        require(threshold >= 1, "threshold", threshold, "at least 1 dead letter")
        require(0 <= clear_at < threshold, "clear_at", clear_at, f"at least 0 and below the threshold, {threshold}")
        self.threshold = threshold
        self.clear_at = clear_at
        self.raised = False

    def update(self, depth: int) -> DeadLetterAlarm | None:
        """Record the present depth; return the change it caused, None if there is none."""
        raised = depth > self.clear_at if self.raised else depth >= self.threshold
        if raised == self.raised:
            return None
        self.raised = raised
        return DeadLetterAlarm(raised, depth, self.threshold)


_log: Final = logging.getLogger(__name__)


def new_letter(
    record: SpooledRecord, reason: Reason, now: float, *, result: RecordResult | None = None, wall_offset: float = 0.0
) -> DeadLetter:
    """Return the dead letter of `record`, with a new id; `now` is Unix time. See `dead_letter_of`."""
    return dead_letter_of(
        record,
        id=letter_id(now, os.urandom(8)),
        reason=reason,
        producer_version=producer_version(),
        result=result,
        wall_offset=wall_offset,
    )


class DueLetters(NamedTuple):
    """The letters due at one instant, and the seconds until the next one is due; None if none ever will be."""

    letters: list[StoredLetter]
    next_due_in: float | None


class DeadLetterQueue:
    """The dead letters of an open `spool`. Thread-safe.

    Args:
        spool: where they are stored.
        options: when letters are redriven automatically.
        alarm: the depth that raises an alarm; None: never.
        on_escalation: called on the spool's thread for each change of the alarm; must return quickly. Each change is
            also logged.
        wall_clock: Unix seconds.
        chance: returns a number in [0, 1), for the jitter.
    """

    def __init__(
        self,
        spool: Spool,
        *,
        options: DeadLetterOptions | None = None,
        alarm: DepthAlarm | None = None,
        on_escalation: Callable[[DeadLetterAlarm], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.spool = spool
        self._options = DeadLetterOptions() if options is None else options
        self._alarm = alarm
        self._alarm_lock = threading.Lock()
        self._on_escalation = on_escalation
        self._wall_clock = wall_clock
        self._chance = chance
        self._listeners: list[Callable[[], None]] = []
        # Letters stored since this object was created, by reason; changed only on the spool's thread.
        self.added: Counter[Reason] = Counter()
        # The last letters could not be stored: the disk failed, or there was no room.
        self.failing = False
        self._is_full = False

    @property
    def is_alarmed(self) -> bool:
        """Whether the depth has reached the alarm's threshold, and has not fallen to half of it since."""
        return self._alarm is not None and self._alarm.raised

    @property
    def depth(self) -> int:
        """The number of dead letters stored or being stored."""
        return self.spool.statistics().letters

    def letter(
        self, record: SpooledRecord, reason: Reason, *, result: RecordResult | None = None, wall_offset: float = 0.0
    ) -> DeadLetter:
        """Return the dead letter of `record`; see `new_letter`."""
        return new_letter(record, reason, self._wall_clock(), result=result, wall_offset=wall_offset)

    def add_nowait(self, letters: Sequence[DeadLetter], *, spooled_ids: Iterable[int] = ()) -> "Future[None]":
        """Store letters and delete the spooled records they come from, in one transaction.

        Raises:
            SpoolFull: there is no room; nothing was stored or deleted.
            SpoolError: the spool is closed or broken. The future raises `SpoolUnavailable` if the disk fails.
        """
        rows = [letter_row(letter, due_at=self._due_at(letter, redrives=0)) for letter in letters]

        def settled(stored: bool) -> None:  # noqa: FBT001 - the signature of `settled`
            self.failing, self._is_full = not stored, False
            if stored:
                self.added.update(letter.reason for letter in letters)
            self._changed(stored)

        try:
            return self.spool.add_letters_nowait(rows, spooled_ids=spooled_ids, settled=settled)
        except SpoolError as error:
            self.failing, self._is_full = True, isinstance(error, SpoolFull)
            raise

    def probe(self) -> None:
        """Try a small write if the disk did not store the last letters, so that `failing` ends when it stores again.

        Without room for letters nothing is tried: `failing` ends when letters are removed.
        """
        if self.failing and not self._is_full:
            with contextlib.suppress(SpoolError):
                # Not the spool's own probe: that asks for room for records, and letters have their own bound.
                self.spool.ask(SpoolStore.probe).add_done_callback(self._probed)

    def _probed(self, probe: "Future[None]") -> None:
        if not self._is_full:
            self.failing = probe.cancelled() or probe.exception() is not None

    def due_nowait(self, limit: int) -> "Future[DueLetters]":
        """Read up to `limit` due letters, critical first, and the seconds until the next one is due."""
        now = self._wall_clock()

        def read(store: SpoolStore) -> DueLetters:
            due_at = next_due_after(store.connection, now)
            letters = letters_due(store.connection, now, limit, latest=now + self._options.redrive_cap_seconds)
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
        """Read the number of the latest letter, 0 if there is none."""
        return self.spool.ask(lambda store: newest_number(store.connection))

    def remove(self, letters: Iterable[StoredLetter]) -> "Future[None]":
        """Delete letters that were delivered, exported or purged. Deleting one twice is harmless."""
        return self.spool.change_letters(removed=[stored.number for stored in letters], settled=self._removed)

    def try_later(self, letters: Iterable[StoredLetter]) -> "Future[None]":
        """Count one more redrive for each letter and set when it is due again."""
        rescheduled = []
        for stored in letters:
            redrives = stored.redrives + 1
            due_at = None if stored.letter is None else self._due_at(stored.letter, redrives=redrives)
            rescheduled.append((due_at, redrives, stored.number))
        return self.spool.change_letters(rescheduled=rescheduled, settled=self._changed)

    def _due_at(self, letter: DeadLetter, *, redrives: int) -> float | None:
        return redrive_at(self._options, letter.reason, redrives=redrives, now=self._wall_clock(), chance=self._chance)

    def watch_depth(self) -> None:
        """Compare the depth with the alarm's threshold now; every change of the queue does this too.

        Call it once after opening the spool, for the letters it already holds.
        """
        if self._alarm is None:
            return
        with self._alarm_lock:
            escalation = self._alarm.update(self.depth)
        if escalation is not None:
            self._escalate(escalation)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the spool's thread whenever letters changed. It must return quickly."""
        self._listeners.append(listener)

    def _removed(self, removed: bool) -> None:  # noqa: FBT001 - the signature of `settled`
        if removed:
            self.failing = self._is_full = False
        self._changed(removed)

    def _changed(self, _: bool) -> None:  # noqa: FBT001 - the signature of `settled`
        self.watch_depth()
        for listener in self._listeners:
            listener()

    def _escalate(self, escalation: DeadLetterAlarm) -> None:
        if escalation.raised:
            _log.error(
                "dead-letter queue: %d letters, the alarm's threshold is %d; see `kpl dlq list`, "
                "fix the cause, then run `kpl dlq redrive`",
                escalation.depth,
                escalation.threshold,
            )
        else:
            _log.info("dead-letter queue: %d letters, the alarm is cleared", escalation.depth)
        if self._on_escalation is not None:
            # Run as a future's callback, so that an exception is logged and does not end the spool's thread.
            notified: Future[DeadLetterAlarm] = new_future()
            callback = self._on_escalation
            notified.add_done_callback(lambda future: callback(future.result()))
            notified.set_result(escalation)


class LetterReader(ReadOnlySpool):
    """Reads the dead letters of a spool file without its lock: `with LetterReader(path) as letters:`."""

    def pages(self, wanted: LetterFilter, *, limit: int | None = None) -> Iterator[list[StoredLetter]]:
        """Yield the letters that match, at most `limit`, in pages: critical first, then in the order of arrival."""
        after, left = FIRST_LETTER, limit
        while left is None or left > 0:
            page = self._ask(
                letters_matching, wanted, PAGE_LETTERS if left is None else min(left, PAGE_LETTERS), after=after
            )
            if not page:
                return
            yield page
            after = page[-1].tier_rank, page[-1].number
            left = None if left is None else left - len(page)

    def find(self, letter_id: str) -> StoredLetter | None:
        """Return the letter with this id, None if there is none."""
        return self._ask(find_letter, letter_id)

    def count(self, wanted: LetterFilter) -> dict[Reason, int]:
        """Return how many letters match, by reason."""
        return self._ask(count_letters, wanted)

    def export(
        self, wanted: LetterFilter, destination: Path, *, on_progress: Callable[[int], None] | None = None
    ) -> ExportReport:
        """Write the letters that match as JSON lines; see `write_lines`."""
        pages = (
            [None if stored.letter is None else letter_to_json(stored.letter) for stored in page]
            for page in self.pages(wanted)
        )
        return self.write_lines(destination, pages, on_progress=on_progress)


def purge(queue: DeadLetterQueue, wanted: LetterFilter, *, on_progress: Callable[[int], None] | None = None) -> int:
    """Delete the letters that match; return how many. Blocks. Safe to interrupt and run again.

    Raises:
        SpoolError: the spool is closed or broken.
    """
    purged = 0
    while page := queue.select_nowait(wanted, PAGE_LETTERS).result():
        queue.remove(page).result()
        purged += len(page)
        if on_progress is not None:
            on_progress(purged)
    return purged
