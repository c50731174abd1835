"""AWS Lambda in front of a function: the events of a shard, and the documented rules of an event source mapping."""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

REGION = "us-east-1"
Record = dict[str, Any]
Function = Callable[[dict[str, Any]], dict[str, Any]]


def records_of(client: "KinesisClient", stream: str) -> dict[str, list[Record]]:
    """Return the Kinesis records of each shard of a stream in the form in which Lambda sends them."""
    return {
        shard["ShardId"]: _records_of_shard(client, stream, shard["ShardId"])
        for shard in client.list_shards(StreamName=stream)["Shards"]
    }


def _records_of_shard(client: "KinesisClient", stream: str, shard_id: str) -> list[Record]:
    iterator = client.get_shard_iterator(StreamName=stream, ShardId=shard_id, ShardIteratorType="TRIM_HORIZON")
    received = client.get_records(ShardIterator=iterator["ShardIterator"])
    assert received["MillisBehindLatest"] == 0
    return [
        {
            "kinesis": {
                "kinesisSchemaVersion": "1.0",
                "partitionKey": record["PartitionKey"],
                "sequenceNumber": record["SequenceNumber"],
                "data": base64.b64encode(record["Data"]).decode(),
                "approximateArrivalTimestamp": record["ApproximateArrivalTimestamp"].timestamp(),
            },
            "eventSource": "aws:kinesis",
            "eventVersion": "1.0",
            "eventID": f"{shard_id}:{record['SequenceNumber']}",
            "eventName": "aws:kinesis:record",
            "invokeIdentityArn": "arn:aws:iam::123456789012:role/lambda-role",
            "awsRegion": REGION,
            "eventSourceARN": f"arn:aws:kinesis:{REGION}:123456789012:stream/{stream}",
        }
        for record in received["Records"]
    ]


@dataclass
class EventSourceMapping:
    """An event source mapping with `ReportBatchItemFailures` and `BisectBatchOnFunctionError`.

    Attributes:
        batches: the sequence numbers of each batch sent, the repeated ones too.
        discarded: the records given up after `retry_attempts`; the on-failure destination gets their place.
    """

    function: Function
    batch_size: int = 100
    retry_attempts: int = 10
    batches: list[list[str]] = field(default_factory=list)
    discarded: list[Record] = field(default_factory=list)

    def read(self, records: Sequence[Record]) -> None:
        """Send the records of one shard, a batch after the other, each until it succeeds or is discarded."""
        for first in range(0, len(records), self.batch_size):
            self._send(records[first : first + self.batch_size], retries=self.retry_attempts)

    def _send(self, batch: Sequence[Record], *, retries: int) -> None:
        numbers = [record["kinesis"]["sequenceNumber"] for record in batch]
        self.batches.append(numbers)
        try:
            answer = self.function(json.loads(json.dumps({"Records": batch})))
        except Exception:  # noqa: BLE001 - a function error of any kind
            if len(batch) > 1:  # a split is no retry
                half = len(batch) // 2
                self._send(batch[:half], retries=retries)
                self._send(batch[half:], retries=retries)
                return
            failed = 0
        else:
            if not answer["batchItemFailures"]:
                return
            failed = min(numbers.index(each["itemIdentifier"]) for each in answer["batchItemFailures"])
        if retries == 0:
            self.discarded += batch[failed:]
            return
        self._send(batch[failed:], retries=retries - 1)
