import json
import signal
import time

import pytest

from kpl_core import UserRecord, encode
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.cli.progress import FIRST_SECONDS
from tests.support.kpl_process import in_a_terminal, started, without_escape_codes

LAST_HASH_KEY = 2**128 - 1


def read_all(kpl, stream):
    """Return all stored records as JSON objects of `kpl tail`, and its stderr."""
    outcome = kpl("tail", *stream.address, "--from-start", "--no-follow", "--json")
    assert outcome.status == 0
    return [json.loads(line) for line in outcome.out.splitlines()], outcome.err


def test_a_record_has_shard_sequence_number_key_and_data(stream, kpl):
    stream.store(("42", "0", b"text"), ("43", "0", b"\xff"))
    (text, binary), _ = read_all(kpl, stream)
    assert text["shard"] == "shardId-000000000000"
    assert text["sequence_number"].isdecimal()
    assert (text["subsequence"], text["partition_key"], text["explicit_hash_key"]) == (None, "42", None)
    assert text["arrival"].endswith("+00:00")
    assert text["data"] == "text"
    assert binary["data_base64"] == "/w=="
    assert "data" not in binary


def test_aggregated_records_are_de_aggregated(stream, kpl):
    inside = [UserRecord("a", b"1", "0"), UserRecord("b", b"2", "1")]
    stream.store(("a", "0", encode(inside)))
    records, _ = read_all(kpl, stream)
    assert [
        (each["subsequence"], each["partition_key"], each["explicit_hash_key"], each["data"]) for each in records
    ] == [
        (0, "a", "0", "1"),
        (1, "b", "1", "2"),
    ]


def test_aggregated_records_on_the_wrong_shard_are_dropped_and_counted(stream, kpl):
    astray = encode([UserRecord("a", b"1", "0"), UserRecord("b", b"2", str(LAST_HASH_KEY))])
    stream.store(("a", "0", astray), ("c", "0", b"raw"))
    records, err = read_all(kpl, stream)
    assert [each["data"] for each in records] == ["raw"]
    assert err.startswith("1 aggregated records were on the wrong shard and dropped")


def test_child_shards_are_read_after_their_parents(stream, kpl):
    stream.store(("parent", "0", b"0"))
    stream.call(lambda fake, now: fake.split_shard(
        stream.name, shard_id="shardId-000000000000", new_starting_hash_key=5, now=now))  # fmt: skip
    stream.store(("left", "0", b"1"), ("right", "5", b"2"))
    stream.call(lambda fake, now: fake.merge_shards(
        stream.name, shard_id="shardId-000000000002", adjacent_shard_id="shardId-000000000003", now=now))  # fmt: skip
    stream.store(("merged", "5", b"3"))
    records, _ = read_all(kpl, stream)
    keys = [each["partition_key"] for each in records]
    assert sorted(keys) == ["left", "merged", "parent", "right"]
    assert keys[0] == "parent"
    assert keys[-1] == "merged"


def test_it_begins_with_new_records_and_ends_at_its_limit(stream):
    stream.store(("old", None, b"old"))
    with started("tail", *stream.address, "--limit", "2", "--json", "--quiet") as tail:
        assert tail.stderr.readline().startswith(f"reading {stream.name} from Kinesis at http://127.0.0.1:")
        stream.store(("new", "0", b"1"), ("new", "0", b"2"), ("new", "0", b"3"))
        assert tail.end() == 0
        out, err = tail.stdout.read(), tail.stderr.read()
    assert [json.loads(line)["data"] for line in out.splitlines()] == ["1", "2"]
    assert err == ""


def test_ctrl_c_is_status_0_and_control_characters_are_escaped(stream):
    stream.store(("k\x1b[2J", "0", b"\x1b]0;owned\x07\nbell"), ("b", "0", b"\xff\xfe"))
    outcome = in_a_terminal("tail", *stream.address, "--from-start", after="//4=", typed="\x03")
    shown = without_escape_codes(outcome.out)
    assert outcome.status == 0
    assert r"shard 0  k\x1b[2J  \x1b]0;owned\x07\nbell" in shown
    assert "shard 0  b  2 bytes, base64 //4=" in shown
    assert "\x07" not in outcome.out
    assert "Traceback" not in shown


