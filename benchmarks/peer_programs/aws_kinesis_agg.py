"""aws-kinesis-agg with boto3: 50 KiB aggregated records, 20 a call, one call after the other.

Option `aggregators`: "per_shard" uses one aggregator for each shard (routing written here, MD5 and
bisect; the library has none), "one" uses a single one, as its README does, and so puts user records
into shards that do not hold their hash keys.
"""

from bisect import bisect_left
from hashlib import md5
from typing import Any

import boto3
from aws_kinesis_agg.aggregator import AggRecord, RecordAggregator
from botocore.config import Config

from benchmarks.trial import REGION, Trial
from benchmarks.workload import STREAM_NAME

_AGGREGATED_RECORD_BYTES = 51_200
_RECORDS_PER_CALL = 20


class AggregatingSender:
    """One aggregator per shard in front of one boto3 client."""

    def __init__(self, client: Any, *, is_per_shard: bool) -> None:  # noqa: ANN401 - boto3 makes its classes
        self._client = client
        shards = client.list_shards(StreamName=STREAM_NAME)["Shards"] if is_per_shard else []
        self._ends = [int(shard["HashKeyRange"]["EndingHashKey"]).to_bytes(16, "big") for shard in shards]
        self._aggregators = [RecordAggregator(_AGGREGATED_RECORD_BYTES) for _ in range(max(1, len(shards)))]
        self._full: list[AggRecord] = []
        self.acknowledged = 0

    def send(self, records: list[tuple[str, bytes]]) -> None:
        """Aggregate and send all of them."""
        aggregators, ends = self._aggregators, self._ends
        for key, data in records:
            shard = bisect_left(ends, md5(key.encode(), usedforsecurity=False).digest()) if ends else 0
            full = aggregators[shard].add_user_record(key, data)
            if full is not None:
                self._full.append(full)
                if len(self._full) == _RECORDS_PER_CALL:
                    self._call()
        for aggregator in aggregators:
            rest = aggregator.clear_and_get()
            if rest is not None:
                self._full.append(rest)
            if len(self._full) == _RECORDS_PER_CALL:
                self._call()
        if self._full:
            self._call()

    def _call(self) -> None:
        response = self._client.put_records(
            StreamName=STREAM_NAME,
            Records=[{"Data": full.get_contents()[2], "PartitionKey": full.get_partition_key()} for full in self._full],
        )
        for full, result in zip(self._full, response["Records"], strict=True):
            if "SequenceNumber" in result:
                self.acknowledged += full.get_num_user_records()
        self._full.clear()


def main() -> None:
    trial = Trial.from_command_line()
    client = boto3.client(
        "kinesis",
        region_name=REGION,
        endpoint_url=trial.endpoint_url,
        config=Config(retries={"total_max_attempts": 1}),
    )
    sender = AggregatingSender(client, is_per_shard=trial.options["aggregators"] == "per_shard")
    sender.send(trial.warm_up_records())
    sender.acknowledged = 0
    records = trial.measured_records()
    with trial.measured():
        sender.send(records)
    trial.finish(acknowledged=sender.acknowledged, distributions=("aws-kinesis-agg", "boto3", "botocore", "protobuf"))


if __name__ == "__main__":
    main()
