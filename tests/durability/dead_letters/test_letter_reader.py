"""Reading, exporting and purging dead letters, with and without the process that owns the spool."""

import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue, LetterReader, purge
from kpl_core.durability.spool import (
    DeadLetter,
    LetterFilter,
    Spool,
    SpoolCorrupt,
    SpoolError,
    SpoolOptions,
    SpoolUnavailable,
)
from tests.support.durability_scene import spooled

SECONDS = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "the spool?.db"


@pytest.fixture
def queue(path: Path) -> Iterator[DeadLetterQueue]:
    with Spool(SpoolOptions(path=path, commit_interval_ms=0.0)) as spool:
        yield DeadLetterQueue(spool)


def add(queue: DeadLetterQueue, count: int) -> list[DeadLetter]:
    """Add letters of all tiers; return them in the order in which they are listed."""
    letters = [
        queue.letter(spooled(number, tier=("bulk", "normal", "critical")[number % 3]), "ttl") for number in range(count)
    ]
    queue.add_nowait(letters).result(SECONDS)
    return letters[2::3] + letters[1::3] + letters[0::3]


def test_letters_are_listed_while_the_spool_is_open(queue: DeadLetterQueue, path: Path) -> None:
    letters = add(queue, 1_201)
    with LetterReader(path) as reader:
        listed = [stored.letter for page in reader.pages(LetterFilter()) for stored in page]
        assert listed == letters
        assert reader.count(LetterFilter()) == {"ttl": 1_201}
        assert reader.count(LetterFilter(tier="critical")) == {"ttl": 400}
        few = [stored.letter for page in reader.pages(LetterFilter(tier="bulk"), limit=501) for stored in page]
        assert few == [letter for letter in letters if letter.tier == "bulk"][:501]


def test_one_letter_is_found_by_its_id(queue: DeadLetterQueue, path: Path) -> None:
    letters = add(queue, 3)
    with LetterReader(path) as reader:
        found = reader.find(letters[1].id)
        assert found is not None
        assert found.letter == letters[1]
        assert reader.find("none") is None


def test_an_export_writes_one_line_per_letter_and_reports_progress(
    queue: DeadLetterQueue, path: Path, tmp_path: Path
) -> None:
    letters = add(queue, 1_201)
    progress: list[int] = []
    with LetterReader(path) as reader:
        assert reader.export(LetterFilter(), tmp_path / "out.jsonl", on_progress=progress.append) == (1_201, 0)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [letter.id for letter in letters]
    assert progress == [500, 1_000, 1_201]
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_export_counts_damaged_letters(path: Path, tmp_path: Path) -> None:
    with Spool(SpoolOptions(path=path)) as spool:
        queue = DeadLetterQueue(spool)
        queue.add_nowait([queue.letter(spooled(data=data), "ttl") for data in (b"whole", b"damaged")]).result()
    path.write_bytes(path.read_bytes().replace(b"damaged", b"DAMAGED"))
    with LetterReader(path) as reader:
        assert reader.export(LetterFilter(), tmp_path / "out.jsonl") == (1, 1)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_an_interrupted_export_keeps_the_old_file(queue: DeadLetterQueue, path: Path, tmp_path: Path) -> None:
    add(queue, 600)
    destination = tmp_path / "out.jsonl"
    destination.write_text("yesterday's")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with LetterReader(path) as reader, pytest.raises(KeyboardInterrupt):
        reader.export(LetterFilter(), destination, on_progress=interrupt)
    assert destination.read_text() == "yesterday's"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("out")] == ["out.jsonl"]


def test_an_export_never_replaces_a_spool_a_folder_or_a_pipe(
    queue: DeadLetterQueue, path: Path, tmp_path: Path
) -> None:
    add(queue, 2)
    folder, pipe, link = tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(path)
    names = {each.name for each in tmp_path.iterdir()}
    for destination in (path, link, folder, pipe):
        with LetterReader(path) as reader, pytest.raises(FileExistsError, match="only a regular file") as refused:
            reader.export(LetterFilter(), destination)
        assert (refused.value.errno, refused.value.filename) == (errno.EEXIST, str(destination))
    assert {each.name for each in tmp_path.iterdir()} == names
    assert pipe.is_fifo()
    with LetterReader(path) as reader:
        assert sum(reader.count(LetterFilter()).values()) == 2


def test_reading_an_emptied_file_keeps_its_log(path: Path, tmp_path: Path) -> None:
    emptied = tmp_path / "emptied.db"
    log = tmp_path / "emptied.db-wal"
    with Spool(SpoolOptions(path=path)) as spool:
        add(DeadLetterQueue(spool), 3)
        log.write_bytes(path.with_name(f"{path.name}-wal").read_bytes())
    emptied.touch()
    before = log.read_bytes()
    with pytest.raises(SpoolCorrupt, match="put back the file that the log belongs to"):
        LetterReader(emptied).__enter__()
    assert log.read_bytes() == before


def test_a_purge_deletes_matching_letters_and_can_be_resumed(queue: DeadLetterQueue) -> None:
    add(queue, 1_800)
    progress: list[int] = []

    def interrupt(count: int) -> None:
        progress.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purge(queue, LetterFilter(tier="bulk"), on_progress=interrupt)
    assert purge(queue, LetterFilter(tier="bulk"), on_progress=progress.append) == 100
    assert progress == [500, 100]
    assert purge(queue, LetterFilter(tier="bulk")) == 0
    assert queue.depth == 1_200
    assert purge(queue, LetterFilter()) == 1_200


def test_letters_can_be_read_after_the_owner_exits(path: Path) -> None:
    with Spool(SpoolOptions(path=path)) as spool:
        letters = add(DeadLetterQueue(spool), 3)
    with LetterReader(path) as reader:
        assert [stored.letter for page in reader.pages(LetterFilter()) for stored in page] == letters


def test_a_missing_file_another_database_and_a_closed_reader_have_different_errors(path: Path) -> None:
    with pytest.raises(SpoolUnavailable, match="there is no such file"):
        LetterReader(path).__enter__()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(SpoolCorrupt, match="not an SQLite database"):
        LetterReader(path).__enter__()
    path.write_bytes(b"")
    with pytest.raises(SpoolCorrupt, match="let a producer of this version open it once"):
        LetterReader(path).__enter__()
    with pytest.raises(SpoolUnavailable, match="is not open"):
        LetterReader(path).find("x")


def test_a_file_that_fails_while_it_is_read_is_named(path: Path) -> None:
    with Spool(SpoolOptions(path=path, commit_interval_ms=0.0)):
        pass
    with LetterReader(path) as reader:
        with closing(sqlite3.connect(path)) as other:
            names = other.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
            for (name,) in names.fetchall():
                other.execute(f"DROP TABLE {name}")
        with pytest.raises(SpoolError, match="no such table") as failed:
            reader.count(LetterFilter())
    assert str(failed.value).startswith(f"spool {path}")
