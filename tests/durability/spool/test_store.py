"""The file: its schema, its migrations, its lock, and files that are not a spool."""

import os
import resource
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kpl_core.durability.spool import store as store_module
from kpl_core.durability.spool.envelope import encode, spooled_record_of
from kpl_core.durability.spool.process_lock import ProcessLock
from kpl_core.durability.spool.read_only_spool import ReadOnlySpool
from kpl_core.durability.spool.spool_error import SpoolCorrupt, SpoolLocked, SpoolUnavailable
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore, SpoolTotals
from kpl_core.durability.spool.tables import APPLICATION_ID, MIGRATIONS, LetterRow, RecordRow, migrate, records_after
from kpl_core.errors import ConfigError
from kpl_core.options.reliability import SpoolOptions


@pytest.fixture
def options(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(path=tmp_path / "spool.db", busy_timeout_ms=0)


def rows(*ids: int) -> list[RecordRow]:
    return [RecordRow(record_id, 0, b"%d" % record_id) for record_id in ids]


def test_committed_rows_survive_reopening_the_file(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    assert store.open() == SpoolTotals(0, 0, 0, 0, 0, 0)
    assert store.commit(Changes(records=rows(1, 2, 30))) == Removed(0, 0)
    store.commit(Changes(confirmed_ids=[2]))
    store.close()
    assert store.open() == SpoolTotals(2, 3, 30, 0, 0, 0)
    assert records_after(store.connection, 1, 10, 100) == rows(30)
    assert store.records_by_id([30, 2, 1], 10**9) == (rows(1, 30), ())
    store.close()


NAMES = tuple(f"stream-{number}" for number in range(150))


def envelopes(*streams: str) -> list[RecordRow]:
    return [
        RecordRow(number, *encode(spooled_record_of(stream, "k", b"orders", accepted_at=1.0)))
        for number, stream in enumerate(streams, 1)
    ]


@pytest.mark.parametrize("streams", [("orders", "", "order", "arn:aws:kinesis:eu-west-1:1:stream/orders"), NAMES])
def test_the_streams_of_the_records_are_known_once_the_file_is_open(
    options: SpoolOptions, streams: tuple[str, ...]
) -> None:
    store = SpoolStore(options)
    store.open()
    assert store.found_streams == frozenset()
    store.commit(Changes(records=[*rows(0), *envelopes(*streams * 3)]))
    store.close()
    store.open()
    assert store.found_streams == {*streams[:100]}
    store.close()


@pytest.mark.parametrize("count", [1, 2, 3, 511, 512, 513, 1_500])
def test_any_number_of_rows_can_be_written_and_deleted(options: SpoolOptions, count: int) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=rows(*range(1, count + 1))))
    assert len(records_after(store.connection, 0, 10_000, 10**9)) == count
    store.commit(Changes(confirmed_ids=list(range(1, count + 1))))
    assert store.totals().records == 0
    store.close()


def test_a_library_that_allows_999_variables_writes_and_deletes_as_many_rows(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    # What SQLite before 3.32 allows.
    store.connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)
    letters = [LetterRow(number, "id", 1, "s", None, "expired", 0.0, None, 0, 0, b"x") for number in range(1, 1_201)]
    store.commit(Changes(records=rows(*range(1, 1_201)), letters=letters))
    assert store.totals() == SpoolTotals(1_200, sum(len(str(n)) for n in range(1, 1_201)), 1_200, 1_200, 1_200, 1_200)
    found, left = store.records_by_id(range(1, 1_201), 10**9)
    assert (len(found), left) == (1_200, ())
    numbers = list(range(1, 1_201))
    assert store.commit(Changes(confirmed_ids=numbers, removed_letters=numbers)) == Removed(1_200, 1_200)
    assert store.totals() == SpoolTotals(0, 0, 0, 0, 0, 0)
    store.close()


def test_an_sqlite_that_is_too_old_is_refused_before_a_file_is_made(
    options: SpoolOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.25.3")
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 25, 3))
    words = r"uses SQLite 3\.25\.3, a spool needs 3\.26\.0 or later; update the SQLite library"
    with pytest.raises(SpoolUnavailable, match=words):
        SpoolStore(options).open()
    assert not list(options.file.parent.iterdir())
    options.file.touch()
    with pytest.raises(SpoolUnavailable, match=words), ReadOnlySpool(options.file):
        pytest.fail("it opened the file")