def test_a_closed_output_ends_it_without_a_message(stream):
    stream.store(("k", "0", b"first"))
    with started("tail", *stream.address, "--from-start", "--quiet") as tail:
        tail.stdout.readline()
        tail.stdout.close()
        stream.store(("k", "0", b"not read"))
        err = tail.stderr.read()
        assert tail.end() == 141
    assert err.count("\n") == 1, "only the note that it is reading"


def test_an_expired_iterator_is_replaced(stream, kpl):
    stream.store(("k", "0", b"1"), ("k", "0", b"2"))
    expired = When(stream=None, operation="GetRecords", times=2)
    with stream.fault(ErrorAnswer("ExpiredIteratorException"), expired):
        records, _ = read_all(kpl, stream)
    assert [each["data"] for each in records] == ["1", "2"]


def test_put_accepts_the_json_output_of_tail(stream, kpl, tmp_path):
    stream.store(("a", None, encode([UserRecord("a", b"1"), UserRecord("a", b"\xff\xfe")])), ("b", None, b"raw"))
    outcome = kpl("tail", *stream.address, "--from-start", "--no-follow", "--json")
    before = [json.loads(line) for line in outcome.out.splitlines()]
    assert len(before) == 3
    (tmp_path / "lines").write_text(outcome.out)
    stream.call(lambda fake, now: fake.create_stream(f"{stream.name}-copy", shard_count=1, now=now))
    copy = stream._replace(name=f"{stream.name}-copy")
    assert kpl("put", *copy.address, tmp_path / "lines", "--format", "ndjson").status == 0
    after, _ = read_all(kpl, copy)

    def content(records):
        return sorted((each["partition_key"], each.get("data", ""), each.get("data_base64", "")) for each in records)

    assert content(after) == content(before)


def test_a_listing_without_an_end_is_an_error_that_says_so(stream, kpl, monkeypatch):
    monkeypatch.setattr("kpl_core.paging.MAX_PAGES", 1)
    stream.call(lambda fake, now: fake.create_stream("large", shard_count=1_001, now=now))
    arguments = ["large" if each == stream.name else each for each in stream.address]
    outcome = kpl("tail", *arguments, "--from-start", "--no-follow")
    assert outcome.status == 3
    assert "the listing has more than 1 pages" in outcome.err
    assert "Traceback" not in outcome.err


def with_a_pause(stream, tail):
    """Store a record before and after the time of the first line of progress."""
    assert tail.stderr.readline().startswith("reading ")
    stream.store(("k", "0", b"first"))
    time.sleep(FIRST_SECONDS)
    stream.store(("k", "0", b"second"))


@pytest.mark.long
def test_a_tail_into_pipes_prints_lines_of_progress(stream):
    for form in ((), ("--json",)):
        with started("tail", *stream.address, "--limit", "1000", *form) as tail:
            with_a_pause(stream, tail)
            line = tail.stderr.readline()
            assert tail.end(signal.SIGINT) == 0
            rest = tail.stderr.read()
        if form:
            found = json.loads(line)
            assert (found["progress"], found["records"], found["total"], found["bytes"]) == ("read", 2, 1_000, 11)
            assert json.loads(rest) == {"interrupted": "read", "records": 2, "continue_with": "--after FILE"}
        else:
            assert line.startswith("read: 2 of 1,000 records, ")
            assert rest == ""


@pytest.mark.long
def test_an_interrupted_tail_from_the_start_names_the_options_that_read_the_rest(stream):
    def interrupted(*options):
        with started("tail", *stream.address, "--from-start", "--json", *options) as tail:
            assert tail.stderr.readline().startswith("reading ")
            if stored:
                tail.stdout.readline()
            assert tail.end(signal.SIGINT) == 0
            return tail.stderr.read()

    stored = False
    assert interrupted() == ""
    stream.store(("k", "0", b"1"))
    stored = True
    assert json.loads(interrupted())["continue_with"] == "--from-start --after FILE"
    assert interrupted("--quiet") == ""


