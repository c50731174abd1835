"""A fake producer for the spool's tests, controlled by the test."""

from collections.abc import Callable

import anyio

from kpl_core.durability.spool import SpooledRecord
from kpl_core.records.record_result import RecordResult
from tests.durability.spool.records import DELIVERED

Finished = Callable[[RecordResult], None]


class Receiver:
    """A producer: takes records, and gives each the next answer that is prepared for its data, else delivers it."""

    def __init__(self) -> None:
        self.answers: dict[bytes, list[RecordResult | Exception]] = {}
        self.delivered: list[bytes] = []
        self.held: list[tuple[SpooledRecord, Finished]] = []
        self.hold = False
        self.most_held = 0

    def put(self, record: SpooledRecord, finished: Finished) -> None:
        answers = self.answers.get(record.data)
        answer = answers.pop(0) if answers else DELIVERED
        if isinstance(answer, Exception):
            raise answer
        if self.hold:
            self.held.append((record, finished))
            self.most_held = max(self.most_held, len(self.held))
            return
        if answer.successful:
            self.delivered.append(record.data)
        finished(answer)

    def deliver_held(self) -> None:
        held, self.held = self.held, []
        for record, finished in held:
            self.delivered.append(record.data)
            finished(DELIVERED)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the spool's writer thread has done its work."""
    with anyio.fail_after(20.0):
        while not condition():  # noqa: ASYNC110 - the writer thread sets no event for these conditions
            await anyio.sleep(0.001)
