"""What the spool's tests control: a fake producer, and the moment of a commit."""

import threading
from collections.abc import Callable

import pytest

from kpl_core.durability.spool import SpooledRecord
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from kpl_core.records.record_result import RecordResult
from tests.support.durability_scene import DELIVERED

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


class Gate:
    """Holds every commit until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        commit = SpoolStore.commit

        def wait_and_commit(store: SpoolStore, changes: Changes) -> Removed:
            self.reached.set()
            self.opened.wait(20.0)
            return commit(store, changes)

        monkeypatch.setattr(SpoolStore, "commit", wait_and_commit)