@pytest.mark.long
def test_a_quiet_tail_prints_no_progress(stream):
    with started("tail", *stream.address, "--quiet") as tail:
        with_a_pause(stream, tail)
        while "second" not in tail.stdout.readline():
            pass
        assert tail.end(signal.SIGINT) == 0
        assert tail.stderr.read() == ""


@pytest.fixture
def output(tmp_path):
    """Return a file for what `kpl tail --json` prints, and a function that adds more to it."""
    file = tmp_path / "records.ndjson"
    file.touch()

    def read(kpl, stream, *options):
        outcome = kpl("tail", *stream.address, "--no-follow", "--json", "--after", file, *options)
        assert outcome.status == 0, outcome.err
        with file.open("a") as lines:
            lines.write(outcome.out)
        return [json.loads(line)["data"] for line in outcome.out.splitlines()]

    return read


def test_it_continues_in_the_middle_of_an_aggregated_record(stream, kpl, output):
    stream.store(("a", "0", encode([UserRecord("a", b"%d" % number, "0") for number in range(5)])), ("b", "0", b"raw"))
    assert output(kpl, stream, "--from-start", "--limit", "2") == ["0", "1"]
    assert output(kpl, stream, "--from-start", "--limit", "3") == ["2", "3", "4"]
    assert output(kpl, stream) == ["raw"]
    assert output(kpl, stream) == []
    stream.store(("b", "0", b"new"))
    assert output(kpl, stream) == ["new"]


def test_it_continues_in_all_shards_and_in_children_of_those_that_were_read(stream, kpl, output):
    stream.store(("parent", "0", b"parent"))
    assert output(kpl, stream, "--from-start") == ["parent"]
    stream.call(lambda fake, now: fake.split_shard(
        stream.name, shard_id="shardId-000000000000", new_starting_hash_key=5, now=now))  # fmt: skip
    stream.store(("left", "0", b"left"), ("right", "5", b"right"), ("other", str(LAST_HASH_KEY), b"other"))
    assert sorted(output(kpl, stream)) == ["left", "other", "right"]
    stream.call(lambda fake, now: fake.merge_shards(
        stream.name, shard_id="shardId-000000000002", adjacent_shard_id="shardId-000000000003", now=now))  # fmt: skip
    stream.store(("merged", "5", b"merged"))
    assert output(kpl, stream) == ["merged"]
    # Its ancestors are not read again.
    assert output(kpl, stream, "--from-start") == []


def test_a_shard_without_records_in_the_file_is_read_from_the_oldest_arrival_in_it(stream, kpl, tmp_path):
    stream.store(("old", str(LAST_HASH_KEY), b"old"))
    # The lowest version of botocore asks for whole seconds.
    time.sleep(1.01)
    stream.store(("a", "0", b"a"))
    records, _ = read_all(kpl, stream)
    (tmp_path / "read").write_text("".join(json.dumps(each) + "\n" for each in records if each["data"] == "a"))
    stream.store(("new", str(LAST_HASH_KEY), b"new"))
    arguments = ("tail", *stream.address, "--no-follow", "--json", "--after", tmp_path / "read")
    assert [json.loads(line)["data"] for line in kpl(*arguments).out.splitlines()] == ["new"]
    both = kpl(*arguments, "--from-start").out.splitlines()
    assert [json.loads(line)["data"] for line in both] == ["old", "new"]


@pytest.mark.parametrize("line", ["no JSON", '{"shard": "shardId-000000000000"}', '{"data": 1}', ""])
def test_a_file_that_tail_did_not_write_is_one_sentence(stream, kpl, tmp_path, line):
    (tmp_path / "other").write_text(f"{line}\n")
    outcome = kpl("tail", *stream.address, "--after", tmp_path / "other")
    assert outcome.status == 4
    assert outcome.err.startswith(f"kpl: line 1 of {tmp_path / 'other'} was not written by `kpl tail --json`")
    assert kpl("tail", *stream.address, "--after", tmp_path / "none").status == 4
