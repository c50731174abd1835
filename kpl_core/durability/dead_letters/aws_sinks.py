"""Dead-letter sinks on AWS: messages of an SQS queue, objects of an S3 bucket. asyncio only, like their clients.

SQS limits a message, and the sum of a request, to 1 MiB (256 KiB before August 2025); a queue may have a lower limit
(`MaximumMessageSize`). A Kinesis record may be larger, and base64 adds a third. Such a letter is refused, never cut.
(AWS, API_SendMessageBatch; "Amazon SQS message quotas".)
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from botocore.exceptions import BotoCoreError, ClientError

from kpl_core.durability.dead_letters.dead_letter_sink import RefusedLetter, SinkReport
from kpl_core.durability.spool.envelope import DeadLetter, letter_to_json
from kpl_core.options.kinesis_limits import MIB
from kpl_core.records.hash_key import hash_key_of

_MESSAGES_PER_REQUEST: Final = 10
_Message = tuple[DeadLetter, str]


class SqsClient(Protocol):
    """The calls used of an aiobotocore SQS client; its owner opens and closes it."""

    async def get_queue_attributes(self, **parameters: Any) -> Mapping[str, Any]:  # noqa: ANN401 - botocore's shape
        """API_GetQueueAttributes."""

    async def send_message_batch(self, **parameters: Any) -> Mapping[str, Any]:  # noqa: ANN401
        """API_SendMessageBatch."""


class SqsSink:
    """Sends one JSON message per letter to `queue_url`, ten per request.

    For a FIFO queue (its name ends in .fifo) the message group is the partition key's hash, and the letter's id is the
    deduplication id.
    """

    def __init__(self, client: SqsClient, queue_url: str) -> None:
        self._client = client
        self._queue_url = queue_url
        self._max_bytes: int | None = None

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Send each letter as one JSON message; letters that are too large, or that SQS rejects, are refused."""
        refused: list[RefusedLetter] = []
        if self._max_bytes is None:
            self._max_bytes = await self._queue_limit()
        messages: list[_Message] = []
        for letter in letters:
            body = letter_to_json(letter).decode()
            if (size := len(body.encode())) > self._max_bytes:
                why = (
                    f"dead letter {letter.id} has {size:,} bytes as a message and the SQS queue allows "
                    f"{self._max_bytes:,}; send letters of this stream to S3, a file or the spool instead"
                )
                refused.append(RefusedLetter(letter, why))
            else:
                messages.append((letter, body))
        for portion in self._portions(messages, self._max_bytes):
            refused += await self._send_portion(portion)
        return SinkReport(len(letters) - len(refused), tuple(refused))

    async def _queue_limit(self) -> int:
        try:
            answer = await self._client.get_queue_attributes(
                QueueUrl=self._queue_url, AttributeNames=["MaximumMessageSize"]
            )
        except (BotoCoreError, ClientError):
            # Without permission to ask, SQS itself rejects messages that are too large.
            return MIB
        return int(answer.get("Attributes", {}).get("MaximumMessageSize", MIB))

    async def _send_portion(self, portion: Sequence[_Message]) -> list[RefusedLetter]:
        entries = [self._entry(index, letter, body) for index, (letter, body) in enumerate(portion)]
        try:
            answer = await self._client.send_message_batch(QueueUrl=self._queue_url, Entries=entries)
        except (BotoCoreError, ClientError, OSError) as error:
            why = f"SQS rejected the request ({error}); check the queue's URL, its permissions and the network"
            return [RefusedLetter(letter, why) for letter, _ in portion]
        why_not = {
            failure.get("Id"): f"SQS refused it: {failure.get('Code')} {failure.get('Message', '')}"
            for failure in answer.get("Failed", ())
        }
        # botocore accepts nearly any body as an answer, with every field missing.
        stored = {success.get("Id") for success in answer.get("Successful", ())}
        return [
            RefusedLetter(
                letter, why_not.get(str(index), "the answer of SQS does not mention it; check the queue's endpoint")
            )
            for index, (letter, _) in enumerate(portion)
            if str(index) not in stored
        ]

    def _entry(self, index: int, letter: DeadLetter, body: str) -> dict[str, str]:
        entry = {"Id": str(index), "MessageBody": body}
        if self._queue_url.endswith(".fifo"):
            # A group id allows 128 characters of a small alphabet; a partition key may be any text.
            entry["MessageGroupId"] = f"{hash_key_of(letter.partition_key):032x}"
            entry["MessageDeduplicationId"] = letter.id
        return entry

    @staticmethod
    def _portions(messages: Sequence[_Message], max_bytes: int) -> Iterator[Sequence[_Message]]:
        """Split into requests of at most ten messages and `max_bytes` in total."""
        portion: list[_Message] = []
        size = 0
        for letter, body in messages:
            length = len(body.encode())
            if portion and (len(portion) == _MESSAGES_PER_REQUEST or size + length > max_bytes):
                yield portion
                portion, size = [], 0
            portion.append((letter, body))
            size += length
        if portion:
            yield portion


class S3SinkClient(Protocol):
    """The call used of an aiobotocore S3 client; its owner opens and closes it."""

    async def put_object(self, **parameters: Any) -> Mapping[str, Any]:  # noqa: ANN401 - botocore's shape
        """API_PutObject."""


class S3Sink:
    """Writes one object of JSON lines per `send` into `bucket` under `prefix`.

    The key is `<prefix>2026/11/20/10/<id of the first letter>.jsonl`, by the UTC hour in which the first record was
    seen. When a `send` is retried after an unclear answer, the same letters overwrite their own object.
    """

    def __init__(self, client: S3SinkClient, bucket: str, *, prefix: str = "dead-letters/") -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Write one object with one line per letter; all are refused if S3 rejects it."""
        if not letters:
            return SinkReport(0, ())
        first = letters[0]
        seen_at = datetime.fromtimestamp(first.first_seen, UTC)
        key = f"{self._prefix}{seen_at:%Y/%m/%d/%H}/{first.id}.jsonl"
        body = b"".join(letter_to_json(letter) + b"\n" for letter in letters)
        try:
            await self._client.put_object(Bucket=self._bucket, Key=key, Body=body, ContentType="application/x-ndjson")
        except (BotoCoreError, ClientError, OSError) as error:
            why = f"S3 rejected {key} ({error}); check the bucket's name, its permissions and the network"
            return SinkReport.of_all(letters, why)
        return SinkReport.of_all(letters, None)
