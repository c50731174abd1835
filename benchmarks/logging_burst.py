"""python -m benchmarks.logging_burst: log as fast as possible to a healthy endpoint, beside the alternatives.

Lines of 210 bytes in a tight loop, then the program ends. The endpoint is a local Kinesis of 16 shards with the limits
of the service, or for watchtower a CloudWatch Logs that accepts everything. `cold` starts with the first line, `warm`
after one that has arrived. Emit is the time of a call, and memory the most that the process grew by. The exit time is
from the last line of code to the end of the process.
"""

# ruff: noqa: PLC0415 - each process imports only the one it measures

import argparse
import atexit
import gzip
import json
import logging
import logging.handlers
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from benchmarks.logging_exit import resident_bytes, settled_bytes
from kpl_core import decode
from kpl_core.testing import FakeKinesis
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

TEXT: Final = "x" * 200
MIB: Final = 1024 * 1024


def _kinesis_handler(url: str, **options: Any) -> logging.Handler:  # noqa: ANN401 - any option
    from kpl_integrations.logging_handler import KinesisHandler

    return KinesisHandler("logs", region="us-east-1", endpoint_url=url, **options)


class _PutRecordsHandler(logging.Handler):
    """Sends 500 lines in a PutRecords request, and what the service refuses once more."""

    def __init__(self, url: str) -> None:
        import boto3

        super().__init__()
        self._client = boto3.client("kinesis", region_name="us-east-1", endpoint_url=url)
        self._records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = json.dumps({"time": record.created, "level": record.levelname, "message": record.getMessage()})
        self._records.append({"Data": line.encode(), "PartitionKey": str(record.created)})
        if len(self._records) == 500:
            self.flush()

    def flush(self) -> None:
        while self._records:
            entries = self._client.put_records(StreamName="logs", Records=self._records)["Records"]
            self._records = [
                record for record, entry in zip(self._records, entries, strict=True) if "ErrorCode" in entry
            ]


def _queue_handler(url: str) -> logging.Handler:
    lines: queue.Queue[Any] = queue.Queue(-1)
    target = _PutRecordsHandler(url)
    listener = logging.handlers.QueueListener(lines, target)
    listener.start()
    atexit.register(target.flush)
    atexit.register(listener.stop)
    return logging.handlers.QueueHandler(lines)


def _watchtower(url: str) -> logging.Handler:
    import boto3
    import watchtower

    client = boto3.client("logs", region_name="us-east-1", endpoint_url=url)
    return watchtower.CloudWatchLogHandler(
        log_group_name="g", log_stream_name="s", boto3_client=client, create_log_group=False, create_log_stream=False
    )


HANDLERS: Final[dict[str, Callable[[str], logging.Handler]]] = {
    "null": lambda _url: logging.NullHandler(),
    "KinesisHandler": _kinesis_handler,
    "KinesisHandler, max_queue_bytes 256 MiB": lambda url: _kinesis_handler(url, max_queue_bytes=256 * MIB),
    "KinesisHandler, block(60)": lambda url: _kinesis_handler(url, overflow="block(60)"),
    "QueueHandler + boto3": _queue_handler,
    "watchtower": _watchtower,
}


def program(name: str, url: str, count: int, *, is_warm: bool) -> None:
    """Log, then end."""
    said: dict[str, float] = {}

    def say() -> None:
        # Not `ru_maxrss`, which counts the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        said["grew"] += int(status.partition("VmHWM:")[2].split()[0]) * 1024
        print(json.dumps(said), flush=True)

    # The function registered first runs last, and logging registered its shutdown when it was imported.
    atexit.unregister(logging.shutdown)
    atexit.register(say)
    atexit.register(logging.shutdown)
    handler = HANDLERS[name](url)
    logger = logging.getLogger("program")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    before = resident_bytes()
    if is_warm:
        logger.info("warm")
        handler.flush()
        before = settled_bytes()
    started = time.perf_counter()
    for number in range(count):
        logger.info("%09d %s", number, TEXT)
    said.update(emit_us=(time.perf_counter() - started) / count * 1e6, ended_at=time.time(), grew=-before)


class _CloudWatchLogs(BaseHTTPRequestHandler):
    """Counts the events of PutLogEvents."""

    counts: Final[list[int]] = []
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.counts.append(len(json.loads(body).get("logEvents", [])))
        answer = b'{"nextSequenceToken": "1", "logStreams": [], "logGroups": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def _endpoint(name: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield the URL of the endpoint, and a function that returns how many lines have arrived."""
    if name != "watchtower":
        with ThreadedLocalKinesis(LocalKinesis({"logs": 16})) as kinesis:
            yield kinesis.endpoint_url, lambda: kinesis.call(_stored_count)
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), _CloudWatchLogs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _CloudWatchLogs.counts.clear()
        yield f"http://127.0.0.1:{server.server_address[1]}", lambda: sum(_CloudWatchLogs.counts)
        server.shutdown()


def _stored_count(fake: FakeKinesis, _now: float) -> int:
    inside = [decode(stored.data) for stored in fake.records("logs")]
    return sum(1 if records is None else len(records) for records in inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", nargs=4, metavar=("HANDLER", "URL", "COUNT", "START"))
    arguments = parser.parse_args()
    if arguments.program:
        name, url, count, start = arguments.program
        program(name, url, int(count), is_warm=start == "warm")
        return
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "NO_PROXY": "127.0.0.1"}
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print("| lines | start | handler | arrived | emit, us | memory grew by, MB | exit, s |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for count, start in ((100_000, "cold"), (100_000, "warm"), (500_000, "cold"), (500_000, "warm")):
        for name in HANDLERS:
            with _endpoint(name) as (url, arrived_count):
                command = [sys.executable, "-m", "benchmarks.logging_burst", "--program", name, url, str(count), start]
                ran = subprocess.run(command, env={**os.environ, **keys}, stdout=subprocess.PIPE, text=True, check=True)
                exit_at = time.time()
                said, arrived = json.loads(ran.stdout), max(0, arrived_count() - (start == "warm"))
            share = "" if name == "null" else f"{arrived / count:.1%}"
            print(
                f"| {count:,} | {start} | {name} | {share} | {said['emit_us']:.1f} | {said['grew'] / 1e6:.0f} "
                f"| {exit_at - said['ended_at']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
