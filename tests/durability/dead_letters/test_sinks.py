"""Dead-letter sinks: what they store, what they refuse, and that no letter is dropped silently."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from kpl_core.durability.dead_letters import (
    CallableSink,
    DeadLetterQueue,
    DeadLetterSink,
    JsonLinesSink,
    QueueSink,
    RefusedLetter,
    SinkReport,
)
from kpl_core.durability.dead_letters.aws_sinks import S3Sink, SqsSink
from kpl_core.durability.spool import AsyncSpool, DeadLetter, LetterFilter, Spool, SpoolOptions
from kpl_core.durability.spool.envelope import dead_letter_of, letter_id
from tests.support.durability_scene import spooled

pytestmark = pytest.mark.anyio


def letter(number: int, data: bytes | None = None) -> DeadLetter:
    return dead_letter_of(
        spooled(number, data=data), id=letter_id(1_700_000_000 + number, b"\x01"), reason="ttl", producer_version="1"
    )


LETTERS = [letter(number) for number in range(25)]


async def test_a_function_receives_every_letter() -> None:
    taken: list[DeadLetter] = []
    sink: DeadLetterSink = CallableSink(taken.append)
    assert await sink.send(LETTERS) == SinkReport(25, ())
    assert taken == LETTERS


async def test_a_coroutine_function_is_awaited() -> None:
    taken: list[DeadLetter] = []

    async def take(each: DeadLetter) -> None:
        taken.append(each)

    assert (await CallableSink(take).send(LETTERS)).stored == 25
    assert taken == LETTERS


async def test_a_letter_for_which_the_function_raises_is_refused_and_the_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The whole batch counted as failed, including letters that the function had accepted."""
    taken: list[DeadLetter] = []

    def take(each: DeadLetter) -> None:
        if each is LETTERS[3]:
            raise ValueError(each.id)
        taken.append(each)

    report = await CallableSink(take).send(LETTERS)
    assert report == SinkReport(
        24, (RefusedLetter(LETTERS[3], "the function that takes dead letters raised ValueError"),)
    )
    assert taken == [*LETTERS[:3], *LETTERS[4:]]
    assert LETTERS[3].id in caplog.text


async def test_the_queue_sink_stores_all_letters_or_refuses_all(tmp_path: Path) -> None:
    options = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0, max_dead_letter_bytes=1024 * 1024)
    async with AsyncSpool(Spool(options)) as spool:
        queue = DeadLetterQueue(spool.spool)
        sink: DeadLetterSink = QueueSink(queue)
        assert await sink.send(LETTERS) == SinkReport(25, ())
        stored = await spool.mailbox.wait_for(queue.select_nowait(LetterFilter(), 100))
        assert [each.letter for each in stored] == LETTERS
        large = [letter(1, bytes(600_000)), letter(2, bytes(600_000))]
        report = await sink.send(large)
        assert report.stored == 0
        assert [refusal.letter for refusal in report.refused] == large
        assert "max_dead_letter_bytes" in report.refused[0].why


async def test_json_lines_are_appended_to_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    path = tmp_path / "letters.jsonl"
    sink: DeadLetterSink = JsonLinesSink(path)
    assert await sink.send(LETTERS[:2]) == SinkReport(2, ())
    await sink.send(LETTERS[2:])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [each.id for each in LETTERS]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_the_file_stays_the_same_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = JsonLinesSink(Path("letters.jsonl"))
    await sink.send(LETTERS[:1])
    monkeypatch.chdir("/")
    await sink.send(LETTERS[1:2])
    assert len((tmp_path / "letters.jsonl").read_text().splitlines()) == 2


async def test_a_file_that_cannot_be_written_is_unchanged_and_all_are_refused(tmp_path: Path) -> None:
    report = await JsonLinesSink(tmp_path / "missing" / "letters.jsonl").send(LETTERS)
    assert report.stored == 0
    assert len(report.refused) == 25
    assert "No such file or directory" in report.refused[0].why


async def test_a_partial_write_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "letters.jsonl"
    sink = JsonLinesSink(path)
    await sink.send(LETTERS[:1])
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, lines: write(descriptor, lines[:10]))
    report = await sink.send(LETTERS)
    monkeypatch.undo()
    assert (report.stored, len(report.refused)) == (0, 25)
    assert "No space left" in report.refused[0].why
    assert path.read_bytes() == before


