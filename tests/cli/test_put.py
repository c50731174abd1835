import json
import re
import signal

import msgspec
import pytest

from kpl_core import Attempt, RecordResult, decode
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.cli import put
from kpl_integrations.cli.put import cause_of
from tests.support.kpl_process import in_a_terminal, run, started, without_escape_codes
from tests.support.waiting import wait_until


def user_records(stream):
    """Return partition key and data of all stored user records, in the order of their lines."""
    found: list[tuple[str, bytes]] = []
    for key, data in stream.stored():
        records = decode(data)
        found += [(key, data)] if records is None else [(each.partition_key, each.data) for each in records]
    return sorted(found, key=lambda record: (len(record[0]), record[0]))


def test_lines_from_a_pipe_become_records_with_their_numbers_as_keys(stream):
    outcome = run("put", *stream.address, stdin="first\nsecond\r\n\n  \nfünf\nsix without an end")
    assert (outcome.status, outcome.err) == (0, "")
    assert user_records(stream) == [
        ("1", b"first"),
        ("2", b"second"),
        ("5", "fünf".encode()),
        ("6", b"six without an end"),
    ]
    assert re.search(r"^delivered +4\b", outcome.out, re.MULTILINE)
    assert re.search(r"^confirmed lines +6\b", outcome.out, re.MULTILINE)
    assert "\x1b" not in outcome.out


def test_many_lines_are_aggregated(stream, kpl, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"line {number}\n" for number in range(1, 5_001)))
    outcome = kpl("put", *stream.address, lines, "--json")
    summary = json.loads(outcome.out)
    assert (outcome.status, summary["delivered"], summary["confirmed_lines"]) == (0, 5_000, 5_000)
    assert user_records(stream) == [(str(number), f"line {number}".encode()) for number in range(1, 5_001)]
    assert len(stream.stored()) < 10


def test_a_terminal_shows_a_bar_and_the_summary(stream, tmp_path):
    (tmp_path / "lines").write_text("a line\n" * 10)
    outcome = in_a_terminal("put", *stream.address, str(tmp_path / "lines"))
    assert outcome.status == 0
    assert "━" in outcome.out
    assert re.search(r"^delivered +10\b", without_escape_codes(outcome.out), re.MULTILINE)


def test_lines_can_be_typed_without_a_progress_bar(stream):
    outcome = in_a_terminal("put", *stream.address, after="Ctrl-D", typed="hello\nworld\n\x04")
    assert outcome.status == 0
    assert user_records(stream) == [("1", b"hello"), ("2", b"world")]
    assert "━" not in outcome.out


NDJSON = '{"partition_key": "a", "data": "text"}\n{"partition_key": "b", "data_base64": "/wA=", "shard": "ignored"}\n'


@pytest.mark.parametrize(
    ("options", "lines", "expected"),
    [
        (("--format", "ndjson"), NDJSON, [("a", b"text"), ("b", b"\xff\x00")]),
        (
            ("--format", "ndjson", "--key-field", "user"),
            '{"user": "ann"}\n{"user": 7, "n": 1}\n',
            [("7", b'{"user": 7, "n": 1}'), ("ann", b'{"user": "ann"}')],
        ),
        (("--format", "ndjson", "--key", "k"), '{"n": 1}\n', [("k", b'{"n": 1}')]),
        (("--key", "k"), "one\n", [("k", b"one")]),
        (("--skip", "2"), "one\ntwo\nthree\n", [("3", b"three")]),
        (("--skip", "2"), "one\ntwo\n", []),
    ],
)
def test_options_choose_partition_key_and_data(stream, kpl, tmp_path, options, lines, expected):
    (tmp_path / "lines").write_text(lines)
    outcome = kpl("put", *stream.address, tmp_path / "lines", *options, "--json")
    assert outcome.status == 0, outcome.err
    assert user_records(stream) == expected
    assert json.loads(outcome.out)["confirmed_lines"] == lines.count("\n")


def test_an_explicit_hash_key_selects_the_shard(stream, kpl, tmp_path):
    highest = str(2**128 - 1)
    (tmp_path / "lines").write_text(
        "".join(
            json.dumps({"partition_key": "k", "data": "d", "explicit_hash_key": key}) + "\n" for key in ("0", highest)
        )
    )
    assert kpl("put", *stream.address, tmp_path / "lines", "--format", "ndjson").status == 0
    shards = {record.shard_id for record in stream.call(lambda fake, _: fake.records(stream.name))}
    assert shards == {"shardId-000000000000", "shardId-000000000001"}


def test_a_bad_line_is_reported_and_a_later_run_can_continue(stream, kpl, tmp_path):
    good = '{"partition_key": "k", "data": "good"}'
    (tmp_path / "lines").write_text(f"{good}\n{good}\nnonsense\n{good}\n")
    command = ("put", *stream.address, tmp_path / "lines", "--format", "ndjson", "--json")
    outcome = kpl(*command)
    assert outcome.status == 4
    assert outcome.err.startswith(f"kpl: line 3 of {tmp_path / 'lines'}: it is not JSON (")
    assert outcome.err.endswith("then continue with --skip 2\n")
    assert outcome.err.count("\n") == 1
    assert len(user_records(stream)) == json.loads(outcome.out)["confirmed_lines"] == 2
    (tmp_path / "lines").write_text(f"{good}\n{good}\n{good}\n{good}\n")
    assert kpl(*command, "--skip", "2").status == 0
    assert len(user_records(stream)) == 4


def test_a_line_with_an_invalid_record_is_reported(stream, kpl, tmp_path):
    (tmp_path / "lines").write_text('{"partition_key": "", "data": "d"}')
    outcome = kpl("put", *stream.address, tmp_path / "lines", "--format", "ndjson")
    assert outcome.status == 4
    assert "line 1" in outcome.err
    assert "partition_key has 0 characters" in outcome.err


