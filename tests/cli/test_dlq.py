"""`kpl dlq`: list, show, redrive, export and purge."""

import io
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue, ExportReport, LetterReader, purge
from kpl_core.durability.spool import LetterFilter, Spool, SpooledRecord, SpoolOptions
from kpl_core.records.user_record import Tier
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.cli.spool_file import dead_letters
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.kpl_process import Outcome, run, started
from tests.support.waiting import wait_until

# Most tests start a program.
pytestmark = pytest.mark.long
STREAM = "orders"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a spool file with 20 bulk letters, then 10 critical ones."""
    path = tmp_path / "orders.spool"
    with Spool(SpoolOptions(path=path)) as spool:
        queue = DeadLetterQueue(spool)
        for number in range(30):
            tier: Tier = "bulk" if number < 20 else "critical"
            record = SpooledRecord(
                STREAM, f"key-{number}", b"%d" % number, 1_700_000_000.0, tier=tier, metadata={"severity": "major"}
            )
            queue.add_nowait([queue.letter(record, "rate_limited" if number < 20 else "ttl")]).result()
    return path


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """Return a spool file with more letters than a command reads in one batch."""
    path = tmp_path / "large.spool"
    with Spool(SpoolOptions(path=path)) as spool:
        queue = DeadLetterQueue(spool)
        record = SpooledRecord(STREAM, "key", b"data", 1_700_000_000.0)
        queue.add_nowait([queue.letter(record, "ttl") for _ in range(1_100)]).result()
    return path


def counts(file: Path) -> dict[str, int]:
    outcome = run("dlq", "list", str(file), "--json")
    assert outcome.status == 0, outcome.err
    counted: dict[str, int] = json.loads(outcome.out)
    return counted


@pytest.mark.long
def test_list_counts_by_reason_and_prints_critical_letters_first(file: Path) -> None:
    assert counts(file) == {"rate_limited": 20, "ttl": 10, "total": 30}
    outcome = run("dlq", "list", str(file), "--letters", "--limit", "12")
    lines = outcome.out.splitlines()
    assert (outcome.status, len(lines)) == (0, 12)
    assert all("critical" in line for line in lines[:10])
    assert "12 of 30" in outcome.err
    letters = run("dlq", "list", str(file), "--letters", "--tier", "critical", "--json").out.splitlines()
    assert [json.loads(letter)["partition_key"] for letter in letters] == [f"key-{n}" for n in range(20, 30)]


@pytest.mark.long
def test_show_prints_all_fields_of_a_letter(file: Path) -> None:
    letter = json.loads(run("dlq", "list", str(file), "--letters", "--limit", "1", "--json").out)
    outcome = run("dlq", "show", str(file), letter["id"])
    assert (outcome.status, json.loads(outcome.out)) == (0, letter)
    assert letter["severity"] == "major"
    unknown = run("dlq", "show", str(file), "none")
    assert (unknown.status, unknown.err.startswith("kpl: there is no letter 'none'")) == (4, True)


def test_redrive_delivers_all_letters(file: Path) -> None:
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 1})) as kinesis:
        outcome = run("dlq", "redrive", str(file), "--json", "--endpoint-url", kinesis.endpoint_url)
        assert outcome.status == 0, outcome.err
        assert json.loads(outcome.out) == {"letters": 30, "delivered": 30, "failed": 0, "damaged": 0}
        stored = kinesis.call(lambda fake, _: list(fake.records(STREAM)))
    assert stored
    assert counts(file) == {"total": 0}


@pytest.mark.long
def test_an_interrupted_redrive_can_be_run_again(file: Path) -> None:
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 1})) as kinesis:
        outage = kinesis.call(
            lambda fake, _: fake.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
        )
        arguments = ("dlq", "redrive", str(file), "--rate", "5", "--endpoint-url", kinesis.endpoint_url)
        with started(*arguments) as running:
            wait_until(lambda: kinesis.call(lambda fake, _: outage.fired), "a request that fails")
            assert running.end(signal.SIGINT) == 130
        assert counts(file)["total"] == 30
        kinesis.call(lambda fake, _: fake.faults.remove(outage))
        assert run("dlq", "redrive", str(file), "--endpoint-url", kinesis.endpoint_url).status == 0
    assert counts(file) == {"total": 0}


@pytest.mark.long
def test_export_and_purge_use_the_same_filter(file: Path, tmp_path: Path) -> None:
    destination = tmp_path / "letters.jsonl"
    assert run("dlq", "export", str(file), str(destination), "--reason", "ttl").status == 0
    assert len(destination.read_text(encoding="utf-8").splitlines()) == 10
    assert run("dlq", "purge", str(file), "--reason", "ttl", stdin="n\n").status == 1
    assert counts(file)["total"] == 30
    assert run("dlq", "purge", str(file), "--reason", "ttl", "--yes").status == 0
    assert counts(file) == {"rate_limited": 20, "total": 20}


@pytest.mark.long
def test_a_file_in_use_and_a_missing_file_are_one_sentence(file: Path, tmp_path: Path) -> None:
    with Spool(SpoolOptions(path=file)):
        outcome = run("dlq", "redrive", str(file), "--region", "us-east-1")
        assert (outcome.status, "owns this spool" in outcome.err) == (3, True)
        assert counts(file)["total"] == 30
    missing = run("dlq", "list", str(tmp_path / "none"))
    assert (missing.status, missing.err.count("\n")) == (4, 1)
    wrong = run("dlq", "list", str(file), "--reason", "because")
    assert (wrong.status, "rate_limited" in wrong.err) == (2, True)


def test_a_reason_is_accepted_as_list_prints_it(file: Path) -> None:
    (printed,) = [line for line in run("dlq", "list", str(file)).out.splitlines() if "20" in line]
    outcome = run("dlq", "list", str(file), "--json", "--reason", printed.rpartition("20")[0].strip())
    assert (outcome.status, json.loads(outcome.out)) == (0, {"rate_limited": 20, "total": 20})


def test_a_purge_without_a_terminal_names_the_option(file: Path) -> None:
    outcome = run("dlq", "purge", str(file), stdin="")
    assert (outcome.status, "--yes" in outcome.err) == (2, True)
    assert counts(file)["total"] == 30


class _Interrupted:
    """A standard input that raises KeyboardInterrupt instead of an answer."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation

    def readline(self, *_: object) -> str:
        raise KeyboardInterrupt


