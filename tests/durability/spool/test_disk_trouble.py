"""A disk that is full or read-only, for real: clear errors, and nothing acknowledged falsely.

Root mounts small file systems; without root the same errors come from SQLite's page limit and
from the file's mode.
"""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kpl_core.durability.spool import Spool, SpoolOptions, SpoolUnavailable
from kpl_core.durability.spool.store import SpoolStore
from tests.support.durability_scene import spooled
from tests.support.small_disk import mounted_disk

SECONDS = 20.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounted_disk(tmp_path) as disk:
        yield disk


def fill(spool: Spool) -> list[int]:
    """Append until the disk rejects a write; return the acknowledged ids."""
    acknowledged: list[int] = []
    record = spooled(data=os.urandom(20_000))
    while (refusal := (stored := spool.append_nowait([record], claim=True)).exception(SECONDS)) is None:
        acknowledged += stored.result()
    assert isinstance(refusal, SpoolUnavailable)
    assert "the disk that holds it is full (SQLite: database or disk is full); nothing was stored" in str(refusal)
    return acknowledged


def ids_in(options: SpoolOptions) -> list[int]:
    with Spool(options) as spool:
        return [each.id for each in spool.claim_backlog_nowait(10_000, max_bytes=1 << 30).result(SECONDS)]


def test_a_full_disk_acknowledges_nothing_and_works_again_once_space_is_freed(small_disk: Path) -> None:
    options = SpoolOptions(path=small_disk / "spool.db", commit_interval_ms=0.0)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    with Spool(options) as spool:
        acknowledged = fill(spool)
        assert len(acknowledged) > 5
        assert spool.statistics().records == len(acknowledged)
        ballast.unlink()
        acknowledged += spool.append_nowait([spooled()], claim=True).result(SECONDS)
    assert ids_in(options) == acknowledged


def test_confirmations_on_a_full_disk_are_committed_once_space_is_freed(small_disk: Path) -> None:
    options = SpoolOptions(path=small_disk / "spool.db", commit_interval_ms=0.0)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    with Spool(options) as spool:
        acknowledged = fill(spool)
        marked = spool.confirm(acknowledged[:3])
        ballast.unlink()
        spool.append_nowait([spooled()], claim=True).result(SECONDS)
        marked.result(SECONDS)
    assert ids_in(options)[: len(acknowledged) - 3] == acknowledged[3:]


def test_opening_a_spool_on_a_full_disk_names_the_cause(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(2 * 1024 * 1024 - 8_192))
    with pytest.raises(SpoolUnavailable, match="is full"):
        Spool(SpoolOptions(path=small_disk / "spool.db")).open()


def test_opening_a_spool_on_a_read_only_file_system_names_the_cause(small_disk: Path) -> None:
    options = SpoolOptions(path=small_disk / "spool.db")
    with Spool(options) as spool:
        spool.append_nowait([spooled()], claim=True).result(SECONDS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SpoolUnavailable, match="Read-only file system"):
        Spool(options).open()


@pytest.mark.parametrize("place", ["folder", "/dev/null"])
def test_a_folder_or_a_device_is_rejected_and_no_file_is_created_beside_it(tmp_path: Path, place: str) -> None:
    path = tmp_path / place  # an absolute place stays itself
    if place == "folder":
        path.mkdir()
    with pytest.raises(SpoolUnavailable, match="the path is a folder or a device; give the path of a regular file"):
        Spool(SpoolOptions(path=path)).open()
    assert not path.with_name(f"{path.name}.lock").exists()


def test_the_page_limit_of_sqlite_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    options = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0)

    def limit_pages(store: SpoolStore) -> None:
        store.connection.execute("PRAGMA max_page_count = 40")

    with Spool(options) as spool:
        spool.ask(limit_pages).result(SECONDS)
        acknowledged = fill(spool)
    assert ids_in(options) == acknowledged


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, unlike pytest's own."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def test_a_file_without_write_permission_names_the_cause(open_folder: Path) -> None:
    """Runs in a process without root permissions if the tests run as root."""
    options = SpoolOptions(path=open_folder / "spool.db")
    with Spool(options) as spool:
        spool.append_nowait([spooled()], claim=True).result(SECONDS)
    options.file.with_name("spool.db.lock").chmod(0o666)
    options.file.chmod(0o400)
    if os.geteuid() == 0:
        os.chown(options.file, 65_534, 65_534)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kpl_core.durability.spool import Spool, SpoolError, SpoolOptions\n"
        "if os.geteuid() == 0:\n"
        "    os.setuid(65_534)\n"
        "try:\n"
        "    Spool(SpoolOptions(path=Path(sys.argv[1]))).open()\n"
        "except SpoolError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(options.file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert finished.stdout.startswith("SpoolUnavailable"), finished.stderr
    assert "is read-only (SQLite: attempt to write a readonly database)" in finished.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_that_others_may_read_is_refused(open_folder: Path) -> None:
    path = open_folder / "spool.db"
    path.touch(0o644)
    path.chmod(0o666)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kpl_core.durability.spool import Spool, SpoolError, SpoolOptions\n"
        "os.setuid(65_534)\n"
        "try:\n"
        "    Spool(SpoolOptions(path=Path(sys.argv[1]))).open()\n"
        "except SpoolError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "SpoolUnavailable" in finished.stdout, finished.stderr
    assert "other users may read it (mode 0666)" in finished.stdout


def test_a_file_locked_by_another_program_is_not_reported_as_damaged(tmp_path: Path) -> None:
    options = SpoolOptions(path=tmp_path / "spool.db", busy_timeout_ms=0.0, commit_interval_ms=0.0)
    with Spool(options) as spool:
        other = sqlite3.connect(options.file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Exception, match="another program keeps the file locked"):
            spool.append_nowait([spooled()], claim=True).result(SECONDS)
        other.execute("ROLLBACK")
        other.close()
        assert spool.append_nowait([spooled()], claim=True).result(SECONDS) == range(2, 3)
