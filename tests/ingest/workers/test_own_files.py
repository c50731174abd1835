"""Whose spool is whose, and which ones nobody has any more."""

from pathlib import Path

import pytest

from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.workers.own_files import ALONE, heirs, own_path, own_settings


@pytest.mark.parametrize(
    ("path", "worker", "own"),
    [
        ("spool.db", 0, "spool-0.db"),
        ("/var/lib/kpl/spool.db", 12, "/var/lib/kpl/spool-12.db"),
        ("/var/lib/kpl/spool", 1, "/var/lib/kpl/spool-1"),
        ("/var/lib/kpl/spool.db", ALONE, "/var/lib/kpl/spool.db"),
    ],
)
def test_each_worker_has_a_file_of_its_own(path, worker, own):
    assert own_path(Path(path), worker) == Path(own)


def test_spool_and_dead_letters_are_a_workers_own_and_nothing_else_is():
    settings = load_settings(spool="s.db", dead_letters="d.db", tenants="t.toml")
    own = own_settings(settings, 3)
    assert (own.spool, own.dead_letters, own.tenants) == (Path("s-3.db"), Path("d-3.db"), Path("t.toml"))
    assert own_settings(load_settings(), 3) == load_settings()


def test_files_of_more_workers_than_there_are_have_heirs_and_so_has_the_one_of_a_run_without(tmp_path):
    settings = load_settings(spool=tmp_path / "spool.db")
    for name in ("spool-0.db", "spool-1.db", "spool-2.db", "spool-10.db", "spool-x.db", "spool-3.db-wal", "other-9.db"):
        (tmp_path / name).touch()
    assert heirs(settings, 2) == [2, 10]
    (tmp_path / "spool.db").touch()
    assert heirs(settings, 2) == [ALONE, 2, 10]
    assert heirs(load_settings(), 2) == []
    # With a spool the dead letters are in it.
    assert heirs(load_settings(spool=tmp_path / "spool.db", dead_letters=tmp_path / "other.db"), 2) == [ALONE, 2, 10]
    assert heirs(load_settings(dead_letters=tmp_path / "other.db"), 2) == [9]
    assert heirs(load_settings(spool=tmp_path / "nowhere" / "spool.db"), 2) == []
