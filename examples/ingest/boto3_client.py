"""Use boto3 with the gateway: change endpoint_url, and with tenants the keys. Resend throttled records.

    kpl serve --local
    python examples/ingest/boto3_client.py http://127.0.0.1:8080 demo

`aws_access_key_id` and the secret are a tenant's (`kpl keys sigv4`). With --local any pair works.
"""

import os
import random
import sys
import time
from typing import Any

import boto3


def main() -> None:
    """Put 1,000 records and print where they are stored."""
    endpoint_url, stream = sys.argv[1:] or ["http://127.0.0.1:8080", "demo"]
    client = boto3.client(
        "kinesis",
        endpoint_url=endpoint_url,
        region_name="eu-west-1",
        aws_access_key_id=os.environ.get("GATEWAY_ACCESS_KEY_ID", "local"),
        aws_secret_access_key=os.environ.get("GATEWAY_SECRET_ACCESS_KEY", "local"),
    )
    shards: set[str] = set()
    kinesis_records: set[str] = set()
    numbers = range(1_000)
    for start in range(0, len(numbers), 500):
        waiting: list[Any] = [
            {"PartitionKey": f"user-{n}", "Data": b"event %d" % n} for n in numbers[start : start + 500]
        ]
        for attempt in range(1, 20):
            answer = client.put_records(StreamName=stream, Records=waiting)
            results = list(zip(waiting, answer["Records"], strict=True))
            shards |= {entry["ShardId"] for _, entry in results if "ShardId" in entry}
            kinesis_records |= {entry["SequenceNumber"] for _, entry in results if "SequenceNumber" in entry}
            waiting = [record for record, entry in results if "ErrorCode" in entry]
            if not waiting:
                break
            time.sleep(random.uniform(0, min(5, 0.05 * 2**attempt)))  # noqa: S311 - jitter, no secret
        else:
            sys.exit(f"{len(waiting)} records are still throttled")
    print(f"1,000 records are in {len(kinesis_records)} Kinesis records on {len(shards)} shards")


main()