async def test_half_a_line_after_a_power_failure_does_not_corrupt_the_next(tmp_path: Path) -> None:
    path = tmp_path / "letters.jsonl"
    path.write_bytes(b'{"id":"whole"}\n{"id":"ha')
    assert await JsonLinesSink(path).send(LETTERS[:2]) == SinkReport(2, ())
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"id":"whole"}', '{"id":"ha']
    assert [json.loads(line)["id"] for line in lines[2:]] == [each.id for each in LETTERS[:2]]


async def test_the_folder_of_a_new_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that a power failure loses the whole file, including letters reported as stored."""
    synced: list[bool] = []
    fsync = os.fsync

    def watched(file: Any) -> None:
        synced.append(stat.S_ISDIR(os.fstat(file if isinstance(file, int) else file.fileno()).st_mode))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    sink = JsonLinesSink(tmp_path / "letters.jsonl")
    await sink.send(LETTERS[:1])
    assert synced == [False, True]
    await sink.send(LETTERS[1:2])
    assert synced == [False, True, False]


class FakeSqs:
    """Accepts messages as SQS does, as far as the sink can notice."""

    def __init__(self, *, limit: int | None = 262_144, failing: tuple[str, ...] = ()) -> None:
        self.limit = limit
        self.failing = failing
        self.requests: list[list[Mapping[str, str]]] = []
        self.down = False

    async def get_queue_attributes(self, **parameters: Any) -> Mapping[str, Any]:
        if self.limit is None:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "GetQueueAttributes")
        assert parameters["AttributeNames"] == ["MaximumMessageSize"]
        return {"Attributes": {"MaximumMessageSize": str(self.limit)}}

    async def send_message_batch(self, **parameters: Any) -> Mapping[str, Any]:
        if self.down:
            raise EndpointConnectionError(endpoint_url=parameters["QueueUrl"])
        entries = parameters["Entries"]
        self.requests.append(entries)
        failed = [entry for entry in entries if json.loads(entry["MessageBody"])["id"] in self.failing]
        return {
            "Successful": [{"Id": entry["Id"], "MessageId": "m"} for entry in entries if entry not in failed],
            "Failed": [{"Id": entry["Id"], "Code": "InternalError", "Message": "again"} for entry in failed],
        }


async def test_sqs_receives_ten_messages_per_request() -> None:
    client = FakeSqs()
    assert await SqsSink(client, "http://sqs/queue").send(LETTERS) == SinkReport(25, ())
    assert [len(request) for request in client.requests] == [10, 10, 5]
    assert [json.loads(entry["MessageBody"])["id"] for request in client.requests for entry in request] == [
        each.id for each in LETTERS
    ]


async def test_a_letter_above_the_queues_limit_is_refused_and_the_others_are_sent() -> None:
    client = FakeSqs(limit=1_024)
    large = letter(99, bytes(5_000))
    report = await SqsSink(client, "http://sqs/queue").send([LETTERS[0], large, LETTERS[1]])
    assert report.stored == 2
    ((refused, why),) = report.refused
    assert refused is large
    assert "as a message and the SQS queue allows 1,024; send letters of this stream to S3" in why


async def test_a_request_never_exceeds_the_byte_limit() -> None:
    client = FakeSqs(limit=2_048)
    await SqsSink(client, "http://sqs/queue").send([letter(number, bytes(500)) for number in range(4)])
    for request in client.requests:
        assert sum(len(entry["MessageBody"]) for entry in request) <= 2_048
    assert len(client.requests) > 1


async def test_messages_that_sqs_rejects_are_refused_with_its_error() -> None:
    client = FakeSqs(limit=None, failing=(LETTERS[3].id,))
    report = await SqsSink(client, "http://sqs/queue").send(LETTERS[:5])
    assert report == SinkReport(4, (RefusedLetter(LETTERS[3], "SQS refused it: InternalError again"),))


async def test_a_letter_missing_from_the_answer_of_sqs_is_refused() -> None:
    """botocore parses a proxy's error page as an answer without fields; it counted as success."""

    class Silent(FakeSqs):
        async def send_message_batch(self, **_: Any) -> Mapping[str, Any]:
            return {}

    report = await SqsSink(Silent(), "http://sqs/queue").send(LETTERS)
    assert (report.stored, len(report.refused)) == (0, 25)
    assert "the answer of SQS does not mention it" in report.refused[0].why


async def test_without_an_answer_of_sqs_the_whole_request_is_refused() -> None:
    client = FakeSqs()
    client.down = True
    report = await SqsSink(client, "http://sqs/queue").send(LETTERS)
    assert (report.stored, len(report.refused)) == (0, 25)
    assert "Could not connect to the endpoint URL" in report.refused[0].why


async def test_a_fifo_queue_receives_group_and_deduplication_ids() -> None:
    client = FakeSqs()
    await SqsSink(client, "http://sqs/queue.fifo").send([letter(1), letter(2)])
    first, second = client.requests[0]
    assert first["MessageGroupId"] == second["MessageGroupId"]
    assert first["MessageDeduplicationId"] != second["MessageDeduplicationId"]
    assert len(first["MessageGroupId"]) == 32


class FakeS3:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.down = False

    async def put_object(self, **parameters: Any) -> Mapping[str, Any]:
        if self.down:
            raise ClientError({"Error": {"Code": "NoSuchBucket", "Message": "no such bucket"}}, "PutObject")
        assert parameters["Bucket"] == "bucket"
        self.objects[parameters["Key"]] = parameters["Body"]
        return {}


async def test_s3_receives_one_object_with_one_line_per_letter() -> None:
    client = FakeS3()
    assert await S3Sink(client, "bucket").send(LETTERS) == SinkReport(25, ())
    ((key, body),) = client.objects.items()
    assert key == f"dead-letters/2023/11/14/22/{LETTERS[0].id}.jsonl"
    assert [json.loads(line)["id"] for line in body.splitlines()] == [each.id for each in LETTERS]


async def test_an_empty_send_writes_no_object() -> None:
    client = FakeS3()
    assert await S3Sink(client, "bucket").send([]) == SinkReport(0, ())
    assert not client.objects


async def test_letters_that_s3_rejects_are_refused() -> None:
    client = FakeS3()
    client.down = True
    report = await S3Sink(client, "bucket").send(LETTERS[:2])
    assert (report.stored, len(report.refused)) == (0, 2)
    assert "NoSuchBucket" in report.refused[0].why
