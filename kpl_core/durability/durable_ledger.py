"""The ledger of a producer with a spool or dead letters.

A failed user record is not final before a durable store has it. Until then it is a `PendingFallback`: it counts as
buffered, keeps its room, and its flush waits for it. The driver takes the pending fallbacks, stores them, and reports
the result. No record is called spooled or dead-lettered that is not on the disk.

Where a failed record goes is a table, `fallback_destinations`. The spool takes records that time will help. The dead
letters take records that a person must look at, and bulk records that were shed: to replay them at once would shed
them again. A record that came from the spool or from the dead letters is still there, and stays there. A record that
its caller still has is the caller's to put again: stored here too, it would arrive twice.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kpl_core.hooks import RecordsFinished
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.intake.write_ahead import SpoolState
from kpl_core.pipeline.ledger import Ledger
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import Note, Origin
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.records.record_result import INCURABLE, NOT_SPOOLED, Attempt, Place, Reason, reason_of_code
from kpl_core.records.user_record import Tier, UserRecord

_SHED: Final[frozenset[Reason]] = frozenset({"rate_limited", "breaker_open"})
# User records without room that may wait for the disk, where fewer than these may be outstanding.
MOST_PENDING: Final = 10_000


class DurableRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which durable stores there are."""

    spool: bool
    dead_letters: bool
    # User records enter the spool before they travel.
    write_ahead: bool


def durable_rules(config: Config) -> DurableRules:
    """Return the durable stores of a producer with this configuration."""
    return DurableRules(
        spool=config.spool is not None,
        dead_letters=config.dead_letters is not None,
        write_ahead=config.spool is not None and config.spool.mode == "write_ahead",
    )


def fallback_destinations(reason: Reason, origin: Origin | None, tier: Tier, rules: DurableRules) -> tuple[Place, ...]:
    """Return where a failed user record goes, in order of preference. Empty: it has failed permanently."""
    match origin:
        case "write_ahead" | "replay":
            # The replay finds out whether it can be delivered at all. Until a letter is committed, the spool has it.
            return ("spooled",)
        case "redrive":
            return ("dead_lettered",)
        case "caller":
            return ()
    spool: tuple[Place, ...] = ("spooled",) if rules.spool else ()
    letters: tuple[Place, ...] = ("dead_lettered",) if rules.dead_letters else ()
    if reason in INCURABLE:
        return letters
    return letters + spool if tier == "bulk" and reason in _SHED else spool + letters


