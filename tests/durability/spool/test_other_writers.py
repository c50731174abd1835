"""Another program at the spool's file: refused if it left a difference, ignored if it left none; other versions."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kpl_core.durability.spool.spool_error import SpoolUnavailable
from kpl_core.durability.spool.store import Changes, SpoolStore, SpoolTotals
from kpl_core.durability.spool.tables import LetterRow, RecordRow, migrate
from kpl_core.options.reliability import SpoolOptions


@pytest.fixture
def options(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(path=tmp_path / "spool.db", busy_timeout_ms=0)


def rows(*ids: int) -> list[RecordRow]:
    return [RecordRow(record_id, 0, b"%d" % record_id) for record_id in ids]


def test_nothing_is_committed_after_another_process_wrote(options: SpoolOptions) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=rows(1)))
    other = sqlite3.connect(options.path, isolation_level=None)
    other.execute("INSERT INTO spooled VALUES (2, 0, x'03')")
    other.close()
    with pytest.raises(SpoolUnavailable, match="another process has written"):
        store.commit(Changes(confirmed_ids=[2]))
    assert store.totals().records == 2
    store.close()


def changed_by_another(options: SpoolOptions, statement: str) -> None:
    other = sqlite3.connect(options.path, isolation_level=None)
    other.execute(statement)
    other.close()


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM spooled WHERE id = 1", "UPDATE spooled SET id = 9 WHERE id = 2", "UPDATE owner SET token = x'00'"],
)
def test_nothing_is_committed_if_another_process_left_a_difference(options: SpoolOptions, statement: str) -> None:
    store = SpoolStore(options)
    store.open()
    store.commit(Changes(records=rows(1, 2)))
    changed_by_another(options, statement)
    for _ in range(2):
        with pytest.raises(SpoolUnavailable, match="another process has written"):
            store.commit(Changes(records=rows(3)))
    store.close()


def test_a_commit_of_another_program_that_changes_no_row_stops_nothing(options: SpoolOptions) -> None:
    """A failed commit on a full disk changes `data_version` too, see tests/durability/test_full_disk.py."""
    store = SpoolStore(options)
    store.open()
    letter = LetterRow(1, "id", 1, "s", None, "expired", 0.0, None, 0, 0, b"x")
    store.commit(Changes(records=rows(1, 2, 3), letters=[letter, letter._replace(number=2)]))
    store.commit(Changes(confirmed_ids=[3, 3, 77], removed_letters=[2, 2]))
    looked = "PRAGMA data_version"
    before = store.connection.execute(looked).fetchone()
    changed_by_another(options, "VACUUM")
    assert store.connection.execute(looked).fetchone() != before
    store.commit(Changes(records=rows(4)))
    changed_by_another(options, "PRAGMA user_version = 1")
    store.commit(Changes(confirmed_ids=[1, 2, 4], removed_letters=[1]))
    assert store.totals() == SpoolTotals(0, 0, 0, 0, 0, 0)
    changed_by_another(options, "VACUUM")
    store.commit(Changes(records=rows(5)))
    store.close()


def test_a_file_of_the_last_version_opens_and_the_last_version_opens_it_again(options: SpoolOptions) -> None:
    """The table `owner` is new, and the version of the schema is not."""
    with closing(sqlite3.connect(options.path, isolation_level=None)) as last:
        migrate(last, name="last")
        last.execute("INSERT INTO spooled VALUES (7, 0, x'03')")
    store = SpoolStore(options)
    assert store.open().last_id == 7
    store.commit(Changes(records=rows(8)))
    store.close()
    with closing(sqlite3.connect(options.path, isolation_level=None)) as last:
        assert last.execute("PRAGMA user_version").fetchone() == (1,)
        migrate(last, name="last")
        last.execute("DELETE FROM spooled WHERE id = 7")
    assert store.open().records == 1
    store.commit(Changes(records=rows(9)))
    store.close()
