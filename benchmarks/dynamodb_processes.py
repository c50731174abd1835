"""Twenty real processes that share the write capacity of one DynamoDB table by leases in a folder, in real time.

python -m benchmarks.dynamodb_processes                 about two minutes

The table is a server on loopback that answers PutItem, and refuses what is above its capacity as DynamoDB does. All
processes start at once, write as fast as they may, are idle, and write again. In the end one of them is killed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from kpl_core.pipeline.token_bucket import TokenBucket

WORKERS: Final = 20
UNITS_PER_SECOND: Final = 200.0
INTERVAL: Final = 2.0
THREADS: Final = 3
# Seconds after the start: idle from, busy again from, one process killed at, the end.
IDLE, BURST, KILL, END = 16.0, 36.0, 46.0, 56.0
# The slowest process needs this long to import its packages.
START_SECONDS: Final = 45.0


class Table:
    """Counts the calls, and refuses those above the capacity. Its burst is one second."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bucket = TokenBucket([(UNITS_PER_SECOND, UNITS_PER_SECOND)])
        self.calls: list[tuple[float, bool]] = []

    def take(self) -> bool:
        """Return True if a call may be executed."""
        with self.lock:
            accepted = self.bucket.try_take((1.0,))
            self.calls.append((time.time(), accepted))
        return accepted

    def rate(self, start: float, end: float) -> float:
        """Return the calls between two instants as a share of the capacity."""
        return sum(start <= at < end for at, _ in self.calls) / ((end - start) * UNITS_PER_SECOND)

    def refused(self, start: float, end: float) -> float:
        """Return the share of refused calls between two instants."""
        accepted = [accepted for at, accepted in self.calls if start <= at < end]
        return accepted.count(False) / max(1, len(accepted))


def _handler(table: Table) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer: dict[str, object] = {"ConsumedCapacity": {"TableName": "t", "CapacityUnits": 1.0}}
            accepted = table.take()
            if not accepted:
                answer = {"__type": "com.amazonaws.dynamodb#ProvisionedThroughputExceededException", "message": "slow"}
            body = json.dumps(answer).encode()
            self.send_response(200 if accepted else 400)
            self.send_header("Content-Type", "application/x-amz-json-1.0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return Handler


def _work(endpoint_url: str, folder: str, begins: float) -> None:
    import anyio  # noqa: PLC0415 - in the worker's process only
    import boto3  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415
    from botocore.exceptions import ClientError  # noqa: PLC0415

    from kpl_core.coordination.stores import open_store  # noqa: PLC0415
    from kpl_integrations.dynamodb_limits import DistributedRateWorker  # noqa: PLC0415

    session = boto3.Session(region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")  # noqa: S106
    store = anyio.run(open_store, f"file://{folder}/store")
    worker = DistributedRateWorker(
        session,
        "unused",
        "unused",
        aggregate_max_write_rate=UNITS_PER_SECOND,
        worker_max_write_rate=UNITS_PER_SECOND,
        sync_interval=INTERVAL,
        max_workers=WORKERS,
        store=store,
        autostart=False,
    )
    client = session.client("dynamodb", endpoint_url=endpoint_url, config=Config(retries={"total_max_attempts": 1}))

    def press(start: float, end: float) -> None:
        time.sleep(max(0.0, start - time.time()))
        while time.time() < end:
            try:
                client.put_item(TableName="t", Item={"id": {"S": "1"}})
            except ClientError:
                continue

    time.sleep(max(0.0, begins - time.time()))
    worker.start()
    for start, end in ((begins, begins + IDLE), (begins + BURST, begins + END)):
        threads = [threading.Thread(target=press, args=(start, end), daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    worker.stop()


def measure() -> dict[str, float]:
    """Run the processes; return the figures."""
    table = Table()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(table))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    begins = time.time() + START_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-m", "benchmarks.dynamodb_processes", "--worker", url, folder, str(begins)]
        processes = [subprocess.Popen(command, env=os.environ | {"NO_PROXY": "127.0.0.1"}) for _ in range(WORKERS)]
        try:
            time.sleep(begins + KILL - time.time())
            processes[0].kill()
            for process in processes:
                process.wait(timeout=60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    server.shutdown()

    def windows(start: float, end: float) -> list[float]:
        count = int((end - start - 1.0) * 4) + 1
        return [table.rate(begins + start + step / 4, begins + start + step / 4 + 1.0) for step in range(count)]

    return {
        "cold start, most in a second": max(windows(0.0, 3 * INTERVAL)),
        "steady, mean": table.rate(begins + 3 * INTERVAL, begins + IDLE),
        "steady, refused": table.refused(begins + 3 * INTERVAL, begins + IDLE),
        "burst, most in a second": max(windows(BURST, BURST + 3 * INTERVAL)),
        "burst, second second": table.rate(begins + BURST + 1.0, begins + BURST + 2.0),
        "after a kill, mean": table.rate(begins + KILL + 2 * INTERVAL, begins + END),
        "after a kill, most in a second": max(windows(KILL, END)),
        "refused in all": table.refused(begins, begins + END),
    }


def main() -> int:
    parser = argparse.ArgumentParser("dynamodb_processes", description=__doc__)
    parser.add_argument("--worker", nargs=3, metavar=("ENDPOINT", "FOLDER", "BEGINS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        endpoint_url, folder, begins = arguments.worker
        _work(endpoint_url, folder, float(begins))
        return 0
    for name, value in measure().items():
        print(f"{name}: {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
