"""The books: every user record accepted is delivered, kept, failed for a reason, or still outstanding.

Final results pass through here and nowhere else, so that outcome, backpressure,
flush and counters can never disagree. The invariant

    accepted = delivered + failed + spooled + dead-lettered + buffered

is checked by the tests against an independent count of what the stages hold.
"""

from collections import Counter
from collections.abc import Sequence

from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.generations import Generations
from kpl_core.records.kinesis_record import KinesisRecord, MovingUserRecord
from kpl_core.records.outcome import Delivery, History, Outcome
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.records.record_result import Attempt, Place

__all__ = ["Ledger"]


class Ledger:
    """Counts of one stream, and the one place where results become final."""

    def __init__(self, stream: str, buffer_limit: BufferLimit, generations: Generations, *, listening: bool) -> None:
        self._stream = stream
        self._buffer_limit = buffer_limit
        self._generations = generations
        self._listening = listening
        self.delivered = 0
        self.delivered_bytes = 0
        self.failed: Counter[str] = Counter()
        # How many times a user record went to where it is kept.
        self.kept: Counter[Place] = Counter()
        self.facts: list[Fact] = []

    @property
    def failed_total(self) -> int:
        """Return how many user records failed, for whatever reason."""
        return self.failed.total()

    def deliver(self, record: KinesisRecord, entry: PutRecordsEntry, attempt: Attempt) -> None:
        """Make success the result of all user records in a Kinesis record."""
        self.deliver_all([(record, entry)], attempt)

    def deliver_all(self, stored: Sequence[tuple[KinesisRecord, PutRecordsEntry]], attempt: Attempt) -> None:
        """Make success the result of all user records in these Kinesis records, which made this attempt together."""
        first = History(attempt, None)
        count = size_bytes = 0
        # Nearly all of a request are of one generation: they leave it together.
        generation = leaving = 0
        for record, entry in stored:
            outcome = record.outcome
            outcome.history = first if outcome.history is None else History(attempt, outcome.history)
            # What `settle` does, without the price of a call.
            outcome.shard_id = entry.shard_id
            outcome.sequence_number = entry.sequence_number
            outcome.settled = True
            if outcome.waiters is not None:
                outcome.wake()
            count += len(record.arrivals)
            size_bytes += record.user_bytes
            if record.generation != generation:
                self._generations.release(generation, leaving)
                generation, leaving = record.generation, 0
            leaving += 1
            if self._listening:
                self._tell(record, attempt)
        self._generations.release(generation, leaving)
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
        self._generations.release(record.generation)
        if self._listening:
            self._tell(record, attempt)

    def _tell(self, record: KinesisRecord, attempt: Attempt) -> None:
        history = record.outcome.history
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
            )
        )

    def settle_alone(
        self,
        moving: MovingUserRecord,
        attempt: Attempt,
        *,
        predicted_shard: str | None,
        entry: PutRecordsEntry | None = None,
        kept: Place | None = None,
    ) -> None:
        """Give one user record a result of its own, apart from its neighbours.

        An `entry` means success, `kept` that it is safe although it was not delivered.
        """
        outcome = Outcome()
        outcome.history = History(attempt, moving.history)
        size = moving.size_bytes
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
        moving.outcome.move(moving.index, outcome, 0)
        if self._listening:
            self.facts.append(
                RecordsFinished(
                    stream=self._stream,
                    shard_id=outcome.shard_id or predicted_shard,
                    tier=moving.tier,
                    outcome=kept or ("failed" if entry is None else "delivered"),
                    reason=attempt.error_code or "",
                    user_records=1,
                    user_bytes=size,
                    attempts=len(outcome.history.to_tuple()),
                    age=attempt.ended_at - moving.arrived_at,
                )
            )

    def move(self, moving: MovingUserRecord, delivery: Delivery) -> None:
        """Let a user record share the outcome of the Kinesis record it joined, and keep its past."""
        outcome, index = delivery.outcome, delivery.index
        if moving.history is not None:
            if outcome.histories is None:
                outcome.histories = {}
            outcome.histories[index] = moving.history
        metadata = moving.outcome.metadata
        if metadata is not None and moving.index in metadata:
            delivery.note(metadata[moving.index])
        notes = moving.outcome.notes
        if notes is not None and moving.index in notes:
            delivery.remark(notes[moving.index])
        moving.outcome.move(moving.index, outcome, index)

    def leave(self, record: KinesisRecord) -> None:
        """Close the page of a Kinesis record whose user records have all moved or been settled alone."""
        self._generations.release(record.generation)
        record.outcome.wake()

    def take_facts(self) -> list[Fact]:
        """Remove and return the facts noted since the last call."""
        facts, self.facts = self.facts, []
        return facts
