"""`kpl spool`: list, count, drain and export what a killed process left in its spool."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kpl_core import decode
from kpl_core.durability.spool import Spool, SpooledRecord, SpoolOptions
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.cli.conftest import Stream
from tests.cli.programs.spooling_service import RECORDS
from tests.support.kpl_process import Outcome
from tests.support.running_program import TESTS, environment

Kpl = Callable[..., Outcome]
SIZE_BYTES = sum(len(key) + len(data) for _, key, data in RECORDS)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a producer that was killed with `RECORDS` in its spool."""
    folder = tmp_path_factory.mktemp("killed")
    program = [sys.executable, str(TESTS / "cli/programs/spooling_service.py"), str(folder / "orders.spool")]
    with subprocess.Popen(program, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"spooled\n"
        process.kill()
    return folder


@pytest.fixture
def file(left_behind: Path, tmp_path: Path) -> Path:
    """Return a copy of that spool with its log."""
    return shutil.copytree(left_behind, tmp_path / "service") / "orders.spool"


@pytest.fixture
def streams() -> Iterator[Stream]:
    """Yield the stream `orders` of a Kinesis that also has `clicks`."""
    with ThreadedLocalKinesis(LocalKinesis({"orders": 1, "clicks": 1})) as kinesis:
        yield Stream("orders", kinesis)


def delivered(stream: Stream) -> list[tuple[str, bytes]]:
    """Return key and data of the user records of a stream, in order."""
    records = []
    for key, data in stream.stored():
        user_records = decode(data)
        records += [(key, data)] if user_records is None else [(each.partition_key, each.data) for each in user_records]
    return records


def counted(kpl: Kpl, file: Path) -> int:
    outcome = kpl("spool", "count", file, "--json")
    assert outcome.status == 0, outcome.err
    records: int = json.loads(outcome.out)["records"]
    return records


def test_count_shows_records_bytes_and_age_by_stream(kpl: Kpl, file: Path) -> None:
    found = json.loads(kpl("spool", "count", file, "--json").out)
    assert {name: each["records"] for name, each in found["streams"].items()} == {"orders": 20, "clicks": 2}
    assert (found["records"], found["damaged"]) == (22, 0)
    assert abs(found["bytes"] - SIZE_BYTES) <= 1  # a key outside ASCII counts its characters
    assert 0 < found["streams"]["orders"]["oldest_seconds"] < 600
    assert kpl("spool", "count", file).out.splitlines()[-1].split()[:3] == ["total", "22", "records,"]


def test_list_shows_stream_key_size_and_age_of_the_oldest_first(kpl: Kpl, file: Path) -> None:
    outcome = kpl("spool", "list", file, "--limit", "3")
    assert [line.split()[-2:] for line in outcome.out.splitlines()] == [["orders", f"key-{n % 2}"] for n in range(3)]
    assert all(line.split()[2:5] == ["s", "12", "B"] for line in outcome.out.splitlines())
    assert "oldest 3" in outcome.err
    (first, second) = (
        json.loads(line) for line in kpl("spool", "list", file, "--stream", "clicks", "--json").out.splitlines()
    )
    assert (first["stream"], first["partition_key"], first["size_bytes"]) == ("clicks", "key", 5)
    assert second["partition_key"] == "key-ü"


def test_drain_sends_every_record_in_order_and_empties_the_spool(kpl: Kpl, file: Path, streams: Stream) -> None:
    outcome = kpl("spool", "drain", file, "--json", "--endpoint-url", streams.kinesis.endpoint_url)
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out) == {"records": 22, "delivered": 22, "dead_letters": 0, "left": 0}
    for key in ("key-0", "key-1"):
        sent = [(own, data) for own, data in delivered(streams) if own == key]
        assert sent == [(own, data) for name, own, data in RECORDS if (name, own) == ("orders", key)]
    assert sorted(delivered(streams._replace(name="clicks"))) == sorted(each[1:] for each in RECORDS[20:])
    assert counted(kpl, file) == 0
    again = kpl("spool", "drain", file, "--json")
    assert (again.status, json.loads(again.out)["records"]) == (0, 0)


def test_a_drain_that_kinesis_rejects_loses_nothing(kpl: Kpl, file: Path, streams: Stream) -> None:
    arguments = ("spool", "drain", file, "--endpoint-url", streams.kinesis.endpoint_url, "--json")
    with streams.fault(ErrorAnswer("InternalFailure"), When(operation="PutRecords")):
        outcome = kpl(*arguments, "--timeout", "0.2")
    assert outcome.status == 1
    assert json.loads(outcome.out) == {"records": 22, "delivered": 0, "dead_letters": 0, "left": 22}
    assert counted(kpl, file) == 22
    assert kpl(*arguments).status == 0
    assert {data for _, data in delivered(streams)} == {data for name, _, data in RECORDS if name == "orders"}


