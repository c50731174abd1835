"""Streams on an emulator: create, reshard, and read every Kinesis record back, by stock boto3."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import md5
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config as BotocoreConfig

from tests.interop.emulators import Emulator
from tests.support.processes import CREDENTIALS
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

REGION = CREDENTIALS["AWS_REGION"]
ACTIVE_SECONDS = 20.0
EMPTY_PAGES_AT_THE_END = 2  # an iterator may show one empty page where records still follow


@dataclass(frozen=True)
class Shard:
    """One shard, open or closed, and its range of hash keys, both ends included."""

    shard_id: str
    starting_hash_key: int
    ending_hash_key: int
    is_open: bool

    def takes(self, hash_key: int) -> bool:
        return self.starting_hash_key <= hash_key <= self.ending_hash_key


@dataclass(frozen=True)
class KinesisRecord:
    """A Kinesis record as GetRecords returned it. (It does not include the explicit hash key.)"""

    shard_id: str
    sequence_number: str
    partition_key: str
    data: bytes


def hash_key(partition_key: str, explicit_hash_key: str | None = None) -> int:
    """Compute the hash key as the service does; an independent implementation, so that it can disagree with ours."""
    if explicit_hash_key is not None:
        return int(explicit_hash_key)
    return int(md5(partition_key.encode(), usedforsecurity=False).hexdigest(), 16)


@contextmanager
def kinesis_client(emulator: Emulator) -> "Iterator[KinesisClient]":
    """Return a stock boto3 client for an emulator, without retries of its own."""
    client = boto3.client(
        "kinesis",
        region_name=REGION,
        endpoint_url=emulator.endpoint_url,
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=BotocoreConfig(retries={"total_max_attempts": 1}, read_timeout=30),
    )
    try:
        yield client
    finally:
        client.close()


class Stream:
    """A fresh stream on an emulator."""

    def __init__(self, emulator: Emulator, client: "KinesisClient", *, shards: int) -> None:
        self.emulator = emulator
        self.name = f"interop-{uuid.uuid4().hex[:12]}"
        self._client = client
        client.create_stream(StreamName=self.name, ShardCount=shards)
        self._wait_until_active()

    def __str__(self) -> str:
        return f"{self.name} on {self.emulator}"

    @property
    def arn(self) -> str:
        return self._client.describe_stream_summary(StreamName=self.name)["StreamDescriptionSummary"]["StreamARN"]

    def delete(self) -> None:
        self._client.delete_stream(StreamName=self.name)

    def shards(self) -> tuple[Shard, ...]:
        """Return all shards, closed ones too, by their starting hash key."""
        found: list[Shard] = []
        page = self._client.list_shards(StreamName=self.name)
        while True:
            found += [
                Shard(
                    shard_id=shard["ShardId"],
                    starting_hash_key=int(shard["HashKeyRange"]["StartingHashKey"]),
                    ending_hash_key=int(shard["HashKeyRange"]["EndingHashKey"]),
                    is_open="EndingSequenceNumber" not in shard["SequenceNumberRange"],
                )
                for shard in page["Shards"]
            ]
            if "NextToken" not in page:
                return tuple(sorted(found, key=lambda shard: (shard.starting_hash_key, shard.shard_id)))
            page = self._client.list_shards(NextToken=page["NextToken"])

    def open_shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards() if shard.is_open)

    def shard(self, shard_id: str) -> Shard:
        (found,) = (shard for shard in self.shards() if shard.shard_id == shard_id)
        return found

    def split(self, shard: Shard) -> None:
        """Split an open shard in the middle, and wait until the stream is active again."""
        middle = (shard.starting_hash_key + shard.ending_hash_key + 1) // 2
        self._client.split_shard(StreamName=self.name, ShardToSplit=shard.shard_id, NewStartingHashKey=str(middle))
        self._wait_until_active()

    def merge(self, shard: Shard, adjacent: Shard) -> None:
        """Merge two adjacent open shards, and wait until the stream is active again."""
        self._client.merge_shards(
            StreamName=self.name, ShardToMerge=shard.shard_id, AdjacentShardToMerge=adjacent.shard_id
        )
        self._wait_until_active()

    def update_shard_count(self, count: int) -> None:
        self._client.update_shard_count(StreamName=self.name, TargetShardCount=count, ScalingType="UNIFORM_SCALING")
        self._wait_until_active()

    def accept_records_of(self, record_bytes: int) -> None:
        """Raise the largest record of the stream (partition key and data together)."""
        self._client.update_max_record_size(StreamARN=self.arn, MaxRecordSizeInKiB=record_bytes // 1024)
        self._wait_until_active()

    def put_records(self, records: list[tuple[str, str, bytes]]) -> None:
        """Put (partition key, explicit hash key, data) in one stock request; every record has to succeed."""
        answer = self._client.put_records(
            StreamName=self.name,
            Records=[
                {"PartitionKey": partition_key, "ExplicitHashKey": explicit_hash_key, "Data": data}
                for partition_key, explicit_hash_key, data in records
            ],
        )
        assert not answer.get("FailedRecordCount"), answer

    def read(self) -> list[KinesisRecord]:
        """Return every Kinesis record of every shard, closed ones too, in the shard's order."""
        return [record for shard in self.shards() for record in self._read_shard(shard.shard_id)]

    def _read_shard(self, shard_id: str) -> Iterator[KinesisRecord]:
        iterator: str | None = self._client.get_shard_iterator(
            StreamName=self.name, ShardId=shard_id, ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        empty_pages = 0
        while iterator and empty_pages < EMPTY_PAGES_AT_THE_END:
            page = self._client.get_records(ShardIterator=iterator)
            for record in page["Records"]:
                yield KinesisRecord(shard_id, record["SequenceNumber"], record["PartitionKey"], record["Data"])
            empty_pages = 0 if page["Records"] else empty_pages + 1
            iterator = page.get("NextShardIterator")

    def _wait_until_active(self) -> None:
        def status() -> str:
            summary = self._client.describe_stream_summary(StreamName=self.name)
            return summary["StreamDescriptionSummary"]["StreamStatus"]

        wait_until(lambda: status() == "ACTIVE", f"{self} to become active", seconds=ACTIVE_SECONDS)


@contextmanager
def fresh_stream(emulator: Emulator, *, shards: int) -> Iterator[Stream]:
    """Create a stream for one test, because an emulator slows down with the contents of a stream."""
    with kinesis_client(emulator) as client:
        stream = Stream(emulator, client, shards=shards)
        yield stream
        stream.delete()
