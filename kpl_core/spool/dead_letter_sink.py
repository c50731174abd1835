"""Where dead letters go when not into the spool's own table, and what such a place answers.

A sink stores letters or says, letter by letter, why it does not: never an exception for one
letter among many, and never silence. Who sends them keeps what was refused.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from kpl_core.spool.dead_letter_queue import DeadLetterQueue
from kpl_core.spool.envelope import DeadLetter
from kpl_core.spool.loop_mailbox import LoopMailbox
from kpl_core.spool.spool_error import SpoolError

__all__ = ["CallableSink", "DeadLetterSink", "QueueSink", "Refusal", "SinkReport"]


class Refusal(NamedTuple):
    """A letter that was not stored, and one sentence that says why and what to do."""

    letter: DeadLetter
    why: str


class SinkReport(NamedTuple):
    """What became of the letters of one `send`: stored + refused = all of them."""

    stored: int
    refused: tuple[Refusal, ...]


class DeadLetterSink(Protocol):
    """Takes dead letters."""

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Store `letters` durably, as far as this place is durable, and report."""


class CallableSink:
    """Hands each letter to a function or coroutine function of the caller's; what it raises is not caught."""

    def __init__(self, take: Callable[[DeadLetter], Awaitable[object] | object]) -> None:
        self._take = take

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Call the function for one letter after another."""
        for letter in letters:
            taken = self._take(letter)
            if isinstance(taken, Awaitable):
                await taken
        return SinkReport(len(letters), ())


class QueueSink:
    """The spool's own table as a sink: all letters of a `send` in one transaction."""

    def __init__(self, queue: DeadLetterQueue) -> None:
        self._queue = queue
        self._mailbox = LoopMailbox()

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Store the letters; all are refused if the queue is full or the disk fails."""
        try:
            await self._mailbox.wait_for(self._queue.bury_nowait(letters))
        except SpoolError as error:
            return SinkReport(0, tuple(Refusal(letter, str(error)) for letter in letters))
        return SinkReport(len(letters), ())
