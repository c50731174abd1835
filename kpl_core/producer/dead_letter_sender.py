"""Sends dead letters to the caller's sink: a queue, and the one task that empties it."""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

import anyio

from kpl_core.durability.dead_letters import DeadLetterSink, SinkReport
from kpl_core.durability.spool import DeadLetter

_log: Final = logging.getLogger(__name__)


class DeadLetterSender:
    """Sends letters in the order in which they come; each bundle's future completes with the sink's report."""

    def __init__(self, sink: DeadLetterSink) -> None:
        self._sink = sink
        self._bundles: deque[tuple[Sequence[DeadLetter], Future[SinkReport]]] = deque()
        self._letters_of: dict[Future[SinkReport], Sequence[DeadLetter]] = {}
        self._arrived = anyio.Event()

    def send_nowait(self, letters: Sequence[DeadLetter]) -> "Future[SinkReport]":
        """Enqueue a bundle of letters to be sent."""
        future: Future[SinkReport] = Future()
        self._bundles.append((letters, future))
        self._letters_of[future] = letters
        self._arrived.set()
        return future

    async def run(self) -> None:
        """Send the letters until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            while self._bundles:
                letters, future = self._bundles.popleft()
                try:
                    report = _require_report(await self._sink.send(letters), len(letters))
                except Exception as error:  # noqa: BLE001 - the caller's own code must not end the producer; logged
                    _log.exception("the dead-letter sink failed; %d user records have failed with it", len(letters))
                    future.set_exception(error)
                else:
                    future.set_result(report)

    def refused(self, future: "Future[SinkReport]") -> set[int]:
        """Return the indices of the letters that the sink refused, for a bundle that was answered."""
        letters = self._letters_of.pop(future, ())
        if future.exception() is not None:
            return set()
        refused = {refusal.letter.id for refusal in future.result().refused}
        return {index for index, letter in enumerate(letters) if letter.id in refused}


def _require_report(report: object, letters: int) -> SinkReport:
    """Return what a sink answered, if it is a report.

    Raises:
        TypeError: it is not a report. Without this check a sink that forgets to return one would look like no answer.
    """
    if not isinstance(report, SinkReport):
        message = (
            f"the dead-letter sink's send returned a {type(report).__name__} for {letters} letters; "
            f"return SinkReport(stored, refused)"
        )
        raise TypeError(message)
    return report