def test_reading_stops_after_the_row_that_exceeds_the_byte_limit(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=[RecordRow(record_id, 0, b"x" * 100) for record_id in range(1, 10)]))
    assert len(records_after(store.connection, 0, 10, 250)) == 3
    found, left = store.records_by_id([9, 7, 5, 4, 2], 250)
    assert [row.id for row in found] == [2, 4, 5]
    assert sorted(left) == [7, 9]
    store.close()


def test_a_failed_transaction_changes_nothing(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=rows(1)))
    with pytest.raises(sqlite3.IntegrityError):
        store.commit(Changes(records=rows(2, 1)))
    assert store.totals().records == 1
    store.commit(Changes(records=rows(2)))
    store.close()


def test_only_the_owner_can_read_the_file(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=rows(1)))
    for path in options.file.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    store.close()


def test_a_second_spool_on_the_same_file_is_rejected_with_the_owners_pid(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    with pytest.raises(SpoolLocked, match=f"process {os.getpid()} owns this spool"):
        SpoolStore(options).open()
    store.close()
    store.open()
    store.close()


def test_files_that_others_may_read_become_private_when_the_spool_is_opened(options: SpoolOptions) -> None:
    """They keep 0644 from a copy, a backup or an older program; SQLite copies the mode of the file to -wal and -shm."""
    options.file.touch()
    options.file.chmod(0o644)
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=rows(1)))
    # As after a kill: the log and the shared memory stay, with the mode of the time when they were made.
    other = sqlite3.connect(options.file)
    other.execute("SELECT count(*) FROM spooled").fetchone()
    store.close()
    files = [Path(f"{options.file}{suffix}") for suffix in ("", "-wal", "-shm")]
    for path in files:
        path.chmod(0o644)
    store.open()
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 3
    store.close()
    other.close()


