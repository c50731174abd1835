"""What keeps counts of user records from being counts of log records: notices, pieces, stubs, letters.

The producer counts user records. A notice is one more than was logged; a record in n pieces is n - 1 more; of one
that is too large the stub is one more, and the letter, which the producer never saw, one less.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

from kpl_core import Delivery

__all__ = ["SpecialRecords"]


class SpecialRecords:
    """Corrections to the producer's counts, settled as results come in. Thread-safe: who asks for counts settles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Deliveries, how many log records they stand for, and what they told of.
        self._pending: list[tuple[Sequence[Delivery], int, Counter[str]]] = []
        self._letters: list[Future[None]] = []
        # User records with a result that are no log records.
        self.delivered = 0
        self.kept = 0
        self.failed: Counter[str] = Counter()
        # Log records that are letters, and those that no letter became of.
        self.buried = 0
        self.unburied = 0
        # Drops that a notice told of which did not arrive.
        self.untold: Counter[str] = Counter()

    def add_notice(self, delivery: Delivery, told: Counter[str]) -> None:
        """A notice counts for nothing; if it fails, what it told is to be told again."""
        with self._lock:
            self._pending.append(((delivery,), 0, told))

    def add_pieces(self, deliveries: Sequence[Delivery], *, log_records: int) -> None:
        """Count user records as `log_records`: all pieces of one as 1; a stub, or some pieces of one, as 0."""
        with self._lock:
            self._pending.append((deliveries, log_records, Counter()))

    def add_letter(self, buried: "Future[None] | None") -> None:
        """A letter counts once; None: there is no place for it."""
        with self._lock:
            if buried is None:
                self.unburied += 1
            else:
                self._letters.append(buried)

    def take_untold(self) -> Counter[str]:
        """Return what must be told again, once."""
        with self._lock:
            untold, self.untold = self.untold, Counter()
        return untold

    @property
    def has_pending_letters(self) -> bool:
        """Say whether the disk has yet to answer for a letter."""
        return any(not letter.done() for letter in self._letters)

    def settle(self) -> None:
        """Turn what has its results into corrections."""
        with self._lock:
            self._settle_deliveries()
            self._settle_letters()

    def _settle_deliveries(self) -> None:
        still_pending = []
        for deliveries, counts, told in self._pending:
            results = [delivery.peek() for delivery in deliveries]
            known = [result for result in results if result is not None]
            if len(known) < len(results):
                still_pending.append((deliveries, counts, told))
                continue
            codes = [result.error_code or "" for result in known if not result.successful and result.kept is None]
            kept = sum(result.kept is not None for result in known)
            delivered = len(known) - len(codes) - kept
            # One of them stands for the log record, the one that fared worst.
            self.failed.update(codes[counts:])
            self.kept += kept - (counts if kept and not codes else 0)
            self.delivered += delivered - (counts if not kept and not codes else 0)
            if codes:
                self.untold.update(told)
        self._pending = still_pending

    def _settle_letters(self) -> None:
        still_pending = []
        for letter in self._letters:
            if not letter.done():
                still_pending.append(letter)
            elif letter.cancelled() or letter.exception() is not None:
                self.unburied += 1
            else:
                self.buried += 1
        self._letters = still_pending
