"""Dead letters as objects of an S3 bucket: one object of JSON lines for each `send`.

The name says when and which: `<prefix>2026/11/20/10/<id of the first letter>.jsonl`, by the
hour in UTC in which the first record was seen. Sent again after an unclear
answer, the same letters overwrite their own object.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from botocore.exceptions import BotoCoreError, ClientError

from kpl_core.durability.dead_letters.dead_letter_sink import Refusal, SinkReport
from kpl_core.durability.spool.envelope import DeadLetter, letter_to_json

__all__ = ["S3Client", "S3Sink"]


class S3Client(Protocol):
    """What is used of an aiobotocore S3 client; its owner opens and closes it."""

    async def put_object(self, **parameters: Any) -> Mapping[str, Any]:  # noqa: ANN401 - botocore's shape
        """API_PutObject."""


class S3Sink:
    """Writes into `bucket` under `prefix`. asyncio only, like its client."""

    def __init__(self, client: S3Client, bucket: str, *, prefix: str = "dead-letters/") -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Write one object with a line per letter; all are refused if S3 does not take it."""
        if not letters:
            return SinkReport(0, ())
        first = letters[0]
        seen_at = datetime.fromtimestamp(first.first_seen, UTC)
        key = f"{self._prefix}{seen_at:%Y/%m/%d/%H}/{first.id}.jsonl"
        body = b"".join(letter_to_json(letter) + b"\n" for letter in letters)
        try:
            await self._client.put_object(Bucket=self._bucket, Key=key, Body=body, ContentType="application/x-ndjson")
        except (BotoCoreError, ClientError, OSError) as error:
            why = f"S3 did not take {key} ({error}); check the bucket's name, its permissions and the network"
            return SinkReport(0, tuple(Refusal(letter, why) for letter in letters))
        return SinkReport(len(letters), ())