class PendingFallback(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A failed user record on its way to a durable store."""

    stream: str
    detached: DetachedUserRecord
    # The last of its attempts; the earlier ones are `detached.history`.
    attempt: Attempt
    reason: Reason
    # In order of preference: the next one is tried if a store does not take the record.
    destinations: Sequence[Place]
    predicted_shard: str | None
    # It found no room in the buffer, so it has none to give back.
    spilled: bool = False

    @property
    def note(self) -> Note | None:
        """Return the flow and the origin of the user record."""
        return note_of(self.detached)


class DurableLedger(Ledger):
    """Offers failed user records to the durable stores before they are final."""

    def __init__(
        self, stream: str, buffer_limit: BufferLimit, *, rules: DurableRules, listening: bool, spool_state: SpoolState
    ) -> None:
        super().__init__(stream, buffer_limit, listening=listening)
        self._spool_state = spool_state
        self.is_durable = True
        self._rules = rules
        # Not yet taken by the driver, and the count of those that it has taken and not settled.
        self._pending: list[PendingFallback] = []
        self._in_transit = 0

    @property
    def pending_count(self) -> int:
        """Return how many user records are on their way to the durable store, taken by the driver or not."""
        return len(self._pending) + self._in_transit

    def can_spill(self, record: UserRecord) -> bool:
        """Return True if a user record that finds no room goes to the disk instead of being rejected."""
        # The records that wait for the disk are bounded too.
        if self.pending_count >= max(MOST_PENDING, self._buffer_limit.max_records):
            return False
        if self._rules.spool:
            # The dead letters are in its file, or in a sink that is the second choice.
            return self._spool_state.can_store
        return record.tier == "bulk" and self._rules.dead_letters

    def spill_to_disk(self, detached: DetachedUserRecord, attempt: Attempt) -> None:
        """Send a user record that found no room to the disk. Call it only if `can_spill` returned True."""
        if self._rules.write_ahead:
            # Its put returns only after the disk has it, as that of any other record.
            self._spool_state.waiting.add(detached.outcome)
        reason = reason_of_code(attempt.error_code or "", attempts=1)
        destinations = fallback_destinations(reason, None, detached.tier, self._rules)
        self._pending.append(PendingFallback(self._stream, detached, attempt, reason, destinations, None, spilled=True))
        self.has_pending = True

    def fail(self, record: KinesisRecord, attempt: Attempt) -> None:
        """End the journey of all user records in a Kinesis record, each by the table of destinations."""
        for detached in record.take_apart():
            self.settle_alone(detached, attempt, predicted_shard=record.predicted_shard)
        self.detach(record)

    def settle_alone(
        self,
        detached: DetachedUserRecord,
        attempt: Attempt,
        *,
        predicted_shard: str | None,
        entry: PutRecordsEntry | None = None,
        kept: Place | None = None,
    ) -> None:
        """Give one user record its result. A failure becomes a pending fallback, and is final when it is stored."""
        if entry is not None or kept is not None:
            super().settle_alone(detached, attempt, predicted_shard=predicted_shard, entry=entry, kept=kept)
            return
        attempts = 1 + (0 if detached.history is None else len(detached.history.to_tuple()))
        reason = reason_of_code(attempt.error_code or "", attempts=attempts)
        note = note_of(detached)
        origin = None if note is None else note.origin
        destinations = fallback_destinations(reason, origin, detached.tier, self._rules)
        if not destinations:
            super().settle_alone(detached, attempt, predicted_shard=predicted_shard)
        elif origin is not None:
            # The store still has it.
            super().settle_alone(detached, attempt, predicted_shard=predicted_shard, kept=destinations[0])
        else:
            self.generations.retain(detached.generation)
            self._pending.append(
                PendingFallback(self._stream, detached, attempt, reason, destinations, predicted_shard)
            )
            self.has_pending = True

    def take_pending_fallbacks(self) -> list[PendingFallback]:
        """Remove and return the failed user records to store; each must come back to `settle_fallbacks`."""
        pending, self._pending = self._pending, []
        self.has_pending = False
        self._in_transit += len(pending)
        return pending

    def settle_fallbacks(self, fallbacks: Iterable[PendingFallback], place: Place | None) -> None:
        """Make them final: `place` has stored them, or (None) no store took them and they have failed.

        Hooks get one fact for all that are alike, however many one disk write stored.
        """
        facts: dict[tuple[str, str | None, str], RecordsFinished] = {}
        listening, self.listening = self.listening, False
        for each in fallbacks:
            detached = each.detached
            self._in_transit -= 1
            attempt = each.attempt
            if each.spilled:
                self._spool_state.waiting.discard(detached.outcome)
                self._buffer_limit.overdraw(size_bytes=detached.size_bytes)
                if place is None and self._rules.write_ahead:
                    attempt = self._not_spooled(attempt)
            super().settle_alone(detached, attempt, predicted_shard=each.predicted_shard, kept=place)
            self.generations.release(detached.generation)
            detached.outcome.wake()
            if listening:
                alike = (detached.tier, each.predicted_shard, attempt.error_code or "")
                facts[alike] = self._fact_of(each, attempt, place, facts.get(alike))
        self.listening = listening
        self.facts += facts.values()

    def _not_spooled(self, attempt: Attempt) -> Attempt:
        """Return the last attempt of a record without room that no disk took: its put was not acknowledged."""
        message = f"no room in the buffer, and {self._spool_state.why or 'the disk did not answer'}"
        return Attempt(False, NOT_SPOOLED, message, attempt.started_at, attempt.ended_at)  # noqa: FBT003

    def _fact_of(
        self, fallback: PendingFallback, attempt: Attempt, place: Place | None, before: RecordsFinished | None
    ) -> RecordsFinished:
        """Return the fact `before` with one more user record in it, whose last attempt this is."""
        detached = fallback.detached
        attempts = 1 + (0 if detached.history is None else len(detached.history.to_tuple()))
        age = attempt.ended_at - detached.arrived_at
        return RecordsFinished(
            stream=self._stream,
            shard_id=fallback.predicted_shard,
            tier=detached.tier,
            outcome=place or "failed",
            reason=attempt.error_code or "",
            user_records=1 + (0 if before is None else before.user_records),
            user_bytes=detached.size_bytes + (0 if before is None else before.user_bytes),
            attempts=max(attempts, 0 if before is None else before.attempts),
            age=max(age, 0.0 if before is None else before.age),
        )


def note_of(detached: DetachedUserRecord) -> Note | None:
    """Return the flow and the origin of a user record, as they were noted when it was put."""
    notes = detached.outcome.notes
    return None if notes is None else notes.get(detached.index)