def test_a_drain_names_the_live_process_that_owns_the_spool(kpl: Kpl, tmp_path: Path) -> None:
    path = tmp_path / "live.spool"
    with Spool(SpoolOptions(path=path)) as spool:
        spool.append_nowait([SpooledRecord("orders", "key", b"data", 1.0)], claim=True).result()
        outcome = kpl("spool", "drain", path, "--endpoint-url", "http://127.0.0.1:9")
        assert (outcome.status, outcome.err.count("\n")) == (3, 1)
        owner = (tmp_path / "live.spool.lock").read_text().strip()
        assert f"process {owner} owns this spool" in outcome.err
        assert counted(kpl, path) == 1


def test_a_drain_without_kinesis_is_one_sentence_and_keeps_the_records(kpl: Kpl, file: Path) -> None:
    outcome = kpl("spool", "drain", file, "--endpoint-url", "http://127.0.0.1:9")
    assert (outcome.status, "cannot be reached" in outcome.err) == (3, True)
    assert counted(kpl, file) == 22


def test_a_record_that_kinesis_never_accepts_becomes_a_dead_letter(kpl: Kpl, tmp_path: Path, streams: Stream) -> None:
    path = tmp_path / "invalid.spool"
    with Spool(SpoolOptions(path=path)) as spool:
        records = [SpooledRecord("orders", "", b"no key", 1.0), SpooledRecord("orders", "key", b"good", 1.0)]
        spool.append_nowait(records, claim=True).result()
    outcome = kpl("spool", "drain", path, "--endpoint-url", streams.kinesis.endpoint_url, "--json")
    assert json.loads(outcome.out) == {"records": 2, "delivered": 1, "dead_letters": 1, "left": 0}
    assert outcome.status == 1
    assert json.loads(kpl("dlq", "list", path, "--json").out)["total"] == 1


def test_put_reads_what_export_wrote(kpl: Kpl, file: Path, tmp_path: Path, streams: Stream) -> None:
    exported = tmp_path / "clicks.ndjson"
    assert kpl("spool", "export", file, exported, "--stream", "clicks").status == 0
    assert counted(kpl, file) == 22
    clicks = streams._replace(name="clicks")
    assert kpl("put", *clicks.address[:1], exported, "--format", "ndjson", *clicks.address[1:]).status == 0
    assert sorted(delivered(clicks)) == sorted(each[1:] for each in RECORDS[20:])


def test_a_damaged_record_stays_and_is_reported(kpl: Kpl, file: Path, streams: Stream) -> None:
    with Spool(SpoolOptions(path=file)):
        pass
    connection = sqlite3.connect(file)
    with connection:
        connection.execute("UPDATE spooled SET checksum = checksum + 1 WHERE id = 5")
    connection.close()
    assert json.loads(kpl("spool", "count", file, "--json").out)["damaged"] == 1
    assert "record 5 is damaged" in kpl("spool", "list", file).err
    outcome = kpl("spool", "drain", file, "--endpoint-url", streams.kinesis.endpoint_url, "--json")
    assert json.loads(outcome.out) == {"records": 22, "delivered": 21, "dead_letters": 0, "left": 1}
    assert (outcome.status, "1 record is damaged" in outcome.err) == (1, True)


def test_dlq_list_names_the_commands_for_spooled_records(kpl: Kpl, file: Path) -> None:
    outcome = kpl("dlq", "list", file, "--json")
    assert json.loads(outcome.out) == {"total": 0}
    assert f"22 spooled records; see `kpl spool count {file}`" in outcome.err


@pytest.mark.parametrize("command", [("dlq", "list"), ("spool", "count"), ("spool", "drain")])
def test_a_folder_is_rejected_with_the_names_of_its_spools(kpl: Kpl, file: Path, command: tuple[str, str]) -> None:
    outcome = kpl(*command, file.parent)
    assert (outcome.status, outcome.err.count("\n")) == (4, 1)
    assert outcome.err.endswith("is a folder; give the path of one of its spools: orders.spool\n")


def test_records_of_tenants_are_drained_as_the_operator_says(kpl: Kpl, tmp_path: Path, streams: Stream):
    file = tmp_path / "gateway.spool"
    with Spool(SpoolOptions(path=file)) as spool:
        records = [SpooledRecord("orders", f"key-{number}", b"x", 1.0, flow="legacy") for number in range(4)]
        spool.append_nowait(records, claim=True).result()
    outcome = kpl("spool", "drain", file, "--endpoint-url", streams.kinesis.endpoint_url)
    assert outcome.status == 2
    assert "give --aggregation if all consumers de-aggregate, else --no-aggregation" in outcome.err
    drained = kpl("spool", "drain", file, "--no-aggregation", "--endpoint-url", streams.kinesis.endpoint_url)
    assert drained.status == 0
    assert [data for _, data in streams.stored()] == [b"x"] * 4
