"""PutRecords and ListShards: the calls, and what a transport of your own gets and returns."""

from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.transport.transport import KinesisTransport

__all__ = [
    "KinesisTransport",
    "PutRecordsAnswer",
    "PutRecordsEntry",
    "PutRecordsRequest",
    "RequestFailure",
    "Shard",
]
