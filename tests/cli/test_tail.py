import json

from kpl_core import UserRecord, encode
from kpl_core.testing import ErrorAnswer, When
from tests.cli.kpl_process import in_a_terminal, started, without_escape_codes

LAST_HASH_KEY = 2**128 - 1


def everything(kpl, stream):
    """Return what `kpl tail` says of all that is stored, as JSON objects, and its stderr."""
    outcome = kpl("tail", *stream.address, "--from-start", "--no-follow", "--json")
    assert outcome.status == 0
    return [json.loads(line) for line in outcome.out.splitlines()], outcome.err


def test_a_record_is_told_with_its_place_key_and_data(stream, kpl):
    stream.store(("42", "0", b"text"), ("43", "0", b"\xff"))
    (text, binary), _ = everything(kpl, stream)
    assert text["shard"] == "shardId-000000000000"
    assert text["sequence_number"].isdecimal()
    assert (text["subsequence"], text["partition_key"], text["explicit_hash_key"]) == (None, "42", None)
    assert text["arrival"].endswith("+00:00")
    assert text["data"] == "text"
    assert binary["data_base64"] == "/w=="
    assert "data" not in binary


def test_aggregated_records_are_taken_apart(stream, kpl):
    inside = [UserRecord("a", b"1", "0"), UserRecord("b", b"2", "1")]
    stream.store(("a", "0", encode(inside)))
    records, _ = everything(kpl, stream)
    assert [
        (each["subsequence"], each["partition_key"], each["explicit_hash_key"], each["data"]) for each in records
    ] == [
        (0, "a", "0", "1"),
        (1, "b", "1", "2"),
    ]


def test_what_a_consumer_would_drop_is_dropped_and_counted(stream, kpl):
    astray = encode([UserRecord("a", b"1", "0"), UserRecord("b", b"2", str(LAST_HASH_KEY))])
    stream.store(("a", "0", astray), ("c", "0", b"raw"))
    records, err = everything(kpl, stream)
    assert [each["data"] for each in records] == ["raw"]
    assert err.startswith("1 aggregated records were on the wrong shard and dropped")


def test_shards_are_followed_into_their_children(stream, kpl):
    stream.store(("parent", "0", b"0"))
    stream.call(lambda fake, now: fake.split_shard(
        stream.name, shard_id="shardId-000000000000", new_starting_hash_key=5, now=now))  # fmt: skip
    stream.store(("left", "0", b"1"), ("right", "5", b"2"))
    stream.call(lambda fake, now: fake.merge_shards(
        stream.name, shard_id="shardId-000000000002", adjacent_shard_id="shardId-000000000003", now=now))  # fmt: skip
    stream.store(("merged", "5", b"3"))
    records, _ = everything(kpl, stream)
    keys = [each["partition_key"] for each in records]
    assert sorted(keys) == ["left", "merged", "parent", "right"]
    assert keys[0] == "parent"
    assert keys[-1] == "merged"


def test_it_begins_with_what_is_new_and_ends_at_its_limit(stream):
    stream.store(("old", None, b"old"))
    with started("tail", *stream.address, "--limit", "2", "--json") as tail:
        assert tail.stderr.readline().startswith(f"reading {stream.name} from Kinesis at http://127.0.0.1:")
        stream.store(("new", "0", b"1"), ("new", "0", b"2"), ("new", "0", b"3"))
        assert tail.end() == 0
        out, err = tail.stdout.read(), tail.stderr.read()
    assert [json.loads(line)["data"] for line in out.splitlines()] == ["1", "2"]
    assert err == ""


def test_ctrl_c_is_a_clean_end_and_no_record_can_steer_the_terminal(stream):
    stream.store(("k\x1b[2J", "0", b"\x1b]0;owned\x07\nbell"), ("b", "0", b"\xff\xfe"))
    outcome = in_a_terminal("tail", *stream.address, "--from-start", after="//4=", typed="\x03")
    shown = without_escape_codes(outcome.out)
    assert outcome.status == 0
    assert r"shard 0  k\x1b[2J  \x1b]0;owned\x07\nbell" in shown
    assert "shard 0  b  2 bytes, base64 //4=" in shown
    assert "\x07" not in outcome.out
    assert "Traceback" not in shown


def test_a_reader_that_goes_away_ends_it_without_a_word(stream):
    stream.store(("k", "0", b"first"))
    with started("tail", *stream.address, "--from-start") as tail:
        tail.stdout.readline()
        tail.stdout.close()
        stream.store(("k", "0", b"nobody reads this"))
        err = tail.stderr.read()
        assert tail.end() == 141
    assert err.count("\n") == 1, "only that it is reading"


def test_an_iterator_that_expired_is_replaced(stream, kpl):
    stream.store(("k", "0", b"1"), ("k", "0", b"2"))
    expired = When(stream=None, operation="GetRecords", times=2)
    with stream.fault(ErrorAnswer("ExpiredIteratorException"), expired):
        records, _ = everything(kpl, stream)
    assert [each["data"] for each in records] == ["1", "2"]


def test_what_tail_prints_put_takes(stream, kpl, tmp_path):
    stream.store(("a", None, encode([UserRecord("a", b"1"), UserRecord("a", b"\xff\xfe")])), ("b", None, b"raw"))
    outcome = kpl("tail", *stream.address, "--from-start", "--no-follow", "--json")
    before = [json.loads(line) for line in outcome.out.splitlines()]
    assert len(before) == 3
    (tmp_path / "lines").write_text(outcome.out)
    stream.call(lambda fake, now: fake.create_stream(f"{stream.name}-copy", shard_count=1, now=now))
    copy = stream._replace(name=f"{stream.name}-copy")
    assert kpl("put", *copy.address, tmp_path / "lines", "--format", "ndjson").status == 0
    after, _ = everything(kpl, copy)

    def content(records):
        return sorted((each["partition_key"], each.get("data", ""), each.get("data_base64", "")) for each in records)

    assert content(after) == content(before)
