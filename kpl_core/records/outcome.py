"""The shared outcome: one object for all user records in one Kinesis record.

Finishing an aggregated record of 450 user records settles one outcome, not 450 futures. A delivery is a pair
(outcome, index). When user records are separated, because some expired or belong to another shard, the old outcome
stores where each of them moved. A delivery follows these moves when its result is read.

Attempts are a linked list, newest first, which all user records of the same attempts share.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from kpl_core.records.record_result import Attempt, Place, RecordResult

# The number of no outcome.
UNPUT: Final = 2**32 - 1

# Where else the user record is stored: in the spool, in the dead letters, or with a caller that retries a failed put.
Origin = Literal["write_ahead", "replay", "redrive", "caller"]


class Note(NamedTuple):
    """The other fields that the spool and dead letters need if a user record cannot be delivered."""

    flow: str | None
    origin: Origin | None = None
    # It was put without aggregation, and stays so.
    is_alone: bool = False


class History(msgspec.Struct, eq=False):
    """One attempt, and a link to the earlier ones.

    The garbage collector tracks it, because only then does CPython limit the recursion when it frees a chain. Without
    that, freeing 100,000 attempts (1,000 in a thread on musl) overflows the C stack.
    """

    attempt: Attempt
    earlier: "History | None"
    # The cached result of `to_tuple`, which all user records of these attempts share.
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
    """A task or thread that waits until an outcome is settled or its user records move."""

    def set(self) -> object:
        """Wake the waiter. It is called at most once, from the producer's event loop."""


class BatchRunner(Protocol):
    """Drives a stream whose user records may wait in a batch."""

    def put_batch(self) -> None:
        """Put the batch, because something waits for one of its records."""


class Outcome(msgspec.Struct, eq=False, gc=False):
    """The result of the user records of one Kinesis record.

    It is settled once, for all user records that did not move to another outcome. It is compared by identity.
    """

    settled: bool = False
    shard_id: str | None = None
    # Set after a success, None after a failure.
    sequence_number: str | None = None
    history: History | None = None
    # Attempts of single user records before they moved here. Most user records have none.
    histories: dict[int, History] | None = None
    # The new outcome and index of user records that moved away.
    moved: "dict[int, tuple[Outcome, int]] | None" = None
    # By index: the metadata from callers, for dead letters. None once the result is final: it may hold any object,
    # also one that holds a delivery of this outcome, and the collector finds no cycle through here.
    metadata: dict[int, Mapping[str, Any]] | None = None
    notes: dict[int, Note] | None = None
    # After a failure: where the user records are stored.
    kept: Place | None = None
    # What a hook returned about the context in which the Kinesis record opened.
    opened_in: object = None
    waiters: list[Waiter] | None = None
    shared_result: RecordResult | None = None
    # While its user records wait in a batch (decision 57): returns what puts it, None once that is gone.
    batch_runner: "Callable[[], BatchRunner | None] | None" = None

    def attempted(self, attempt: Attempt) -> None:
        """Add an attempt of all user records of this Kinesis record."""
        self.history = History(attempt, self.history)

    def settle(
        self, *, shard_id: str | None = None, sequence_number: str | None = None, kept: Place | None = None
    ) -> None:
        """Set the final result. A `sequence_number` means success."""
        self.shard_id = shard_id
        self.kept = kept
        self.metadata = None
        self.sequence_number = sequence_number
        # This must be the last field set, because another thread may read at any moment.
        self.settled = True
        if self.waiters is not None:
            self.wake()

    def move(self, index: int, outcome: "Outcome", new_index: int) -> None:
        """Move the user record at `index` to another outcome. Call `wake` after the last move."""
        if self.moved is None:
            self.moved = {}
        self.moved[index] = (outcome, new_index)
        if self.metadata is not None:
            self.metadata.pop(index, None)

    def wake(self) -> None:
        """Wake all waiters, so that they read the outcome again."""
        waiters, self.waiters = self.waiters, None
        if waiters is not None:
            # Iterate over a copy: a waiter in another thread may remove itself meanwhile, and would shift the others.
            for waiter in tuple(waiters):
                waiter.set()

    def history_of(self, index: int) -> History | None:
        """Return all attempts of the user record at `index`, including those before it moved here."""
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


class ResultHandle(msgspec.Struct, gc=False):
    """The handle of one user record, which gives its result.

    The garbage collector does not track it: it refers to an outcome, and no final outcome refers back.
    """

    outcome: Outcome
    index: int

    def __repr__(self) -> str:
        result = self.peek()
        return f"<{type(self).__name__} {'pending' if result is None else repr(result)}>"

    def follow(self) -> Outcome:
        """Return the current outcome of this user record, and keep it for the next call. Thread-safe."""
        outcome, index = self.outcome, self.index
        while outcome.moved is not None and (target := outcome.moved.get(index)) is not None:
            outcome, index = target
            # In one line, because another thread must not find the outcome of one step with the index of another.
            self.index, self.outcome = index, outcome
        return outcome

    @property
    def done(self) -> bool:
        """Return True if the result is known."""
        return self.follow().settled

    def peek(self) -> RecordResult | None:
        """Return the result, or None while it is not known."""
        outcome = self.follow()
        return outcome.result_of(self.index) if outcome.settled else None

    def note(self, metadata: Mapping[str, Any]) -> None:
        """Store the caller's metadata for hooks and dead letters."""
        if self.outcome.metadata is None:
            self.outcome.metadata = {}
        self.outcome.metadata[self.index] = metadata

    def remark(self, note: Note) -> None:
        """Store the fields that are needed if the user record cannot be delivered."""
        if self.outcome.notes is None:
            self.outcome.notes = {}
        self.outcome.notes[self.index] = note


class ResultHandles:
    """What the handles of many user records need, by position, without an object for each.

    `places` has two numbers for each: which of `outcomes` is its own, `UNPUT` until it is put, and its index there. An
    outcome may stand there twice.
    """

    __slots__ = ("outcomes", "places")

    def __init__(self, count: int) -> None:
        self.outcomes: list[Outcome] = []
        self.places = array("I", (UNPUT, 0)) * count

    def set(self, position: int, handle: ResultHandle) -> None:
        """Store the handle of the user record at `position`."""
        outcomes = self.outcomes
        if not outcomes or outcomes[-1] is not handle.outcome:
            outcomes.append(handle.outcome)
        self.places[2 * position] = len(outcomes) - 1
        self.places[2 * position + 1] = handle.index

    def set_all(self, start: int, handles: Sequence[ResultHandle]) -> None:
        """Store the handles of the user records from `start` on."""
        for position, handle in enumerate(handles, start):
            self.set(position, handle)
