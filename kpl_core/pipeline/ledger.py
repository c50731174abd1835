"""The accounts of one stream: what became of every user record, and what each flush still waits for.

Every user record accepted is delivered, stored for later, failed for a reason, or still outstanding. Final results
pass through `Ledger` and through no other place, so that outcome, backpressure, flush and counters cannot disagree. The
invariant

    accepted = delivered + failed + spooled + dead-lettered + buffered

is checked by the tests against an independent count of the records in the stages.

`Generations` counts what a flush waits for, per Kinesis record instead of per user record. Each flush starts a new
generation. An open aggregated record or a Kinesis record belongs to the generation of the oldest user record in it. A
flush is done when no record belongs to its generation or to an earlier one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import History, Note, Origin, Outcome, ResultHandle
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.records.record_result import Attempt, Place
from kpl_core.records.user_record import UserRecord

# A user record with one of these origins is in the spool or in the dead letters.
_KEPT_ORIGINS: Final[frozenset[Origin | None]] = frozenset({"write_ahead", "replay", "redrive"})


class Generations:
    """How many Kinesis records belong to each generation."""

    __slots__ = ("_counts", "current")

    def __init__(self) -> None:
        self.current = 0
        self._counts: dict[int, int] = {}

    def retain(self, generation: int, count: int = 1) -> None:
        """Add `count` Kinesis records, open or closed, to `generation`."""
        self._counts[generation] = self._counts.get(generation, 0) + count

    def release(self, generation: int, count: int = 1) -> None:
        """Remove `count` of them: they are final, or their user records moved to other Kinesis records."""
        if not count:
            return
        left = self._counts[generation] - count
        if left:
            self._counts[generation] = left
        else:
            del self._counts[generation]

    def advance(self) -> int:
        """Start the next generation; return the one that ends."""
        self.current += 1
        return self.current - 1

    @property
    def has_earlier(self) -> bool:
        """Return True if a record belongs to a generation that a flush has ended."""
        return len(self._counts) > 1 or (bool(self._counts) and self.current not in self._counts)

    def is_finished(self, generation: int) -> bool:
        """Return True if no record belongs to `generation` or to an earlier one."""
        return not any(retained <= generation for retained in self._counts)


class Ledger:
    """The counts of one stream, and the one place where results become final. Failed records are final at once.

    `DurableLedger` replaces it where a spool or dead letters are configured, and offers failed records to them first.
    """

    def __init__(self, stream: str, buffer_limit: BufferLimit, *, listening: bool = False) -> None:
        self._stream = stream
        self._buffer_limit = buffer_limit
        self.generations = Generations()
        # True if failed records are offered to a durable store before they are final.
        self.is_durable = False
        # True if hooks want facts.
        self.listening = listening
        self.delivered = 0
        self.delivered_bytes = 0
        self.failed: Counter[str] = Counter()
        # How many times a user record went to the spool or to the dead letters.
        self.kept: Counter[Place] = Counter()
        self.facts: list[Fact] = []
        # True if the driver has failed user records to take to the durable store.
        self.has_pending = False

    @property
    def pending_count(self) -> int:
        """Return how many user records are on their way to the durable store."""
        return 0

    def can_spill(self, record: UserRecord) -> bool:  # noqa: ARG002 - a durable ledger looks at it
        """Return True if a user record that finds no room may go to the disk instead of being rejected."""
        return False

    def spill_to_disk(self, detached: DetachedUserRecord, attempt: Attempt) -> None:
        """Send a user record that found no room to the disk. Call it only if `can_spill` returned True."""
        raise NotImplementedError

    def deliver(self, record: KinesisRecord, entry: PutRecordsEntry, attempt: Attempt) -> None:
        """Make success the result of all user records in a Kinesis record."""
        self.deliver_all([(record, entry)], attempt)

    def deliver_all(self, stored: Sequence[tuple[KinesisRecord, PutRecordsEntry]], attempt: Attempt) -> None:
        """Make success the result of all user records in these Kinesis records, which made this attempt together."""
        first = History(attempt, None)
        count = size_bytes = 0
        # Nearly all records of a request belong to one generation: release them in one call.
        generation = leaving = 0
        for record, entry in stored:
            outcome = record.outcome
            outcome.history = first if outcome.history is None else History(attempt, outcome.history)
            # The same as `settle`, without the cost of a call.
            outcome.shard_id = entry.shard_id
            outcome.sequence_number = entry.sequence_number
            outcome.metadata = None
            outcome.settled = True
            if outcome.waiters is not None:
                outcome.wake()
            count += len(record.arrivals)
            size_bytes += record.user_bytes
            if record.generation != generation:
                self.generations.release(generation, leaving)
                generation, leaving = record.generation, 0
            leaving += 1
            if self.listening:
                self._note_fact(record, attempt)
        self.generations.release(generation, leaving)
        self.delivered += count
        self.delivered_bytes += size_bytes
        self._buffer_limit.release(records=count, size_bytes=size_bytes)

    def fail(self, record: KinesisRecord, attempt: Attempt) -> None:
        """Make `attempt` the last of all user records in a Kinesis record."""
        record.outcome.attempted(attempt)
        record.outcome.settle()
        count = len(record.arrivals)
        self.failed[attempt.error_code or ""] += count
        self._buffer_limit.release(records=count, size_bytes=record.user_bytes)
        self.generations.release(record.generation)
        if self.listening:
            self._note_fact(record, attempt)

    def _note_fact(self, record: KinesisRecord, attempt: Attempt) -> None:
        history, notes = record.outcome.history, record.outcome.notes
        self.facts.append(
            RecordsFinished(
                stream=self._stream,
                shard_id=record.outcome.shard_id or record.predicted_shard,
                tier=record.tier,
                outcome="delivered" if attempt.success else "failed",
                reason=attempt.error_code or "",
                user_records=len(record.arrivals),
                user_bytes=record.user_bytes,
                attempts=1 if history is None else len(history.to_tuple()),
                age=attempt.ended_at - min(record.arrivals),
                kinesis_bytes=record.size_bytes,
                kept_before=0 if notes is None else _kept_count(notes.values()),
            )
        )

    def settle_alone(
        self,
        detached: DetachedUserRecord,
        attempt: Attempt,
        *,
        predicted_shard: str | None,
        entry: PutRecordsEntry | None = None,
        kept: Place | None = None,
    ) -> None:
        """Give one user record a result of its own, apart from the others of its Kinesis record.

        An `entry` means success. `kept` names the store that has the record although it was not delivered.
        """
        outcome = Outcome()
        outcome.history = History(attempt, detached.history)
        size = detached.size_bytes
        if kept is not None:
            self.kept[kept] += 1
            outcome.settle(kept=kept)
        elif entry is None:
            self.failed[attempt.error_code or ""] += 1
            outcome.settle()
        else:
            self.delivered += 1
            self.delivered_bytes += size
            outcome.settle(shard_id=entry.shard_id, sequence_number=entry.sequence_number)
        self._buffer_limit.release(records=1, size_bytes=size)
        detached.outcome.move(detached.index, outcome, 0)
        if self.listening:
            notes = detached.outcome.notes
            note = None if notes is None else notes.get(detached.index)
            self.facts.append(
                RecordsFinished(
                    stream=self._stream,
                    shard_id=outcome.shard_id or predicted_shard,
                    tier=detached.tier,
                    outcome=kept or ("failed" if entry is None else "delivered"),
                    reason=attempt.error_code or "",
                    user_records=1,
                    user_bytes=size,
                    attempts=len(outcome.history.to_tuple()),
                    age=attempt.ended_at - detached.arrived_at,
                    kept_before=0 if note is None else _kept_count((note,)),
                )
            )

    def settle_unsent(self, detached: DetachedUserRecord, attempt: Attempt, place: Place | None) -> None:
        """Make a user record final that was never sent: `place` has it, or (None) it has failed permanently."""
        # Not `self.settle_alone`: a durable ledger would look for a place once more.
        Ledger.settle_alone(self, detached, attempt, predicted_shard=None, kept=place)
        self.generations.release(detached.generation)
        detached.outcome.wake()

    def fail_waiting(self, detached: DetachedUserRecord, attempt: Attempt) -> None:
        """Fail a user record that waited for its flow's turn."""
        self.settle_alone(detached, attempt, predicted_shard=None)
        self.generations.release(detached.generation)
        detached.outcome.wake()

    def move(self, detached: DetachedUserRecord, delivery: ResultHandle) -> None:
        """Let a user record share the outcome of the Kinesis record that it joined, and keep its history."""
        outcome, index = delivery.outcome, delivery.index
        if detached.history is not None:
            if outcome.histories is None:
                outcome.histories = {}
            outcome.histories[index] = detached.history
        metadata = detached.outcome.metadata
        if metadata is not None and detached.index in metadata:
            delivery.note(metadata[detached.index])
        notes = detached.outcome.notes
        if notes is not None and detached.index in notes:
            delivery.remark(notes[detached.index])
        detached.outcome.move(detached.index, outcome, index)

    def detach(self, record: KinesisRecord) -> None:
        """Release a Kinesis record whose user records have all moved elsewhere or were settled alone."""
        self.generations.release(record.generation)
        record.outcome.wake()

    def take_facts(self) -> list[Fact]:
        """Remove and return the facts noted since the last call."""
        facts, self.facts = self.facts, []
        return facts


def _kept_count(notes: Iterable[Note]) -> int:
    """Return how many of these user records a durable store has."""
    return sum([note.origin in _KEPT_ORIGINS for note in notes])
