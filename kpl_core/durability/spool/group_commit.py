"""The spool's writer thread: collects work, commits it in groups, and answers questions between commits.

Every access to the file happens on this thread, one after another, so the file needs no lock and a question sees every
earlier commit. Futures complete on this thread, so their callbacks must return quickly.

Several appends share one fsync: the first append of a group waits at most `interval` for others, and a group that is
large enough is committed at once. (Group commit: DeWitt et al., "Implementation techniques for main memory database
systems", 1984.)
"""

import logging
import math
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final, TypeVar

import msgspec

from kpl_core.durability.spool.spool_error import SpoolClosed, SpoolError, as_spool_error, is_temporary
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from kpl_core.options.reliability import SpoolOptions

_log: Final = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_Question = tuple[Callable[[SpoolStore], Any], "Future[Any]"]

# After a failed commit, confirmations are retried after this time. Appends fail at once, and their retry commits both.
_RETRY_SECONDS: Final = 1.0


class CommitRequest(msgspec.Struct):
    """Changes that one caller makes together, and the future it waits for."""

    changes: Changes
    done: "Future[Any]"
    # Called with the outcome before any caller that waits for `done` is woken.
    settle: Callable[[bool], None]
    result: Any = None
    # A confirmation is retried if its commit fails, because a delivered record stays delivered.
    is_confirmation: bool = False
    records: int = 0
    size_bytes: int = 0


class SpoolWriter:
    """Runs `store` on its own thread from `start` to `close`."""

    def __init__(self, store: SpoolStore, options: SpoolOptions, *, on_commit: Callable[[Removed], None]) -> None:
        self._store = store
        self._on_commit = on_commit
        self._group = GroupCommit(
            interval=options.commit_interval_ms / 1000,
            max_records=options.commit_max_records,
            max_bytes=options.commit_max_bytes,
        )
        self._ready = threading.Condition()
        self._work: list[CommitRequest] = []
        self._questions: list[_Question] = []
        self._current: tuple[list[CommitRequest], list[_Question]] = [], []
        # Why no more work is accepted; None while it is.
        self._refusal: SpoolError | None = None
        self._closing = False
        # The last commit failed for a reason that may end.
        self._disk_failing = False
        self._thread = threading.Thread(target=self._run, name=f"spool {store.path.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, work: CommitRequest) -> None:
        """Add `work` to the next commit.

        Raises:
            SpoolError: the spool is closed, or its file is broken permanently.
        """
        with self._ready:
            if self._refusal is not None:
                raise copy_of(self._refusal)
            self._work.append(work)
            before = self._group.due_at()
            self._group.add(records=work.records, size_bytes=work.size_bytes, now=monotonic())
            if self._group.due_at() < before:
                self._ready.notify()

    def ask(self, question: Callable[[SpoolStore], _Answer]) -> "Future[_Answer]":
        """Run `question` on the thread, between two commits.

        Raises:
            SpoolError: the spool is closed, or its file is broken permanently.
        """
        answer: Future[_Answer] = new_future()
        with self._ready:
            if self._refusal is not None:
                raise copy_of(self._refusal)
            self._questions.append((question, answer))
            self._ready.notify()
        return answer

    def close(self, timeout: float | None) -> bool:
        """Commit what was submitted and end the thread; return False if it did not end within `timeout` seconds."""
        with self._ready:
            self._closing = True
            if self._refusal is None:
                self._refusal = SpoolClosed(f"spool {self._store.path} is closed; it accepts no more records")
            self._ready.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            # Reached after `close`, or because of a bug. In both cases no caller may wait forever.
            with self._ready:
                if self._refusal is None:
                    self._refusal = SpoolClosed(f"spool {self._store.path}: its thread ended unexpectedly")
                work, questions = self._take()
            self._failed([each for each in self._current[0] + work if not each.done.done()], self._refusal)
            for _, answer in self._current[1] + questions:
                if not answer.done():
                    answer.set_exception(copy_of(self._refusal))

    def _step(self) -> bool:
        """Wait for work and do it; return False once no more work can arrive."""
        with self._ready:
            while not self._questions and not self._closing:
                wait = self._group.due_at() - monotonic()
                if wait <= 0:
                    break
                self._ready.wait(None if wait == math.inf else wait)
            due = self._closing or self._group.due_at() <= monotonic()
            work, questions = self._take() if due else ([], self._take_questions())
            closing = self._closing
        self._current = work, questions
        for question, answer in questions:
            self._answer(question, answer)
        if work:
            self._commit(work)
        self._current = [], []
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
        except Exception as error:  # noqa: BLE001 - only the caller that asked gets the exception
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _commit(self, work: list[CommitRequest]) -> None:
        try:
            removed = self._store.commit(_merged(work))
        except sqlite3.Error as error:
            self._failed(work, self._note(error))
            return
        except SpoolError as error:
            self._stop_accepting(error)
            self._failed(work, error)
            return
        if self._disk_failing:
            self._disk_failing = False
            _log.info("spool %s: the disk accepts records again", self._store.path)
        self._on_commit(removed)
        for each in work:
            each.settle(True)  # noqa: FBT003 - committed
            each.done.set_result(each.result)

    def _note(self, error: sqlite3.Error) -> SpoolError:
        translated = as_spool_error(error, self._store.path)
        if not is_temporary(error):
            self._stop_accepting(translated)
        elif not self._disk_failing:
            # Logged once until a commit succeeds: under load hundreds of commits a second would fail.
            self._disk_failing = True
            _log.error("%s", translated)
        return translated

    def _stop_accepting(self, error: SpoolError) -> None:
        with self._ready:
            if self._refusal is None:
                self._refusal = error
                _log.error("%s", error)

    def _failed(self, work: list[CommitRequest], error: SpoolError) -> None:
        with self._ready:
            kept = [] if self._refusal is not None else [each for each in work if each.is_confirmation]
            if kept:
                self._work[:0] = kept
                self._group.add(records=0, size_bytes=0, now=monotonic() + _RETRY_SECONDS)
        for each in work:
            if not (each.is_confirmation and kept):
                each.settle(False)  # noqa: FBT003 - not committed
                each.done.set_exception(copy_of(error))


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
    """Return a future that cannot be cancelled, because its work is done in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def copy_of(error: SpoolError) -> SpoolError:
    """Return an equal error. Raising the same object again and again would collect one traceback each time."""
    return type(error)(*error.args)


class GroupCommit:
    """Decides when a group is due, from its size and age; pure. `interval` is in seconds."""

    def __init__(self, *, interval: float, max_records: int, max_bytes: int) -> None:
        self._interval = interval
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records = 0
        self._size_bytes = 0
        self._oldest_at = math.inf

    def add(self, *, records: int, size_bytes: int, now: float) -> None:
        """Add work that arrived at `now`, or that must not be committed before then."""
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
        """Start a new, empty group."""
        self._records = 0
        self._size_bytes = 0
        self._oldest_at = math.inf
