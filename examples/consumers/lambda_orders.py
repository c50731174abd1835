"""Store the orders of a Kinesis stream in DynamoDB: an AWS Lambda function, for records that are aggregated or not.

docs/howto/lambda.md says how to deploy it. `ORDERS_TABLE` names a table with the partition key `id`, a string.
"""

import json
import logging
import os
from typing import Any

import boto3

from kpl_core import ReceivedRecord, user_records

LONGEST_KEY_BYTES = 2048  # of DynamoDB
MOST_DATA_BYTES = 390_000  # of an item with 400 KB
log = logging.getLogger("orders")
log.setLevel(logging.INFO)
dynamodb = boto3.client("dynamodb")
table = os.environ["ORDERS_TABLE"]


def id_of(record: ReceivedRecord) -> str | None:
    """Return the id of an order; None if the record is not an order, or DynamoDB does not accept the id as a key."""
    try:
        order_id = str(json.loads(record.decompressed)["id"])
        key_bytes = len(order_id.encode())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return order_id if 0 < key_bytes <= LONGEST_KEY_BYTES else None


def store(record: ReceivedRecord) -> None:
    """Store a user record, unless its order is stored already."""
    order_id, data = id_of(record), record.data
    if order_id is None or len(data) > MOST_DATA_BYTES:
        # It would fail each time, and block its shard. So keep it where a person finds it.
        order_id = f"rejected {record.shard_id} {record.sequence_number} {record.sub_sequence_number}"
        data = data[:MOST_DATA_BYTES]
    try:
        dynamodb.put_item(
            TableName=table,
            Item={"id": {"S": order_id}, "customer": {"S": record.partition_key}, "data": {"B": data}},
            ConditionExpression="attribute_not_exists(id)",
        )
    except dynamodb.exceptions.ConditionalCheckFailedException:
        log.info("order %s is stored already", order_id)


def handler(event: dict[str, Any], _context: object) -> dict[str, list[dict[str, str]]]:
    """Store the records in their order. Report the first Kinesis record that fails: Lambda repeats from there."""
    for kinesis_record in event["Records"]:
        try:
            for record in user_records(kinesis_record):
                store(record)
        except Exception:
            number = kinesis_record["kinesis"]["sequenceNumber"]
            log.exception("Kinesis record %s failed", number)
            return {"batchItemFailures": [{"itemIdentifier": number}]}
    return {"batchItemFailures": []}