def test_a_line_larger_than_any_record_is_reported(stream, kpl, tmp_path):
    (tmp_path / "lines").write_bytes(b"small\n" + b"x" * 1_100_000 + b"\n")
    outcome = kpl("put", *stream.address, tmp_path / "lines")
    assert outcome.status == 4
    assert "line 2" in outcome.err
    assert "1,048,576" in outcome.err


def test_a_rejected_record_ends_the_run_with_the_option_to_continue(stream, kpl, tmp_path, monkeypatch):
    monkeypatch.setattr(put, "_SHARD_MAP_SECONDS", 0.0)
    (tmp_path / "lines").write_text("".join(f"line {number}\n" for number in range(1, 101)))
    matching = When(stream=stream.name, record=lambda _, data: data == b"line 41")
    # Without a shard map a Kinesis record has one user record, so only line 41 fails.
    no_shards = When(stream=stream.name, operation="ListShards")
    with (
        stream.fault(RecordError("KMSAccessDeniedException", "no key"), matching),
        stream.fault(ErrorAnswer("AccessDeniedException"), no_shards),
    ):
        outcome = kpl("put", *stream.address, tmp_path / "lines")
    assert outcome.status == 1
    assert "1 of 100 records were not delivered, the first of them line 41 (KMSAccess" in outcome.err
    assert "continue with --skip 40" in outcome.err
    assert re.search(r"^confirmed lines +40\b", outcome.out, re.MULTILINE)
    assert re.search(r"^failed +1 +1 KMSAccessDeniedException$", outcome.out, re.MULTILINE)


def test_failing_requests_are_reported_while_they_are_retried(stream, kpl, tmp_path, monkeypatch):
    monkeypatch.setattr(put, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(put, "_POLL_SECONDS", 0.01)
    (tmp_path / "lines").write_text("one\n")
    with stream.fault(ErrorAnswer("ServiceUnavailable"), When(stream=stream.name, operation="PutRecords", times=3)):
        outcome = kpl("put", *stream.address, tmp_path / "lines")
    assert outcome.status == 0
    lines = outcome.err.splitlines()
    assert lines.count("all requests fail now (ServiceUnavailable); each record is retried for 60 seconds") == 1
    # The producer's own log has the service's message.
    logged = f"warning: requests to stream {stream.name!r} fail (ServiceUnavailable: Service is unavailable.); "
    assert sum(line.startswith(logged) for line in lines) == 1
    assert len(lines) == 2


def test_put_works_without_permission_to_describe(stream, kpl, tmp_path):
    (tmp_path / "lines").write_text("one\n")
    with stream.fault(
        ErrorAnswer("AccessDeniedException"), When(stream=stream.name, operation="DescribeStreamSummary")
    ):
        assert kpl("put", *stream.address, tmp_path / "lines").status == 0


def test_ctrl_c_delivers_the_read_lines_and_prints_the_option_to_continue(stream):
    with started("put", *stream.address) as running:
        running.stdin.write("one\ntwo\n")
        running.stdin.flush()
        wait_until(lambda: len(user_records(stream)) >= 2, "two records are stored")
        # The input is still open, and the command does not wait for its end.
        assert running.end(signal.SIGINT) == 130
        out, err = running.stdout.read(), running.stderr.read()
    assert re.search(r"^delivered +2\b", out, re.MULTILINE)
    assert err.splitlines()[1:] == ["interrupted; continue with --skip 2"]


@pytest.mark.long
def test_a_second_signal_stops_it_immediately(stream):
    matching = When(stream=stream.name, operation="PutRecords")
    unavailable = ErrorAnswer("ServiceUnavailable")
    with stream.fault(unavailable, matching) as fault, started("put", *stream.address, "--json") as running:
        running.stdin.write("one\n")
        running.stdin.flush()
        wait_until(lambda: fault.fired, "a request that fails")
        running.process.terminate()
        assert running.stderr.readline().startswith("waiting 5 seconds")
        assert running.end(signal.SIGTERM) == 143
        summary = json.loads(running.stdout.read())
    assert (summary["records"], summary["failed"], summary["confirmed_lines"]) == (1, 1, 0)


def test_an_expired_record_is_reported_with_the_error_before():
    throttled = Attempt(False, "ProvisionedThroughputExceededException", "Rate\nexceeded.", 0.0, 1.0)
    expired = Attempt(False, "Expired", "too late", 1.0, 2.0)
    result = RecordResult(successful=False, shard_id=None, sequence_number=None, attempts=(throttled, expired))
    assert cause_of(result) == ("ProvisionedThroughputExceededException", "Rate exceeded")
    assert cause_of(msgspec.structs.replace(result, attempts=(expired,))) == ("Expired", "too late")


def test_a_bad_first_line_prints_no_table(stream, kpl, tmp_path):
    (tmp_path / "lines").write_text("nonsense\n")
    outcome = kpl("put", *stream.address, tmp_path / "lines", "--format", "ndjson")
    assert (outcome.status, outcome.out) == (4, "")
    assert "line 1" in outcome.err


@pytest.mark.parametrize(("skip", "status"), [(2, 0), (3, 4)])
def test_skipping_more_lines_than_the_input_has_is_an_error(stream, kpl, tmp_path, skip, status):
    (tmp_path / "lines").write_text("one\ntwo\n")
    outcome = kpl("put", *stream.address, tmp_path / "lines", "--skip", skip)
    assert outcome.status == status
    assert ("--skip is 3" in outcome.err) == (status == 4)
    assert "has 2 lines" in outcome.err or status == 0
