"""The spool's own thread: gathers work, commits it in groups, answers questions in between.

Everything that touches the file happens here, one thing after another, so the file needs no
lock and a question sees every commit before it. Futures complete on this thread: what is
hung on them must be quick.
"""

import logging
import math
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import msgspec

from kpl_core.durability.spool.spool_error import SpoolClosed, SpoolError, as_spool_error, passes
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from kpl_core.options.reliability import SpoolOptions

__all__ = ["CommitRequest", "GroupCommit", "SpoolWriter"]

_log: Final = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_Question = tuple[Callable[[SpoolStore], Any], "Future[Any]"]

# Marks whose commit failed are tried again this much later; appends fail at once and bring them along.
_RETRY_SECONDS: Final = 1.0


class CommitRequest(msgspec.Struct):
    """Some changes that are made together, and who waits for them."""

    changes: Changes
    done: "Future[Any]"
    # Told whether they were made, before anybody who waits for `done` is woken.
    settle: Callable[[bool], None]
    result: Any = None
    # A mark is kept and tried again if its commit fails: what was delivered stays delivered.
    is_mark: bool = False
    records: int = 0
    size_bytes: int = 0


class SpoolWriter:
    """Runs `store` on a thread of its own from `start` to `close`."""

    def __init__(
        self,
        store: SpoolStore,
        options: SpoolOptions,
        *,
        clock: Callable[[], float],
        on_commit: Callable[[Removed, float], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_commit = on_commit
        self._group = GroupCommit(
            interval=options.commit_interval_ms / 1000,
            max_records=options.commit_max_records,
            max_bytes=options.commit_max_bytes,
        )
        self._ready = threading.Condition()
        self._work: list[CommitRequest] = []
        self._questions: list[_Question] = []
        self._in_hand: tuple[list[CommitRequest], list[_Question]] = [], []
        # Why no more work is taken, None while it is.
        self._refusal: SpoolError | None = None
        self._closing = False
        # The disk has refused something that it may take later.
        self._in_trouble = False
        self._thread = threading.Thread(target=self._run, name=f"spool {store.path.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, work: CommitRequest) -> None:
        """Let `work` join the next commit.

        Raises:
            SpoolError: the spool is closed, or its file is broken for good.
        """
        with self._ready:
            if self._refusal is not None:
                raise another(self._refusal)
            self._work.append(work)
            before = self._group.due_at()
            self._group.add(records=work.records, size_bytes=work.size_bytes, now=self._clock())
            if self._group.due_at() < before:
                self._ready.notify()

    def ask(self, question: Callable[[SpoolStore], _Answer]) -> "Future[_Answer]":
        """Let `question` be answered on the thread, between two commits.

        Raises:
            SpoolError: the spool is closed, or its file is broken for good.
        """
        answer: Future[_Answer] = new_future()
        with self._ready:
            if self._refusal is not None:
                raise another(self._refusal)
            self._questions.append((question, answer))
            self._ready.notify()
        return answer

    def close(self, timeout: float | None) -> bool:
        """Commit what was submitted, end the thread; False if it did not end within `timeout` seconds."""
        with self._ready:
            self._closing = True
            if self._refusal is None:
                self._refusal = SpoolClosed(f"spool {self._store.path} is closed; it takes no more records")
            self._ready.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            # Reached after close, or because of a bug: then at least nobody waits for ever.
            with self._ready:
                if self._refusal is None:
                    self._refusal = SpoolClosed(f"spool {self._store.path}: its thread ended unexpectedly")
                work, questions = self._take()
            self._failed([each for each in self._in_hand[0] + work if not each.done.done()], self._refusal)
            for _, answer in self._in_hand[1] + questions:
                if not answer.done():
                    answer.set_exception(another(self._refusal))

    def _turn(self) -> bool:
        """Wait for something to do and do it; False once there is nothing more to come."""
        with self._ready:
            while not self._questions and not self._closing:
                wait = self._group.due_at() - self._clock()
                if wait <= 0:
                    break
                self._ready.wait(None if wait == math.inf else wait)
            due = self._closing or self._group.due_at() <= self._clock()
            work, questions = self._take() if due else ([], self._take_questions())
            closing = self._closing
        self._in_hand = work, questions
        for question, answer in questions:
            self._answer(question, answer)
        if work:
            self._commit(work)
        self._in_hand = [], []
        return not closing

    def _take(self) -> tuple[list[CommitRequest], list[_Question]]:
        work, self._work = self._work, []
        self._group.committed()
        return work, self._take_questions()

    def _take_questions(self) -> list[_Question]:
        questions, self._questions = self._questions, []
        return questions

    def _answer(self, question: Callable[[SpoolStore], _Answer], answer: "Future[_Answer]") -> None:
        try:
            result = question(self._store)
        except sqlite3.Error as error:
            answer.set_exception(self._note(error))
        except Exception as error:  # noqa: BLE001 - whoever asked something impossible is told, and nobody else
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _commit(self, work: list[CommitRequest]) -> None:
        started_at = self._clock()
        try:
            removed = self._store.commit(_merged(work))
        except sqlite3.Error as error:
            self._failed(work, self._note(error))
            return
        except SpoolError as error:
            self._refuse(error)
            self._failed(work, error)
            return
        if self._in_trouble:
            self._in_trouble = False
            _log.info("spool %s: the disk takes records again", self._store.path)
        self._on_commit(removed, self._clock() - started_at)
        for each in work:
            each.settle(True)  # noqa: FBT003 - what was made
            each.done.set_result(each.result)

    def _note(self, error: sqlite3.Error) -> SpoolError:
        translated = as_spool_error(error, self._store.path)
        if not passes(error):
            self._refuse(translated)
        elif not self._in_trouble:
            # Once, until a commit succeeds: under load there are hundreds a second that do not.
            self._in_trouble = True
            _log.error("%s", translated)
        return translated

    def _refuse(self, error: SpoolError) -> None:
        with self._ready:
            if self._refusal is None:
                self._refusal = error
                _log.error("%s", error)

    def _failed(self, work: list[CommitRequest], error: SpoolError) -> None:
        with self._ready:
            kept = [] if self._refusal is not None else [each for each in work if each.is_mark]
            if kept:
                self._work[:0] = kept
                self._group.add(records=0, size_bytes=0, now=self._clock() + _RETRY_SECONDS)
        for each in work:
            if not (each.is_mark and kept):
                each.settle(False)  # noqa: FBT003 - nothing was made
                each.done.set_exception(another(error))


def _merged(work: list[CommitRequest]) -> Changes:
    if len(work) == 1:
        return work[0].changes
    merged = Changes()
    for each in work:
        changes = each.changes
        merged.records += changes.records
        merged.confirmed_ids += changes.confirmed_ids
        merged.letters += changes.letters
        merged.removed_letters += changes.removed_letters
        merged.rescheduled += changes.rescheduled
    return merged


def new_future() -> "Future[Any]":
    """Return a future that cannot be cancelled: what it stands for happens in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def another(error: SpoolError) -> SpoolError:
    """Return an equal error: one that is raised again and again would gather a traceback each time."""
    return type(error)(*error.args)


class GroupCommit:
    """Collects no work, only its size; pure. `interval` is in seconds."""

    __slots__ = ("_interval", "_max_bytes", "_max_records", "_oldest_at", "_records", "_size_bytes")

    def __init__(self, *, interval: float, max_records: int, max_bytes: int) -> None:
        self._interval = interval
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records = 0
        self._size_bytes = 0
        self._oldest_at = math.inf

    def add(self, *, records: int, size_bytes: int, now: float) -> None:
        """Note work that came in at `now`, or that must not be tried before."""
        self._records += records
        self._size_bytes += size_bytes
        if now < self._oldest_at:
            self._oldest_at = now

    def due_at(self) -> float:
        """Return when to commit: `math.inf` without work, `-math.inf` if the group is large enough."""
        if self._records >= self._max_records or self._size_bytes >= self._max_bytes:
            return -math.inf
        return self._oldest_at + self._interval

    def committed(self) -> None:
        """Start the next group, with nothing in it."""
        self._records = 0
        self._size_bytes = 0
        self._oldest_at = math.inf
