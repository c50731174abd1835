"""The application of docs/howto/kcl.md: its commands, and the example's program and properties."""

import os
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import boto3

from tests.interop.consumers import pypi
from tests.interop.consumers.kcl import FIRST_RECORD_SECONDS, SMALL_AND_QUICK, in_a_test, lines_of
from tests.interop.consumers.user_records import ReadUserRecord
from tests.interop.emulators import Emulator
from tests.interop.streams import REGION, Stream
from tests.support.installation import Installed
from tests.support.processes import CREDENTIALS, OwnProcess, own_process

NAME = "amazon_kclpy 3.1.3, example"
EXAMPLES = Path(__file__).parents[3] / "examples" / "consumers"
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "kcl.md"
END_SECONDS = 30.0  # the daemon waits for the last checkpoints of the other shards


class OrderStorage:
    """One worker of the application, which can end and start again; its files are in `place`."""

    def __init__(self, stream: Stream, *, installed: Installed, leases: Emulator, place: Path) -> None:
        self.stream = stream
        self.database = place / "orders.sqlite"
        self._place = place
        self._log = place / "order-storage.log"
        self._log_before = 0
        self._leases = leases
        self._python = installed.kcl_python
        for name in ("kcl_orders.py", "kcl.properties"):
            shutil.copy(EXAMPLES / name, place)
        settings = {
            **in_a_test(stream, leases),
            "shutdownGraceMillis": 5000,  # after a processor's failure the daemon waits all of it
        }
        with (place / "kcl.properties").open("a") as properties:
            properties.write("\n" + lines_of(settings))  # the last value of a name counts
        self._running = ExitStack()
        self._process: OwnProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def start(self) -> None:
        """Start the daemon; its first record may take half a minute, by chance, if there are no leases yet."""
        self._running.close()
        self._log_before = self._log.stat().st_size if self._log.exists() else 0
        environment = {
            "PATH": f"{self._python.parent}{os.pathsep}{os.environ['PATH']}",
            "JAVA_TOOL_OPTIONS": " ".join(SMALL_AND_QUICK),
            "ORDERS_DATABASE": str(self.database),
        }
        command = ["/bin/sh", "-c", "\n".join(_commands())]
        self._process = self._running.enter_context(
            own_process("order-storage", command, environment=environment, logs=self._place)
        )

    def terminate(self) -> None:
        """Send SIGTERM to the daemon and its processors, as a supervisor does, and wait for their end."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGTERM)
        self.wait_until_ended()

    def wait_until_ended(self) -> int:
        """Return the daemon's exit status."""
        assert self._process is not None
        deadline = time.monotonic() + END_SECONDS
        while self._process.running:
            assert time.monotonic() < deadline, self._process.last_lines()
            time.sleep(0.05)
        return int(re.findall(r"sh ended with code (\d+)", self.log())[-1])

    def wait_until_caught_up(self) -> None:
        """Wait until the checkpoint of each shard is at its last user record; all records before it are stored."""
        last: dict[str, tuple[str, int]] = {}
        for record in pypi.deaggregate(self.stream.read()):
            number, sub = last.get(record.shard_id, ("", 0))
            last[record.shard_id] = record.sequence_number, sub + 1 if record.sequence_number == number else 0
        self._wait_until(lambda: all(self.checkpoint(shard_id) == last[shard_id] for shard_id in last), str(last))

    def wait_until_first_lease(self) -> None:
        """Wait until each open shard has its processor."""
        shards = {shard.shard_id for shard in self.stream.open_shards()}
        self._wait_until(lambda: shards == self._started_shards(), f"a processor for each of {shards}")

    def _started_shards(self) -> set[str]:
        return set(re.findall(r"^INFO:orders:shard (\S+) starts after", self.log(), re.MULTILINE))

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        assert self._process is not None
        self._process.wait_until(condition, what=what, seconds=FIRST_RECORD_SECONDS)

    def stored(self) -> list[ReadUserRecord]:
        """Return the orders of all shards, those of a shard in the order in which they were stored."""
        return [
            ReadUserRecord(key, None, data, aggregated=None, shard_id=shard_id, sequence_number=number)
            for key, data, shard_id, number in self._select(
                "SELECT customer, data, shard_id, number FROM orders ORDER BY rowid"
            )
        ]

    def rejected(self) -> list[bytes]:
        return [data for (data,) in self._select("SELECT data FROM rejected ORDER BY rowid")]

    def places(self, shard_id: str) -> list[tuple[str, int]]:
        """Return sequence and sub-sequence number of each order of a shard, in the order in which they were stored."""
        return self._select("SELECT number, sub FROM orders WHERE shard_id = ? ORDER BY rowid", shard_id)

    def checkpoint(self, shard_id: str) -> tuple[str, int]:
        """Return the sequence and sub-sequence number in the lease of a shard."""
        client = boto3.client(
            "dynamodb",
            region_name=REGION,
            endpoint_url=self._leases.endpoint_url,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        with closing(client):
            try:
                lease = client.get_item(TableName=self.stream.name, Key={"leaseKey": {"S": shard_id}})["Item"]
            except (client.exceptions.ResourceNotFoundException, KeyError):
                return "no lease yet", 0
        return lease["checkpoint"]["S"], int(lease["checkpointSubSequenceNumber"]["N"])

    def log(self) -> str:
        """Return the log of the daemon since its latest start."""
        return self._log.read_bytes()[self._log_before :].decode(errors="replace")

    def change(self, script: str) -> None:
        """Change the database, as what breaks it does."""
        with closing(sqlite3.connect(self.database, timeout=30)) as database:
            database.executescript(script)

    def _select(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(self.database, timeout=30)) as database:
            try:
                return database.execute(query, values).fetchall()
            except sqlite3.OperationalError:  # no table yet
                return []


def _commands() -> Iterator[str]:
    """Yield the commands of the page that start the daemon, after `pip` and `cd`."""
    for command in re.findall(r"^(?:JARS=|java ).*$", PAGE.read_text(), re.MULTILINE):
        # The daemon replaces the shell, so that its signals and its exit status are the shell's.
        yield f"exec {command}" if command.startswith("java ") else command