def test_a_link_instead_of_the_lock_file_overwrites_no_other_file(options: SpoolOptions, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    options.file.with_name(f"{options.file.name}.lock").symlink_to(victim)
    with pytest.raises(SpoolUnavailable, match="symbolic links"):
        SpoolStore(options).open()
    assert victim.read_text() == "precious"


def test_two_names_of_one_file_are_one_spool(options: SpoolOptions) -> None:
    link = options.file.with_name("link.db")
    link.symlink_to(options.file.name)
    first, second = SpoolStore(options), SpoolStore(SpoolOptions(path=link))
    first.open()
    with pytest.raises(SpoolLocked, match=str(os.getpid())):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_second_process_is_rejected_until_the_first_ends(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    program = (
        "from pathlib import Path\n"
        "from kpl_core.durability.spool import Spool, SpoolLocked, SpoolOptions\n"
        "try:\n"
        f"    Spool(SpoolOptions(path=Path({str(options.file)!r}))).open()\n"
        "except SpoolLocked as error:\n"
        "    print(error)\n"
    )

    def second_process() -> str:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert f"process {os.getpid()} owns this spool; stop it" in second_process()
    store.close()
    assert second_process() == ""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """The parent dies without unlocking (its descriptor is closed), the child keeps running."""
    lock = ProcessLock(tmp_path / "spool.lock").acquire()
    child_hears, say = os.pipe()
    hear, child_says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(child_says, b"x")
        os.read(child_hears, 1)
        os._exit(0)
    try:
        os.read(hear, 1)
        lock.forget()
        ProcessLock(tmp_path / "spool.lock").acquire().release()
    finally:
        os.write(say, b"x")
        os.waitpid(child, 0)
        for descriptor in (child_hears, say, hear, child_says):
            os.close(descriptor)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_released_lock_is_free_even_after_a_fork(tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "spool.lock").acquire()
    child_hears, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(child_hears, 1)
        os._exit(0)
    try:
        lock.release()
        ProcessLock(tmp_path / "spool.lock").acquire().release()
    finally:
        os.write(say, b"x")
        os.waitpid(child, 0)
        os.close(child_hears)
        os.close(say)


def test_a_lock_whose_folder_cannot_be_searched_is_not_held(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    lock = ProcessLock(folder / "spool.lock").acquire()
    folder.rename(tmp_path / "moved")
    folder.touch()
    assert not lock.is_held()
    lock.release()


def test_a_missing_folder_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(SpoolUnavailable, match="No such file or directory; create its folder"):
        SpoolStore(SpoolOptions(path=tmp_path / "missing" / "spool.db")).open()


def test_a_file_that_is_not_a_database_is_not_changed(options: SpoolOptions) -> None:
    options.file.write_bytes(b"dear diary, " * 1_000)
    with pytest.raises(SpoolCorrupt, match="not an SQLite database"):
        SpoolStore(options).open()
    assert options.file.read_bytes() == b"dear diary, " * 1_000


def test_a_database_of_another_application_is_not_changed(options: SpoolOptions) -> None:
    other = sqlite3.connect(options.file)
    other.execute("CREATE TABLE invoices (id INTEGER)")
    other.commit()
    other.close()
    with pytest.raises(SpoolCorrupt, match="database of another application"):
        SpoolStore(options).open()


def test_a_file_of_a_later_version_is_rejected(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    store.connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    store.close()
    with pytest.raises(SpoolCorrupt, match=f"version {len(MIGRATIONS) + 1}, this program supports {len(MIGRATIONS)}"):
        store.open()


def test_a_damaged_page_is_found_when_the_file_is_opened(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=[RecordRow(record_id, 0, os.urandom(1_000)) for record_id in range(1, 500)]))
    store.close()
    with options.file.open("r+b") as file:
        file.seek(16_384 * 7)
        file.write(b"\x5a" * 16_384)
    with pytest.raises(SpoolCorrupt, match="damaged"):
        store.open()
    # Rejected, but not left locked for the repair.
    ProcessLock(options.file.with_name("spool.db.lock")).acquire().release()


def record(number: int) -> Changes:
    return Changes(records=[RecordRow(number, 0, b"x")])


def test_a_lock_file_that_was_removed_is_made_again_and_still_excludes(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    options.file.with_name("spool.db.lock").unlink()
    store.commit(record(1))
    with pytest.raises(SpoolLocked):
        SpoolStore(options).open()
    store.commit(record(2))
    assert store.totals().records == 2
    store.close()


def test_nothing_is_committed_after_another_process_took_the_lock(options: SpoolOptions) -> None:
    store, second = SpoolStore(options), SpoolStore(options)
    store.open()
    store.commit(record(1))
    options.file.with_name("spool.db.lock").unlink()
    second.open()
    with pytest.raises(SpoolUnavailable, match="the lock file was replaced while in use"):
        store.commit(Changes(confirmed_ids=[1]))
    second.commit(record(2))
    assert second.totals().records == 2
    second.close()
    store.close()


def test_another_owner_is_noticed_though_it_changed_no_record_and_the_lock_file_is_back(options: SpoolOptions) -> None:
    """Then only the owner's token in the file says that another process had it."""
    store, second = SpoolStore(options), SpoolStore(options)
    store.open()
    store.commit(record(1))
    lock = options.file.with_name("spool.db.lock")
    lock.rename(lock.with_suffix(".kept"))
    second.open()
    second.close()
    lock.with_suffix(".kept").rename(lock)
    with pytest.raises(SpoolUnavailable, match="another process has written to the file"):
        store.commit(record(2))
    store.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_removed_log_is_noticed_and_its_records_are_saved(options: SpoolOptions, reopened: bool) -> None:
    store = SpoolStore(options)
    store.open()
    if reopened:
        store.close()
        store.open()
    for number in range(1, 101):
        store.commit(record(number))
    options.file.with_name("spool.db-wal").unlink()
    with pytest.raises(SpoolUnavailable, match=r"spool\.db-wal was removed or replaced"):
        store.commit(record(101))
    # As after a kill: nothing of this process has ended in order.
    copy = options.file.with_name("copy.db")
    copy.write_bytes(options.file.read_bytes())
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT count(*) FROM spooled").fetchone() == (100,)
    store.close()


def test_an_older_file_is_migrated_with_its_rows(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "old.db", isolation_level=None)
    migrate(connection, name="old")
    connection.execute("INSERT INTO spooled VALUES (1, 2, x'03')")
    later = (*MIGRATIONS, ("ALTER TABLE spooled ADD COLUMN note TEXT DEFAULT 'none'",))
    migrate(connection, name="old", migrations=later)
    migrate(connection, name="old", migrations=later)
    assert connection.execute("SELECT * FROM spooled").fetchall() == [(1, 2, b"\x03", "none")]
    assert connection.execute("PRAGMA user_version").fetchone() == (len(later),)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    connection.close()


def test_a_failed_migration_keeps_the_old_version(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "old.db", isolation_level=None)
    migrate(connection, name="old")
    broken = (*MIGRATIONS, ("ALTER TABLE spooled ADD COLUMN note TEXT", "ALTER TABLE nothing ADD COLUMN note TEXT"))
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, name="old", migrations=broken)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    assert len(connection.execute("PRAGMA table_info(spooled)").fetchall()) == 3
    connection.close()


def test_a_commit_fails_after_the_file_is_removed(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    options.file.unlink()
    with pytest.raises(SpoolUnavailable, match="removed or replaced while in use"):
        store.commit(Changes(records=rows(1)))
    store.close()


def test_the_path_survives_a_change_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = SpoolStore(SpoolOptions(path=Path("spool.db")))
    store.open()
    monkeypatch.chdir("/")
    store.commit(Changes(records=rows(1)))
    store.close()
    assert store.open().records == 1
    store.close()
    assert (tmp_path / "spool.db").exists()


@pytest.mark.parametrize("left", [None, b""])
def test_a_log_whose_main_file_was_moved_or_emptied_is_kept(
    options: SpoolOptions, tmp_path: Path, left: bytes | None
) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=rows(1, 2, 3)))
    # The files after a kill -9: rows committed since the last checkpoint are only in the log.
    killed = tmp_path / "killed.db"
    log = tmp_path / "killed.db-wal"
    log.write_bytes(options.file.with_name("spool.db-wal").read_bytes())
    file = options.file.read_bytes()
    store.close()
    if left is not None:
        killed.write_bytes(left)
    again = SpoolStore(SpoolOptions(path=killed))
    with pytest.raises(SpoolCorrupt, match="put back the file that the log belongs to"):
        again.open()
    killed.write_bytes(file)
    assert again.open().records == 3
    again.close()


def test_a_spool_opens_even_without_room_for_a_vacuum(options: SpoolOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_RECLAIM_BYTES", MIB)
    store = SpoolStore(options)
    store.open()
    large = [RecordRow(record_id, 0, bytes(MIB)) for record_id in range(1, 41)]
    store.commit(Changes(records=large))
    store.commit(Changes(confirmed_ids=list(range(1, 38))))
    store.close()
    # 90 % of the file is free, and no file may grow to the size that the remaining 10 % need.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        assert store.open().records == 3
        store.commit(Changes(records=rows(100)))
        store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    before = options.file.stat().st_size
    assert store.open().records == 4
    store.close()
    assert options.file.stat().st_size < before / 5


def test_an_almost_empty_file_shrinks_when_it_is_opened(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    large = [RecordRow(record_id, 0, bytes(MIB)) for record_id in range(1, 71)]
    store.commit(Changes(records=large))
    store.commit(Changes(confirmed_ids=[row.id for row in large]))
    store.close()
    before = options.file.stat().st_size
    store.open()
    store.close()
    assert before > 64 * MIB
    assert options.file.stat().st_size < MIB


MIB = 1024 * 1024


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": b"spool.db"},
        {"max_bytes": 10},
        {"max_bytes": 1e9},
        {"commit_interval_ms": -1.0},
        {"commit_interval_ms": float("nan")},
        {"commit_max_records": True},
        {"synchronous": "off"},
        {"replay_in_flight_per_key": 0},
    ],
    ids=str,
)
def test_options_out_of_bounds_are_rejected_by_name(tmp_path: Path, wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be"):
        SpoolOptions(**{"path": tmp_path / "spool.db", **wrong})  # type: ignore[arg-type]
