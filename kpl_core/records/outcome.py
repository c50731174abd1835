"""The shared outcome: one object for all user records that travel in one Kinesis record.

Finishing an aggregated record of 450 user records sets one outcome, not 450
futures. A delivery is a pair (outcome, index). When user records leave the Kinesis
record (some expired, some belong to another shard now), the old outcome notes which
outcome each of them joined, and a delivery follows these notes when it is asked.

Attempts are a linked list, newest first, shared by all user records that made them together.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from kpl_core.records.record_result import Attempt, Place, RecordResult

__all__ = ["Delivery", "History", "Note", "Origin", "Outcome", "Waiter"]

# What still has the user record: the spool, the dead letters, or the caller, which puts it again if it fails.
Origin = Literal["write_ahead", "replay", "redrive", "caller"]


class Note(NamedTuple):
    """What is needed about a user record that cannot be delivered, besides its content and metadata."""

    flow: str | None
    origin: Origin | None = None


class History(msgspec.Struct, eq=False):
    """One attempt and, before it, the earlier ones.

    Tracked by the garbage collector because of its trashcan: without that, freeing a chain of
    100,000 attempts (of 1,000 in a thread on musl) overflows the C stack.
    """

    attempt: Attempt
    earlier: "History | None"
    # The result of `to_tuple`, once computed: user records with the same attempts share it.
    together: tuple[Attempt, ...] | None = None

    def to_tuple(self) -> tuple[Attempt, ...]:
        """Return the attempts in the order they were made."""
        if self.together is not None:
            return self.together
        attempts = []
        node: History | None = self
        while node is not None:
            attempts.append(node.attempt)
            node = node.earlier
        attempts.reverse()
        self.together = tuple(attempts)
        return self.together


class Waiter(Protocol):
    """A task or callback that waits until an outcome is settled or its user records move on."""

    def set(self) -> object:
        """Wake up; called at most once, from the loop that runs the producer."""


class Outcome(msgspec.Struct, eq=False, gc=False):
    """What becomes of the user records of one Kinesis record.

    It is settled once, for all user records that have not moved to another outcome. Compared by
    identity.
    """

    settled: bool = False
    shard_id: str | None = None
    # Not None means success.
    sequence_number: str | None = None
    history: History | None = None
    # Earlier attempts of single user records, in other Kinesis records; most have none.
    histories: dict[int, History] | None = None
    # The new outcome and index of each user record that has moved.
    moved: "dict[int, tuple[Outcome, int]] | None" = None
    # The callers' metadata for hooks and dead letters, by index.
    metadata: dict[int, Mapping[str, Any]] | None = None
    notes: dict[int, Note] | None = None
    # Of a failure: the durable store that has the user records.
    kept: Place | None = None
    # What a hook returned about the context in which the Kinesis record was opened.
    opened_in: object = None
    waiters: list[Waiter] | None = None
    shared_result: RecordResult | None = None

    def attempted(self, attempt: Attempt) -> None:
        """Add an attempt of all user records of this Kinesis record."""
        self.history = History(attempt, self.history)

    def settle(
        self, *, shard_id: str | None = None, sequence_number: str | None = None, kept: Place | None = None
    ) -> None:
        """Set the final result; a `sequence_number` means success."""
        self.shard_id = shard_id
        self.kept = kept
        self.sequence_number = sequence_number
        # Last: another thread may look at any moment.
        self.settled = True
        if self.waiters is not None:
            self.wake()

    def move(self, index: int, outcome: "Outcome", new_index: int) -> None:
        """Let the user record at `index` share another outcome from now on. Call `wake` after the last."""
        if self.moved is None:
            self.moved = {}
        self.moved[index] = (outcome, new_index)

    def wake(self) -> None:
        """Wake all waiters, so that they look again."""
        waiters, self.waiters = self.waiters, None
        if waiters is not None:
            # A copy: a waiter in another thread may remove itself meanwhile, and the next one would be skipped.
            for waiter in tuple(waiters):
                waiter.set()

    def history_of(self, index: int) -> History | None:
        """Return all attempts of the user record at `index`, also those in earlier Kinesis records."""
        if self.histories is None or (before := self.histories.get(index)) is None:
            return self.history
        if self.history is None:
            return before
        for attempt in self.history.to_tuple():
            before = History(attempt, before)
        return before

    def result_of(self, index: int) -> RecordResult:
        """Return the final result of the user record at `index`. The outcome must be settled."""
        if self.shared_result is not None:
            return self.shared_result
        history = self.history if self.histories is None else self.history_of(index)
        sequence_number = self.sequence_number
        result = RecordResult(
            sequence_number is not None,
            self.shard_id,
            sequence_number,
            () if history is None else history.together or history.to_tuple(),
            self.kept,
        )
        if self.histories is None:
            self.shared_result = result
        return result


class Delivery(msgspec.Struct, gc=False):
    """The handle of one user record, which finds its result.

    Not tracked by the garbage collector: it refers to an outcome, and no outcome refers back.
    """

    outcome: Outcome
    index: int

    def follow(self) -> Outcome:
        """Return the present outcome of this user record, and remember it."""
        outcome = self.outcome
        while outcome.moved is not None and (target := outcome.moved.get(self.index)) is not None:
            outcome, self.index = target
            self.outcome = outcome
        return outcome

    @property
    def done(self) -> bool:
        """Return True if the result is known."""
        return self.follow().settled

    def peek(self) -> RecordResult | None:
        """Return the result, or None if it is not known yet."""
        outcome = self.follow()
        return outcome.result_of(self.index) if outcome.settled else None

    def note(self, metadata: Mapping[str, Any]) -> None:
        """Store the caller's metadata for hooks and dead letters."""
        if self.outcome.metadata is None:
            self.outcome.metadata = {}
        self.outcome.metadata[self.index] = metadata

    def remark(self, note: Note) -> None:
        """Store what is needed if the user record cannot be delivered."""
        if self.outcome.notes is None:
            self.outcome.notes = {}
        self.outcome.notes[self.index] = note
