"""Which spool belongs to which worker, which spools are orphaned, and when an orphaned spool is empty."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool, SpoolOptions
from kpl_core.options.reliability import DeadLetterOptions
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.workers.spool_files import (
    SINGLE,
    file_of_worker,
    has_more,
    orphaned_spools,
    settings_of_worker,
)
from tests.support.durability_scene import EXPIRED, THROTTLED, failed, spooled

SECONDS = 30.0


@pytest.mark.parametrize(
    ("path", "worker", "own"),
    [
        ("spool.db", 0, "spool-0.db"),
        ("/var/lib/kpl/spool.db", 12, "/var/lib/kpl/spool-12.db"),
        ("/var/lib/kpl/spool", 1, "/var/lib/kpl/spool-1"),
        ("/var/lib/kpl/spool.db", SINGLE, "/var/lib/kpl/spool.db"),
    ],
)
def test_each_worker_has_its_own_spool(path, worker, own):
    assert settings_of_worker(load_settings(spool=path), worker).spool == Path(own)


def test_the_file_of_a_worker_is_shown_as_it_was_given_and_as_utf_8():
    assert file_of_worker(load_settings(spool="lib/s.db"), SINGLE) == "lib/s.db"
    assert file_of_worker(load_settings(dead_letters="d.db"), 2) == "d-2.db"
    assert file_of_worker(load_settings(spool=Path(os.fsdecode(b"s\xff.db"))), SINGLE) == "s\\xff.db"


def test_each_worker_has_its_own_spool_and_dead_letters_and_shares_the_tenants_file():
    settings = load_settings(spool="s.db", tenants="t.toml")
    own = settings_of_worker(settings, 3)
    assert (own.spool, own.dead_letters, own.tenants) == (Path("s-3.db"), None, Path("t.toml"))
    assert settings_of_worker(load_settings(dead_letters="d.db"), 3).dead_letters == Path("d-3.db")
    assert settings_of_worker(load_settings(), 3) == load_settings()


def test_files_of_higher_worker_numbers_and_of_a_run_without_workers_are_orphaned(tmp_path):
    settings = load_settings(spool=tmp_path / "spool.db")
    for name in ("spool-0.db", "spool-1.db", "spool-2.db", "spool-10.db", "spool-x.db", "spool-3.db-wal", "other-9.db"):
        (tmp_path / name).touch()
    assert orphaned_spools(settings, 2) == [2, 10]
    (tmp_path / "spool.db").touch()
    assert orphaned_spools(settings, 2) == [SINGLE, 2, 10]
    assert orphaned_spools(load_settings(), 2) == []
    assert orphaned_spools(load_settings(dead_letters=tmp_path / "other.db"), 2) == [9]
    assert orphaned_spools(load_settings(spool=tmp_path / "nowhere" / "spool.db"), 2) == []


@pytest.mark.parametrize(
    ("content", "max_redrives", "expected", "warns"),
    [
        pytest.param("nothing", None, False, False, id="an empty file"),
        pytest.param("record", None, True, False, id="a record"),
        pytest.param("letter", None, True, False, id="a dead letter that is redriven later"),
        pytest.param("letter", 0, False, True, id="a dead letter that an operator must redrive"),
    ],
)
def test_a_spool_has_more_until_nothing_leaves_it_automatically(
    tmp_path, caplog, content, max_redrives, expected, warns
):
    with Spool(SpoolOptions(path=tmp_path / "old.db", commit_interval_ms=0.0)) as spool:
        options = DeadLetterOptions(redrive_base_seconds=1_000, max_redrives=max_redrives)
        letters = DeadLetterQueue(spool, options=options, chance=lambda: 1.0)
        if content == "record":
            spool.append_nowait([spooled(1)], claim=False).result(SECONDS)
        if content == "letter":
            letter = letters.letter(spooled(1), "throttled", result=failed(THROTTLED, EXPIRED))
            letters.add_nowait([letter]).result(SECONDS)
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(has_more(letters)) is expected
    assert ("kpl dlq list" in caplog.text) is warns
