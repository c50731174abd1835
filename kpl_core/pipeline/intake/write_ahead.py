"""The write-ahead intake: user records wait here until the spool has stored them, and whether it can store."""

from collections.abc import Iterable
from typing import Final

from kpl_core.errors import NotSpooled
from kpl_core.options.reliability import SpoolFailure
from kpl_core.pipeline.ledger import Ledger
from kpl_core.records.kinesis_record import DetachedUserRecord
from kpl_core.records.outcome import Outcome
from kpl_core.records.record_result import NOT_SPOOLED, SHUTDOWN, Attempt

# How often a spool that cannot store is tried again.
PROBE_SECONDS: Final = 1.0


class SpoolState:
    """Whether a producer's spool can store, since when it cannot, and which puts that concerns.

    The driver reports each success and each failure of the disk. While there was a failure last, it tries a small write
    every `PROBE_SECONDS`, so all ends by itself. Instants are seconds on the producer's clock.

    | `SpoolOptions.failure` | while the spool cannot store |
    | --- | --- |
    | fail | a put tries, and fails with `NotSpooled` |
    | bypass | it goes straight to Kinesis; refused if it must be durable, or would break the order of its key |
    | refuse | refused with `NotSpooled` |

    With the last two, records that the spool fails to store after they were accepted go straight to Kinesis, unless
    they must be durable: their caller would not be told. No put waits for an overflow spool (`writes_ahead` False), so
    none is refused because it cannot store.
    """

    def __init__(self, failure: SpoolFailure = "fail", *, writes_ahead: bool = True) -> None:
        self.failure: SpoolFailure = failure
        self.writes_ahead = writes_ahead
        # Why it cannot store, None while it can; and since when.
        self.why: str | None = None
        self.since = 0.0
        # It cannot store because it has `max_bytes`; its disk may be well.
        self.is_full = False
        # Accepted user records that went straight to Kinesis.
        self.bypassed = 0
        # The streams and partition keys that have records in the spool, None before they are known. Read only while it
        # cannot store, and only where the order of keys is promised.
        self.keys: frozenset[tuple[str, str]] | None = None
        # The outcomes of the user records that wait for the disk.
        self.waiting: set[Outcome] = set()

    @property
    def can_store(self) -> bool:
        """Return True if the last write succeeded, or there was none."""
        return self.why is None

    def refused(self, why: str, now: float, *, is_full: bool = False) -> bool:
        """Note that the spool did not store; return True if it did before."""
        did_store, self.why, self.is_full = self.why is None, why, is_full
        if did_store:
            self.since, self.keys = now, None
        return did_store

    def stored(self) -> bool:
        """Note that the spool has stored; return True if it did not before."""
        did_store, self.why, self.is_full = self.why is None, None, False
        return not did_store

    def unready(self) -> str | None:
        """Return why puts are refused, None if they are accepted."""
        accepts = self.why is None or self.failure == "bypass" or not self.writes_ahead
        return None if accepts else "the spool cannot store records"

    def goes_straight(self, stream: str, keys: Iterable[str], *, durable: bool, in_order: bool) -> bool:
        """Return True if user records with these partition keys go straight to Kinesis, False if to the spool.

        Raises:
            NotSpooled: they are refused, because the spool cannot store.
        """
        why = self.why
        if why is None or self.failure == "fail":
            return False
        if self.failure == "refuse":
            raise NotSpooled(why)
        if durable:
            message = f"{why}; only records that need not be in the spool are accepted"
            raise NotSpooled(message)
        # What waits is in transit to the spool, and its keys are not yet among those that were read.
        if in_order and (self.waiting or self.keys is None or any((stream, key) in self.keys for key in keys)):
            message = f"{why}; a record must not overtake those of its partition key that are in the spool"
            raise NotSpooled(message)
        return True


class WriteAhead:
    """Intake: user records wait here until the spool has stored them, and start their journey afterwards."""

    def __init__(self, stream: str, ledger: Ledger, state: SpoolState, *, in_order: bool) -> None:
        self._stream = stream
        self._ledger = ledger
        self.state = state
        self._in_order = in_order
        # Not yet taken by the driver, and the count of those that it has taken and not settled. Each with whether it
        # must be durable.
        self.records: list[tuple[DetachedUserRecord, bool]] = []
        self._in_transit = 0

    @property
    def count(self) -> int:
        """Return how many user records are not on disk yet."""
        return len(self.records) + self._in_transit

    def goes_straight(self, keys: Iterable[str], *, durable: bool = False) -> bool:
        """Return True if user records with these keys need not wait here; raises as `SpoolState.goes_straight`."""
        return self.state.goes_straight(self._stream, keys, durable=durable, in_order=self._in_order)

    def add(self, detached: DetachedUserRecord, *, durable: bool) -> None:
        """Enqueue an accepted user record for the disk. One that need not be `durable` may go straight to Kinesis."""
        self.records.append((detached, durable))
        self.state.waiting.add(detached.outcome)

    def take(self) -> list[tuple[DetachedUserRecord, bool]]:
        """Remove and return the user records to write, each with whether it must be durable.

        Each must come back to `left`, `not_written` or `left_in_spool`.
        """
        records, self.records = self.records, []
        self._in_transit += len(records)
        return records

    def left(self, detached: DetachedUserRecord) -> None:
        """Note that a user record waits no more; the pipeline starts its journey."""
        self._in_transit -= 1
        self.state.waiting.discard(detached.outcome)

    def not_written(self, detached: DetachedUserRecord, message: str, now: float) -> None:
        """Fail a user record that the spool did not take; it was not acknowledged."""
        self.left(detached)
        attempt = Attempt(False, NOT_SPOOLED, message, detached.arrived_at, now)  # noqa: FBT003
        self._ledger.settle_unsent(detached, attempt, None)

    def left_in_spool(self, detached: DetachedUserRecord, now: float) -> None:
        """End the journey of a written user record before it began, because the producer is closed."""
        self.left(detached)
        text = "the producer was closed before this record could be sent; the spool has it"
        self._ledger.settle_unsent(detached, Attempt(False, SHUTDOWN, text, now, now), "spooled")  # noqa: FBT003
