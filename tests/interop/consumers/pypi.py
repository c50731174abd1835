"""PyPI's aws-kinesis-agg: how Lambda functions in Python de-aggregate.

Known fault, never asserted as right: a user record without an explicit hash key, in an aggregated
record in which another one has one, gets the first entry of that table.
"""

import base64
from collections.abc import Iterable
from importlib.metadata import version

from aws_kinesis_agg.deaggregator import iter_deaggregate_records

from tests.interop.consumers.user_records import ReadUserRecord
from tests.interop.streams import KinesisRecord

NAME = f"PyPI aws-kinesis-agg {version('aws-kinesis-agg')}"


def deaggregate(records: Iterable[KinesisRecord]) -> list[ReadUserRecord]:
    """Return the user records of `records`, in their order."""
    return [
        ReadUserRecord(
            partition_key=user_record["kinesis"]["partitionKey"],
            explicit_hash_key=user_record["kinesis"].get("explicitHashKey"),
            data=base64.b64decode(user_record["kinesis"]["data"]),
            aggregated=user_record["kinesis"].get("aggregated", False),
            shard_id=record.shard_id,
            sequence_number=record.sequence_number,
        )
        for record in records
        for user_record in iter_deaggregate_records([_lambda_event_record(record)])
    ]


def _lambda_event_record(record: KinesisRecord) -> dict[str, dict[str, str]]:
    return {
        "kinesis": {
            "kinesisSchemaVersion": "1.0",
            "sequenceNumber": record.sequence_number,
            "approximateArrivalTimestamp": "0",
            "partitionKey": record.partition_key,
            "data": base64.b64encode(record.data).decode(),
        }
    }