def test_ctrl_c_at_the_prompt_is_status_130_and_deletes_no_letter(
    kpl: Callable[..., Outcome], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", _Interrupted())
    assert kpl("dlq", "purge", file).status == 130
    assert counts(file)["total"] == 30


@pytest.mark.parametrize(
    ("settings", "endpoint", "words"),
    [
        ({"AWS_PROFILE": "missing"}, (), "profile (missing) could not be found; check AWS_PROFILE"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, (), "AWS_SECRET_ACCESS_KEY"),
        ({}, ("--endpoint-url", "http://127.0.0.1:9"), "cannot be reached; check --endpoint-url"),
    ],
)
def test_a_redrive_without_a_connection_is_one_sentence(
    kpl: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    file: Path,
    settings: dict[str, str],
    endpoint: tuple[str, ...],
    words: str,
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", **settings}.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    outcome = kpl("dlq", "redrive", file, "--region", "us-east-1", *endpoint)
    assert (outcome.status, outcome.err.count("\n")) == (3, 1)
    assert words in outcome.err
    assert counts(file)["total"] == 30


def test_a_redrive_without_matching_letters_needs_no_kinesis(kpl: Callable[..., Outcome], file: Path) -> None:
    outcome = kpl("dlq", "redrive", file, "--tier", "normal", "--region", "us-east-1", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    assert json.loads(outcome.out)["letters"] == 0


def test_purge_does_not_ask_about_a_missing_file(tmp_path: Path) -> None:
    outcome = run("dlq", "purge", str(tmp_path / "none.spool"), stdin="")
    assert outcome.status == 4
    assert "is not a file" in outcome.err
    assert "permanently?" not in outcome.err


def test_a_letter_is_one_line_without_control_characters(kpl: Callable[..., Outcome], file: Path) -> None:
    with Spool(SpoolOptions(path=file)) as spool:
        queue = DeadLetterQueue(spool)
        record = SpooledRecord(STREAM, "two\nlines \x1b[2J", b"", 1_700_000_000.0, flow="odd")
        letter = queue.letter(record, "throttled")
        queue.add_nowait([msgspec.structs.replace(letter, error_code="Slow", error_message="\x1b]0;\r\n")]).result()
    (line,) = kpl("dlq", "list", file, "--letters", "--tenant", "odd").out.splitlines()
    assert line.endswith("two\\nlines \\x1b[2J  Slow: \\x1b]0;\\r\\n")


def test_a_damaged_letter_is_reported_and_the_others_are_printed(kpl: Callable[..., Outcome], file: Path) -> None:
    connection = sqlite3.connect(file)
    with connection:
        connection.execute("UPDATE dead_letters SET checksum = checksum + 1 WHERE number = 21")
    connection.close()
    outcome = kpl("dlq", "list", file, "--letters", "--json")
    assert len([json.loads(line) for line in outcome.out.splitlines()]) == 29
    assert (outcome.status, "letter 21 is damaged" in outcome.err) == (0, True)


@pytest.mark.parametrize("command", ["list", "export", "show"])
def test_a_damaged_file_is_one_sentence(kpl: Callable[..., Outcome], file: Path, tmp_path: Path, command: str) -> None:
    connection = sqlite3.connect(file)
    pages = connection.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'dead_letters'").fetchall()
    connection.close()
    with file.open("r+b") as opened:
        for (page,) in pages:
            opened.seek(16_384 * (page - 1))
            opened.write(b"\xa5" * 16_384)
    arguments = {"list": (), "export": (tmp_path / "out",), "show": ("0193",)}[command]
    outcome = kpl("dlq", command, file, *arguments)
    assert (outcome.status, outcome.err.count("\n"), "the file is damaged" in outcome.err) == (4, 1, True)


@pytest.mark.parametrize(
    "command", [("list",), ("purge", "--yes"), ("redrive", "--endpoint-url", "http://127.0.0.1:9")]
)
def test_a_filter_that_is_not_utf_8_is_one_sentence(file: Path, command: tuple[str, ...]) -> None:
    outcome = run("dlq", command[0], str(file), *command[1:], "--tenant", "a\udcff")
    assert (outcome.status, outcome.err.count("\n"), "not UTF-8" in outcome.err) == (4, 1, True)
    assert counts(file)["total"] == 30


def interrupted(advanced: Callable[[int], object]) -> Callable[[int], None]:
    """Return a progress callback that sends SIGINT and then reports progress until the signal has an effect."""

    def report(done: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        give_up_at = time.monotonic() + 30
        while time.monotonic() < give_up_at:
            advanced(done)
            time.sleep(0.001)

    return report


def test_an_interrupted_purge_deletes_no_more_letters(
    kpl: Callable[..., Outcome], large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_purge(queue: DeadLetterQueue, wanted: LetterFilter, *, on_progress: Callable[[int], object]) -> int:
        return purge(queue, wanted, on_progress=interrupted(on_progress))

    monkeypatch.setattr(dead_letters, "purge", interrupted_purge)
    outcome = kpl("dlq", "purge", large_file, "--yes", "--json")
    assert (outcome.status, json.loads(outcome.out)) == (130, {"purged": 500})
    assert counts(large_file)["total"] == 600


def test_an_interrupted_export_leaves_no_file(
    kpl: Callable[..., Outcome], large_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = LetterReader.export

    def interrupted_export(
        reader: LetterReader, wanted: LetterFilter, destination: Path, *, on_progress: Callable[[int], object]
    ) -> ExportReport:
        return export(reader, wanted, destination, on_progress=interrupted(on_progress))

    monkeypatch.setattr(LetterReader, "export", interrupted_export)
    outcome = kpl("dlq", "export", large_file, tmp_path / "out.jsonl")
    assert (outcome.status, outcome.out) == (130, "")
    assert not [each.name for each in tmp_path.iterdir() if each.name.startswith("out")]


def test_an_export_onto_the_spool_is_rejected_in_one_sentence(kpl: Callable[..., Outcome], file: Path) -> None:
    outcome = kpl("dlq", "export", file, file)
    assert (outcome.status, outcome.err.count("\n"), "cannot be written" in outcome.err) == (4, 1, True)
    assert counts(file)["total"] == 30
