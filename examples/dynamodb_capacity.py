"""Twenty threads write to a DynamoDB table and stay within a shared limit of units a second.

In production every process has a `DistributedRateWorker` and one has a `DistributedRateAggregator`. They synchronize
through S3:

    pip install kpl-integrations boto3
    TABLE=my-table BUCKET=my-bucket python examples/dynamodb_capacity.py

Without TABLE the example sends nothing and uses fake answers, in which each write costs one unit.
"""

import os
import threading
import time
from contextlib import ExitStack
from typing import Any

import boto3
from botocore.awsrequest import AWSResponse, HeadersDict

from kpl_integrations.dynamodb_limits import DistributedRateAggregator, DistributedRateWorker, SessionLimiter

WRITES_PER_SECOND = 100
SECONDS = 3.0
THREADS = 20


class _Body:
    def stream(self, **_: object) -> list[bytes]:
        """Return the answer of a table to a write."""
        return [b'{"ConsumedCapacity": {"TableName": "orders", "CapacityUnits": 1.0}}']


def fake_answer(request: Any, **_: object) -> AWSResponse:  # noqa: ANN401 - botocore's own
    """Return a fake answer instead of sending the request."""
    headers: Any = HeadersDict()
    return AWSResponse(request.url, 200, headers, _Body())


def limited(session: Any, bucket: str | None, running: ExitStack) -> SessionLimiter:  # noqa: ANN401
    """Limit the session, together with all processes that use the bucket, or alone."""
    if bucket is None:
        limiter = SessionLimiter(read_rate=WRITES_PER_SECOND, write_rate=WRITES_PER_SECOND, burst_seconds=0.1)
        limiter.attach(session)
        return limiter
    running.callback(DistributedRateAggregator(session, bucket, "capacity/orders").stop)
    worker = DistributedRateWorker(
        session,
        bucket,
        "capacity/orders",
        aggregate_max_write_rate=WRITES_PER_SECOND,
        worker_max_write_rate=WRITES_PER_SECOND / 2,
    )
    running.callback(worker.stop)
    return worker.limiter


def main() -> None:
    """Write from many threads for some seconds."""
    table, bucket = os.environ.get("TABLE"), os.environ.get("BUCKET")
    own: dict[str, Any] = (
        {} if table else {"region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}
    )
    session = boto3.Session(**own)
    with ExitStack() as running:
        limiter = limited(session, bucket, running)
        client = session.client("dynamodb")
        if table is None:
            client.meta.events.register("before-send.dynamodb", fake_answer)
        end = time.monotonic() + SECONDS

        def write(thread: int) -> None:
            number = 0
            while time.monotonic() < end:
                number += 1
                client.put_item(TableName=table or "orders", Item={"id": {"S": f"{thread}-{number}"}})

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        written = limiter.totals()[1]
    print(f"{written:.0f} write units in {SECONDS:.0f} s, at {limiter.rates[1]:.0f} a second")


if __name__ == "__main__":
    main()
