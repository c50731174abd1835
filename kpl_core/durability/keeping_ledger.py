"""The books of a producer that keeps what it cannot deliver.

A failed user record is not final before the place it goes to has it: until then it is leaving, counts
as buffered and holds its room and its flush. The driver takes what is leaving, stores it, and says how
that went. Nothing is called kept that is not on the disk.
"""

from collections.abc import Iterable, Sequence

import msgspec

from kpl_core.durability.keeping_rules import KeepingRules, places_of
from kpl_core.hooks import RecordsFinished
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.generations import Generations
from kpl_core.pipeline.ledger import Ledger
from kpl_core.records.kinesis_record import KinesisRecord, MovingUserRecord
from kpl_core.records.outcome import Note
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.records.record_result import Attempt, Place, Reason, reason_of_code

__all__ = ["KeepingLedger", "Leaving", "note_of"]


class Leaving(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A failed user record on its way to where it will be kept."""

    stream: str
    moving: MovingUserRecord
    # The last of its attempts; the earlier ones are `moving.history`.
    attempt: Attempt
    reason: Reason
    # Where to go, and where else if that does not take it.
    places: Sequence[Place]
    predicted_shard: str | None
    # It holds no room, because there was none.
    aside: bool = False

    @property
    def note(self) -> Note | None:
        """Return what is known of it beside content and metadata."""
        return note_of(self.moving)


class KeepingLedger(Ledger):
    """Settles failures where they are kept."""

    def __init__(
        self,
        stream: str,
        buffer_limit: BufferLimit,
        generations: Generations,
        *,
        rules: KeepingRules,
        listening: bool,
    ) -> None:
        super().__init__(stream, buffer_limit, generations, listening=listening)
        self._rules = rules
        # Taken by the driver, and those it has taken and not settled.
        self._leaving: list[Leaving] = []
        self._under_way = 0

    @property
    def leaving_count(self) -> int:
        """Return how many user records are leaving, taken by the driver or not."""
        return len(self._leaving) + self._under_way

    @property
    def has_leaving(self) -> bool:
        """Say whether there is something for the driver to take."""
        return bool(self._leaving)

    def fail(self, record: KinesisRecord, attempt: Attempt) -> None:
        """End the journey of all user records in a Kinesis record, each where it belongs."""
        for moving in record.take_apart():
            self.settle_alone(moving, attempt, predicted_shard=record.predicted_shard)
        self.leave(record)

    def settle_alone(
        self,
        moving: MovingUserRecord,
        attempt: Attempt,
        *,
        predicted_shard: str | None,
        entry: PutRecordsEntry | None = None,
        kept: Place | None = None,
    ) -> None:
        """Give one user record its result; a failure leaves for where it is kept, and is final when it is there."""
        if entry is not None or kept is not None:
            super().settle_alone(moving, attempt, predicted_shard=predicted_shard, entry=entry, kept=kept)
            return
        attempts = 1 + (0 if moving.history is None else len(moving.history.to_tuple()))
        reason = reason_of_code(attempt.error_code or "", attempts=attempts)
        note = note_of(moving)
        origin = None if note is None else note.origin
        places = places_of(reason, origin, moving.tier, self._rules)
        if not places:
            super().settle_alone(moving, attempt, predicted_shard=predicted_shard)
        elif origin is not None:
            # It is there already.
            super().settle_alone(moving, attempt, predicted_shard=predicted_shard, kept=places[0])
        else:
            self._generations.hold(moving.generation)
            self._leaving.append(Leaving(self._stream, moving, attempt, reason, places, predicted_shard))

    def set_aside(self, moving: MovingUserRecord, attempt: Attempt) -> None:
        """Let a user record leave that never had room; there is a place for it."""
        reason = reason_of_code(attempt.error_code or "", attempts=1)
        places = places_of(reason, None, moving.tier, self._rules)
        self._leaving.append(Leaving(self._stream, moving, attempt, reason, places, None, aside=True))

    def decide(self, moving: MovingUserRecord, attempt: Attempt, place: Place | None) -> None:
        """Make it final at once: the user record is in `place`, or (None) it has failed for good."""
        super().settle_alone(moving, attempt, predicted_shard=None, kept=place)

    def take_leaving(self) -> list[Leaving]:
        """Remove and return what is leaving; each must come back to `left`."""
        leaving, self._leaving = self._leaving, []
        self._under_way += len(leaving)
        return leaving

    def left(self, leaving: Iterable[Leaving], place: Place | None) -> None:
        """Make them final: they are in `place`, or (None) nothing took them and they have failed.

        The hooks are told once for all that are alike, however many the disk took in one go.
        """
        facts: dict[tuple[str, str | None, str], RecordsFinished] = {}
        listening, self._listening = self._listening, False
        for each in leaving:
            moving = each.moving
            self._under_way -= 1
            if each.aside:
                self._buffer_limit.overdraw(size_bytes=moving.size_bytes)
            super().settle_alone(moving, each.attempt, predicted_shard=each.predicted_shard, kept=place)
            self._generations.release(moving.generation)
            moving.outcome.wake()
            if listening:
                alike = (moving.tier, each.predicted_shard, each.attempt.error_code or "")
                facts[alike] = self._told(each, place, facts.get(alike))
        self._listening = listening
        self.facts += facts.values()

    def _told(self, leaving: Leaving, place: Place | None, before: RecordsFinished | None) -> RecordsFinished:
        """Return the fact about those before, and one more."""
        moving, attempt = leaving.moving, leaving.attempt
        attempts = 1 + (0 if moving.history is None else len(moving.history.to_tuple()))
        age = attempt.ended_at - moving.arrived_at
        return RecordsFinished(
            stream=self._stream,
            shard_id=leaving.predicted_shard,
            tier=moving.tier,
            outcome=place or "failed",
            reason=attempt.error_code or "",
            user_records=1 + (0 if before is None else before.user_records),
            user_bytes=moving.size_bytes + (0 if before is None else before.user_bytes),
            attempts=max(attempts, 0 if before is None else before.attempts),
            age=max(age, 0.0 if before is None else before.age),
        )


def note_of(moving: MovingUserRecord) -> Note | None:
    """Return what was remarked about a user record when it was put."""
    notes = moving.outcome.notes
    return None if notes is None else notes.get(moving.index)
