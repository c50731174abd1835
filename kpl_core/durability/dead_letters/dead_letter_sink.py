"""Where dead letters go when not into the spool's own table, and what such a place answers.

A sink stores letters or says, letter by letter, why it does not: never an exception for one
letter among many, and never silence. Who sends them keeps what was refused.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from kpl_core.durability.dead_letters.dead_letter_queue import DeadLetterQueue
from kpl_core.durability.spool.envelope import DeadLetter
from kpl_core.durability.spool.loop_mailbox import LoopMailbox
from kpl_core.durability.spool.spool_error import SpoolError

__all__ = ["CallableSink", "DeadLetterSink", "QueueSink", "Refusal", "SinkReport"]

_log: Final = logging.getLogger(__name__)


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
    """Hands each letter to a function or coroutine function; one for which it raises is refused."""

    def __init__(self, take: Callable[[DeadLetter], Awaitable[object] | object]) -> None:
        self._take = take

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Call the function for one letter after another; what it raises is logged."""
        refused: list[Refusal] = []
        for letter in letters:
            try:
                taken = self._take(letter)
                if isinstance(taken, Awaitable):
                    await taken
            except Exception as error:  # noqa: BLE001 - the caller's own code; the letters before and after are safe
                _log.exception("a function that takes dead letters failed for %s", letter.id)
                refused.append(Refusal(letter, f"the function that takes dead letters raised {type(error).__name__}"))
        return SinkReport(len(letters) - len(refused), tuple(refused))


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
