"""Dead letters in an SQS queue and an S3 bucket of an independent server: moto, in its own process."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiobotocore.session import get_session

from kpl_core.durability.dead_letters.aws_sinks import S3Sink, SqsSink
from kpl_core.durability.dead_letters.dead_letter_sink import SinkReport
from kpl_core.durability.spool.envelope import DeadLetter, dead_letter_of, letter_id, spooled_record_of
from tests.interop.emulators import Emulator

pytestmark = pytest.mark.anyio


def letter(number: int, data: bytes) -> DeadLetter:
    record = spooled_record_of("orders", f"key-{number}-é-\U0001f600", data, accepted_at=1_700_000_000.0)
    return dead_letter_of(record, id=letter_id(number, b"\x01"), reason="throttled", producer_version="1")


LETTERS = [letter(number, bytes([number]) * number) for number in range(25)]


@pytest.fixture
async def sqs(moto: Emulator) -> AsyncIterator[Any]:
    async with get_session().create_client("sqs", region_name="us-east-1", endpoint_url=moto.endpoint_url) as client:
        yield client


@pytest.fixture
async def s3(moto: Emulator) -> AsyncIterator[Any]:
    async with get_session().create_client("s3", region_name="us-east-1", endpoint_url=moto.endpoint_url) as client:
        yield client


async def received(sqs: Any, queue_url: str) -> list[dict[str, Any]]:
    """Read and delete every message of a queue."""
    letters: list[dict[str, Any]] = []
    while messages := (await sqs.receive_message(QueueUrl=queue_url, MaxNumberOfMessages=10)).get("Messages"):
        for message in messages:
            letters.append(json.loads(message["Body"]))
            await sqs.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])
    return letters


async def test_every_letter_is_read_back_from_sqs(sqs: Any) -> None:
    queue_url = (await sqs.create_queue(QueueName="letters"))["QueueUrl"]
    assert await SqsSink(sqs, queue_url).send(LETTERS) == SinkReport(25, ())
    letters = await received(sqs, queue_url)
    assert {each["id"]: each["partition_key"] for each in letters} == {each.id: each.partition_key for each in LETTERS}


async def test_a_letter_above_the_queues_limit_is_refused_and_the_others_arrive(sqs: Any) -> None:
    queue = await sqs.create_queue(QueueName="small", Attributes={"MaximumMessageSize": "4096"})
    large = letter(99, bytes(4_000))
    report = await SqsSink(sqs, queue["QueueUrl"]).send([LETTERS[0], large, LETTERS[1]])
    assert report.stored == 2
    assert [refusal.letter.id for refusal in report.refused] == [large.id]
    assert "the SQS queue allows 4,096" in report.refused[0].why
    letters = await received(sqs, queue["QueueUrl"])
    assert {each["id"] for each in letters} == {LETTERS[0].id, LETTERS[1].id}


async def test_a_fifo_queue_accepts_the_letters(sqs: Any) -> None:
    queue = await sqs.create_queue(QueueName="letters.fifo", Attributes={"FifoQueue": "true"})
    assert (await SqsSink(sqs, queue["QueueUrl"]).send(LETTERS)).stored == 25
    assert len(await received(sqs, queue["QueueUrl"])) == 25


async def test_a_missing_queue_refuses_all_letters_with_one_sentence(sqs: Any, moto: Emulator) -> None:
    report = await SqsSink(sqs, f"{moto.endpoint_url}/123456789012/none").send(LETTERS[:3])
    assert (report.stored, len(report.refused)) == (0, 3)
    assert "check the queue's URL" in report.refused[0].why


async def test_an_object_in_s3_has_one_line_per_letter(s3: Any) -> None:
    await s3.create_bucket(Bucket="letters")
    assert await S3Sink(s3, "letters", prefix="dead/").send(LETTERS) == SinkReport(25, ())
    (found,) = (await s3.list_objects_v2(Bucket="letters", Prefix="dead/2023/11/14/22/"))["Contents"]
    body = await (await s3.get_object(Bucket="letters", Key=found["Key"]))["Body"].read()
    assert [json.loads(line)["id"] for line in body.splitlines()] == [each.id for each in LETTERS]


async def test_a_missing_bucket_refuses_all_letters_with_one_sentence(s3: Any) -> None:
    report = await S3Sink(s3, "nobodys-bucket").send(LETTERS[:3])
    assert (report.stored, len(report.refused)) == (0, 3)
    assert "check the bucket's name" in report.refused[0].why
