"""The spool and its thread: an acknowledged record is on the disk, and every record is in one state."""

import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec
import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import (
    LetterFilter,
    ReadOnlySpool,
    Spool,
    SpoolClosed,
    SpoolCorrupt,
    SpoolError,
    SpoolFull,
    SpoolLocked,
    SpoolOptions,
    SpoolUnavailable,
    group_commit,
)
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from kpl_core.durability.spool.tables import RecordRow
from tests.support.durability_scene import spooled

SECONDS = 20.0


@pytest.fixture
def options(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0)


@pytest.fixture
def spool(options: SpoolOptions) -> Iterator[Spool]:
    with Spool(options) as each:
        yield each


def stored_ids(path: Path) -> list[int]:
    """Read the file as another program would."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    ids = [record_id for (record_id,) in connection.execute("SELECT id FROM spooled ORDER BY id")]
    connection.close()
    return ids


def test_the_future_of_an_append_completes_when_the_records_are_in_the_file(
    spool: Spool, options: SpoolOptions
) -> None:
    ids = spool.append_nowait([spooled(1), spooled(2)], claim=True).result(SECONDS)
    assert ids == range(1, 3)
    assert stored_ids(options.file) == [1, 2]


def test_a_confirmed_record_is_deleted_from_the_file(spool: Spool, options: SpoolOptions) -> None:
    ids = spool.append_nowait([spooled(1), spooled(2)], claim=True).result(SECONDS)
    spool.confirm([ids[0]]).result(SECONDS)
    spool.confirm([ids[0]]).result(SECONDS)
    assert stored_ids(options.file) == [2]
    statistics = spool.statistics()
    assert (statistics.records, statistics.claimed_records, statistics.backlog_records) == (1, 1, 0)
    assert (statistics.appended_records, statistics.confirmed_records) == (2, 1)


def test_unconfirmed_records_are_backlog_after_a_restart(options: SpoolOptions) -> None:
    with Spool(options) as first:
        ids = first.append_nowait([spooled(number) for number in range(5)], claim=True).result(SECONDS)
        first.confirm([ids[1]]).result(SECONDS)
    with Spool(options) as second:
        claimed = second.claim_backlog_nowait(10).result(SECONDS)
        assert [(each.id, each.record.data) for each in claimed] == [(1, b"0"), (3, b"2"), (4, b"3"), (5, b"4")]
        assert second.append_nowait([spooled()], claim=True).result(SECONDS) == range(6, 7)


def test_the_backlog_is_the_unclaimed_records_oldest_first(spool: Spool) -> None:
    held = spool.append_nowait([spooled(1)], claim=True).result(SECONDS)
    spool.append_nowait([spooled(2), spooled(3)], claim=False).result(SECONDS)
    assert spool.statistics().backlog_records == 2
    assert [each.id for each in spool.claim_backlog_nowait(1).result(SECONDS)] == [2]
    assert spool.release(held) == 1
    assert [each.id for each in spool.claim_backlog_nowait(5).result(SECONDS)] == [1]
    assert [each.id for each in spool.claim_backlog_nowait(5).result(SECONDS)] == [3]
    assert spool.claim_backlog_nowait(5).result(SECONDS) == []


def test_released_records_are_claimed_within_the_byte_limit(spool: Spool) -> None:
    records = [spooled(data=bytes(10_000)) for _ in range(9)]
    spool.release(spool.append_nowait(records, claim=True).result(SECONDS))
    portions = [spool.claim_backlog_nowait(100, max_bytes=25_000).result(SECONDS)]
    # Read once, then released behind the cursor.
    spool.release([each.id for each in portions.pop()])
    while claimed := spool.claim_backlog_nowait(100, max_bytes=25_000).result(SECONDS):
        portions.append(claimed)
    assert [[each.id for each in portion] for portion in portions] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_listeners_are_called_only_when_the_backlog_grows(spool: Spool) -> None:
    heard = []
    spool.listen(lambda: heard.append(1))
    ids = spool.append_nowait([spooled()], claim=True).result(SECONDS)
    assert not heard
    spool.release(ids)
    spool.release(ids)
    assert len(heard) == 1
    spool.append_nowait([spooled()], claim=False).result(SECONDS)
    assert len(heard) == 2


def test_a_full_spool_rejects_records_until_some_are_confirmed(tmp_path: Path) -> None:
    with Spool(SpoolOptions(path=tmp_path / "spool.db", max_bytes=1024 * 1024, commit_interval_ms=0.0)) as spool:
        record = spooled(data=bytes(100_000))
        ids = [spool.append_nowait([record], claim=True).result(SECONDS)[0] for _ in range(10)]
        with pytest.raises(SpoolFull):
            spool.append_nowait([record], claim=True)
        spool.confirm([ids[0]]).result(SECONDS)
        spool.append_nowait([record], claim=True).result(SECONDS)
        assert spool.statistics().records == 10


def test_appends_from_many_threads_share_commits(tmp_path: Path) -> None:
    with Spool(SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=10.0)) as spool:
        barrier = threading.Barrier(8)
        futures: list[Future[range]] = []

        def append() -> None:
            barrier.wait()
            futures.extend(spool.append_nowait([spooled(number)], claim=True) for number in range(100))

        threads = [threading.Thread(target=append) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait(futures, SECONDS)
        ids = sorted(record_id for future in futures for record_id in future.result())
        assert ids == list(range(1, 801))
        assert spool.statistics().commits < 100


def test_an_append_cannot_be_cancelled(spool: Spool) -> None:
    stored = spool.append_nowait([spooled()], claim=True)
    assert not stored.cancel()
    assert stored.result(SECONDS) == range(1, 2)


def test_close_commits_submitted_records(options: SpoolOptions) -> None:
    slow = msgspec.structs.replace(options, commit_interval_ms=1_000.0)
    spool = Spool(slow).open()
    stored = spool.append_nowait([spooled()], claim=True)
    assert spool.close()
    assert stored.result(0) == range(1, 2)
    assert stored_ids(options.file) == [1]


def test_a_closed_spool_raises_spool_closed(options: SpoolOptions) -> None:
    spool = Spool(options)
    with pytest.raises(SpoolClosed, match="is not open"):
        spool.append_nowait([spooled()], claim=True)
    with spool:
        pass
    with pytest.raises(SpoolClosed, match="is closed"):
        spool.append_nowait([spooled()], claim=True)
    with pytest.raises(SpoolClosed):
        spool.claim_backlog_nowait(1)
    with pytest.raises(SpoolClosed, match="create another Spool"):
        spool.open()
    assert spool.statistics().records == 0
    assert spool.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_must_open_its_own_spool(spool: Spool) -> None:
    says, child_says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            spool.append_nowait([spooled()], claim=True)
        except SpoolClosed as error:
            os.write(child_says, str(error).encode())
        finally:
            os._exit(0)
    os.close(child_says)
    os.waitpid(child, 0)
    with os.fdopen(says, "rb") as answer:
        assert f"was opened by process {os.getpid()}".encode() in answer.read()
    assert spool.append_nowait([spooled()], claim=True).result(SECONDS) == range(1, 2)


def test_a_damaged_record_is_not_claimed_and_stays_in_the_file(options: SpoolOptions) -> None:
    with Spool(options) as spool:
        spool.append_nowait([spooled(data=b"first"), spooled(data=b"second"), spooled(data=b"third")], claim=True)
    text = options.file.read_bytes()
    assert text.count(b"second") == 1
    options.file.write_bytes(text.replace(b"second", b"SECOND"))
    with Spool(options) as spool:
        claimed = spool.claim_backlog_nowait(10).result(SECONDS)
        assert [each.record.data for each in claimed] == [b"first", b"third"]
        assert (spool.statistics().records, spool.statistics().damaged_records) == (3, 1)
    assert stored_ids(options.file) == [1, 2, 3]


def fail_commits(monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
    """Let the next commits fail as SQLite would, with these codes."""
    left = list(codes)
    real = SpoolStore.commit

    def commit(store: SpoolStore, changes: Changes) -> Removed:
        if not left:
            return real(store, changes)
        error = sqlite3.OperationalError("as the disk says")
        error.sqlite_errorcode = left.pop(0)
        raise error

    monkeypatch.setattr(SpoolStore, "commit", commit)


def test_a_temporary_commit_failure_fails_its_appends_and_the_next_commit_works(
    spool: Spool, options: SpoolOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fail_commits(monkeypatch, sqlite3.SQLITE_FULL, sqlite3.SQLITE_FULL)
    for _ in range(2):
        with pytest.raises(SpoolUnavailable, match="the disk that holds it is full"):
            spool.append_nowait([spooled()], claim=True).result(SECONDS)
    assert (spool.statistics().records, spool.statistics().record_bytes) == (0, 0)
    assert spool.append_nowait([spooled()], claim=True).result(SECONDS) == range(3, 4)
    assert stored_ids(options.file) == [3]
    # Logged when the failure begins and when it ends, not at each commit in between.
    failed, works = caplog.messages
    assert "the disk that holds it is full" in failed
    assert "accepts records again" in works


def test_a_confirmation_is_retried_after_a_failed_commit(
    spool: Spool, options: SpoolOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = spool.append_nowait([spooled()], claim=True).result(SECONDS)
    monkeypatch.setattr(group_commit, "_RETRY_SECONDS", 0.01)
    fail_commits(monkeypatch, sqlite3.SQLITE_FULL)
    marked = spool.confirm(ids)
    marked.result(SECONDS)
    assert stored_ids(options.file) == []
    assert spool.statistics().records == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_IOERR_FSYNC, SpoolUnavailable),
        (sqlite3.SQLITE_CORRUPT, SpoolCorrupt),
        (sqlite3.SQLITE_MISUSE, SpoolUnavailable),
    ],
)
def test_after_a_permanent_error_nothing_is_acknowledged(
    options: SpoolOptions, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[SpoolError]
) -> None:
    with Spool(options) as spool:
        ids = spool.append_nowait([spooled()], claim=True).result(SECONDS)
        fail_commits(monkeypatch, code)
        with pytest.raises(kind):
            spool.append_nowait([spooled()], claim=True).result(SECONDS)
        for call in (
            lambda: spool.append_nowait([spooled()], claim=True),
            lambda: spool.confirm(ids),
            lambda: spool.claim_backlog_nowait(1),
        ):
            with pytest.raises(kind):
                call()
        assert spool.statistics().claimed_records == 1
    assert stored_ids(options.file) == [1]


def test_a_crash_of_the_thread_fails_all_pending_futures(
    options: SpoolOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    spool = Spool(options).open()
    monkeypatch.setattr(SpoolStore, "commit", lambda *_: 1 / 0)
    stored = spool.append_nowait([spooled()], claim=True)
    with pytest.raises(SpoolClosed, match="ended unexpectedly"):
        stored.result(SECONDS)
    with pytest.raises(SpoolClosed, match="ended unexpectedly"):
        spool.append_nowait([spooled()], claim=True)
    assert spool.close(SECONDS)


def test_close_times_out_when_the_disk_hangs(options: SpoolOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    commit = SpoolStore.commit

    def hanging(store: SpoolStore, changes: Changes) -> Removed:
        hang.wait(SECONDS)
        return commit(store, changes)

    monkeypatch.setattr(SpoolStore, "commit", hanging)
    spool = Spool(options).open()
    stored = spool.append_nowait([spooled()], claim=True)
    assert not spool.close(0.01)
    assert not stored.done()
    hang.set()
    assert spool.close(SECONDS)
    assert stored.result(0) == range(1, 2)


def test_the_repr_shows_path_and_counts(spool: Spool, options: SpoolOptions) -> None:
    spool.append_nowait([spooled()], claim=True).result(SECONDS)
    assert repr(spool) == f"Spool('{options.file}', records=1, letters=0)"


def test_nothing_is_acknowledged_after_the_file_is_removed(spool: Spool, options: SpoolOptions) -> None:
    options.file.unlink()
    with pytest.raises(SpoolUnavailable, match="removed or replaced"):
        spool.append_nowait([spooled()], claim=True).result(SECONDS)
    with pytest.raises(SpoolUnavailable, match="removed or replaced"):
        spool.append_nowait([spooled()], claim=True)


def test_a_question_that_fails_on_the_disk_can_be_repeated(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = spool.append_nowait([spooled(1), spooled(2)], claim=False).result(SECONDS)
    claimed = spool.claim_backlog_nowait(10).result(SECONDS)
    spool.release(each.id for each in claimed)

    def locked(_: SpoolStore, wanted: list[int], max_bytes: int) -> list[RecordRow]:
        error = sqlite3.OperationalError(f"locked, so no {wanted}, however few of {max_bytes} bytes")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    with monkeypatch.context() as trouble:
        trouble.setattr(SpoolStore, "records_by_id", locked)
        with pytest.raises(SpoolLocked, match="another program keeps the file locked"):
            spool.claim_backlog_nowait(10).result(SECONDS)
    assert [each.id for each in spool.claim_backlog_nowait(10).result(SECONDS)] == list(ids)


def test_a_spool_error_in_a_question_is_raised_to_its_caller(spool: Spool) -> None:
    def refuse(_: SpoolStore) -> None:
        message = "not now"
        raise SpoolFull(message)

    with pytest.raises(SpoolFull, match="not now"):
        spool.ask(refuse).result(SECONDS)
    assert spool.append_nowait([spooled()], claim=True).result(SECONDS) == range(1, 2)


def test_an_exception_in_a_question_is_raised_only_to_its_caller(spool: Spool) -> None:
    with pytest.raises(ZeroDivisionError):
        spool.ask(lambda _: 1 / 0).result(SECONDS)
    with pytest.raises(UnicodeEncodeError):
        DeadLetterQueue(spool).count_nowait(LetterFilter(tenant="\udcff")).result(SECONDS)
    assert spool.append_nowait([spooled()], claim=True).result(SECONDS) == range(1, 2)


def test_confirmations_on_a_closed_spool_are_rejected(options: SpoolOptions) -> None:
    with Spool(options) as spool:
        ids = spool.append_nowait([spooled()], claim=True).result(SECONDS)
    with pytest.raises(SpoolClosed):
        spool.confirm(ids)
    assert spool.statistics().claimed_records == 1


def test_a_spool_that_was_never_opened_is_closed(options: SpoolOptions) -> None:
    assert Spool(options).close()


def test_a_folder_that_cannot_be_read_is_said_with_what_to_do(
    options: SpoolOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("kpl_core.durability.spool.store.require_main_file", refuse)
    with pytest.raises(SpoolUnavailable, match="Permission denied; make its folder writable for this process"):
        Spool(options).open()


def test_a_reader_gives_each_stored_record_with_its_number(spool: Spool, options: SpoolOptions) -> None:
    numbers = spool.append_nowait([spooled(number) for number in range(3)], claim=False).result(SECONDS)
    with ReadOnlySpool(options.file) as reader:
        assert [tuple(numbered) for page in reader.records() for numbered in page] == [
            (stored, spooled(number)) for number, stored in enumerate(numbers)
        ]
