"""Run LocalKinesis in its own process, which reports stored and throttled records over its standard input.

So producer and service share neither interpreter nor clock, as in production.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import pin_to
from kpl_core import decode
from kpl_core.testing import ErrorAnswer, FakeKinesis, ServiceLimits
from kpl_integrations.local_kinesis import LocalKinesis

__all__ = ["STREAM_NAME", "WatchedKinesis", "watched_kinesis"]

STREAM_NAME = "pressed"
_STOP_TIMEOUT_SECONDS = 10


class WatchedKinesis:
    """The running service, as its parent process sees it."""

    def __init__(self, process: "subprocess.Popen[str]", endpoint_url: str) -> None:
        self._questions, self._answers = _pipes(process)
        self.endpoint_url = endpoint_url

    def ask(self, question: str) -> dict[str, Any]:
        """Return "counters" (records and bytes so far) or "contents" (user records of the stream, decoded).

        Or switch a fault on: "fail" (every answer is a 500), "refuse" (connections), "heal".
        """
        print(question, file=self._questions, flush=True)
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer


def _pipes(process: "subprocess.Popen[str]") -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@contextmanager
def watched_kinesis(*, shards: int, enforce_limits: bool, retention_seconds: float, cpu: int | None) -> Iterator[Any]:
    """Run the service on core `cpu`; it stops when its standard input closes, so it cannot outlive this process."""
    task = {"shards": shards, "enforce_limits": enforce_limits, "retention_seconds": retention_seconds, "cpu": cpu}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.watched_kinesis", json.dumps(task)],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        questions, answers = _pipes(process)
        try:
            endpoint_url = answers.readline().strip()
            if not endpoint_url:
                message = "the service stopped before it listened; its error is above"
                raise RuntimeError(message)
            yield WatchedKinesis(process, endpoint_url)
        finally:
            questions.close()
            try:
                process.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


async def _serve(task: dict[str, Any]) -> None:
    pin_to(task["cpu"])
    kinesis = LocalKinesis(
        {STREAM_NAME: task["shards"]},
        enforce_limits=task["enforce_limits"],
        limits=ServiceLimits(retention_seconds=task["retention_seconds"]),
    )
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with kinesis:
        print(kinesis.endpoint_url, flush=True)
        while question := (await reader.readline()).decode().strip():
            await _make_trouble(question, kinesis)
            print(json.dumps(_answer(question, kinesis.fake, kinesis.now)), flush=True)


async def _make_trouble(kind: str, kinesis: LocalKinesis) -> None:
    if kind == "fail":
        kinesis.faults.add(ErrorAnswer("InternalFailure"))
    elif kind == "refuse":
        kinesis.refuse_connections()
    elif kind == "heal":
        kinesis.faults.clear()
        await kinesis.accept_connections()


def _answer(question: str, fake: FakeKinesis, now: float) -> dict[str, Any]:
    if question != "contents":
        return {**asdict(fake.statistics(STREAM_NAME)), "at": now}
    records = fake.records(STREAM_NAME)
    decoded: list[Sequence[Any]] = [decode(record.data) or (record,) for record in records]
    user_records = [(each.partition_key, bytes(each.data)) for group in decoded for each in group]
    return {"kinesis_records": len(records), "user_records": len(user_records), "distinct": len(set(user_records))}


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
