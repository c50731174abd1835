"""kill -9 and SIGTERM at random instants, of a producer under load: no acknowledged record is lost."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kpl_core import Producer, decode
from kpl_core.testing import RecordError, When
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.chaos.load import STREAM, config
from tests.chaos.spooling_producer import MOST_OUTSTANDING
from tests.support.durability_scene import assert_invariant, assert_streams_add_up
from tests.support.metrics import Scrape, watched

ROOT = Path(__file__).parents[2]
# Delivered but not yet confirmed on disk at a kill: at most one commit of the spool.
MOST_UNMARKED = 2_000


def start(endpoint_url: str, path: Path, first: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.spooling_producer", endpoint_url, str(path), str(first)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def run_and_end(
    endpoint_url: str, path: Path, first: int, *, after: float, number: signal.Signals
) -> tuple[set[bytes], bytes]:
    """End the process `after` seconds of work; return the acknowledged records and its last line."""
    process = start(endpoint_url, path, first)
    assert process.stdout is not None
    with process, process.stdout as output:
        lines = [output.readline()]
        deadline = time.monotonic() + after
        while time.monotonic() < deadline:
            lines.append(output.readline())
        process.send_signal(number)
        lines += output.readlines()
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    return {line.split()[1] for line in lines if line.startswith(b"a ") and line.endswith(b"\n")}, lines[-1]


def consumed(kinesis: ThreadedLocalKinesis) -> Counter[bytes]:
    seen: Counter[bytes] = Counter()
    for stored in kinesis.call(lambda fake, _: list(fake.records(STREAM))):
        user_records = decode(stored.data)
        seen.update([stored.data] if user_records is None else [each.data for each in user_records])
    return seen


async def deliver_the_rest(endpoint_url: str, path: Path) -> None:
    metrics = PrometheusMetrics()
    async with Producer(config(endpoint_url, path, "write_ahead"), hooks=[metrics]) as producer:
        watched(producer, metrics)
        Scrape(metrics).assert_invariant()
        async with asyncio.timeout(60.0):
            while producer.report().spooled or producer.report().buffered:
                await asyncio.sleep(0.02)
                Scrape(metrics).assert_invariant()
        assert_invariant(producer.report())
        assert_streams_add_up(producer)
    Scrape(metrics).assert_invariant()


@pytest.mark.timeout(420)
def test_no_acknowledged_record_is_lost_after_fifty_kills(tmp_path: Path, is_short: bool, capsys) -> None:
    kills = 5 if is_short else 50
    chance = random.Random(os.environ.get("TESTS_CHAOS_SEED"))
    path = tmp_path / "spool.db"
    acknowledged: set[bytes] = set()
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as kinesis:
        kinesis.call(lambda fake, _: fake.faults.add(RecordError(), When(probability=0.05)))
        number = 0
        # A busy machine acknowledges fewer records before a kill; then there are more kills.
        while number < kills or len(acknowledged) <= kills * 20:
            assert number < 4 * kills, f"{len(acknowledged):,} acknowledged before {number} kills"
            newly, _ = run_and_end(
                kinesis.endpoint_url,
                path,
                number * 1_000_000,
                after=chance.uniform(0.0, 0.5),
                number=signal.SIGKILL,
            )
            acknowledged |= newly
            number += 1
        asyncio.run(deliver_the_rest(kinesis.endpoint_url, path))
        seen = consumed(kinesis)
    duplicates = sum(count - 1 for count in seen.values())
    with capsys.disabled():
        print(f"\n{number} kills: {len(acknowledged):,} acknowledged, {duplicates:,} delivered twice")  # noqa: T201
    assert not acknowledged - seen.keys()
    assert duplicates <= number * (MOST_OUTSTANDING + MOST_UNMARKED)


@pytest.mark.timeout(60)
def test_sigterm_under_load_delivers_or_spools_everything(tmp_path: Path) -> None:
    path = tmp_path / "spool.db"
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as kinesis:
        acknowledged, said = run_and_end(kinesis.endpoint_url, path, 0, after=0.5, number=signal.SIGTERM)
        assert said.startswith(b"closed ")
        assert b" 0 failed" in said
        assert b" 0 buffered" in said
        Scrape((tmp_path / "spool.db.metrics").read_text(encoding="utf-8")).assert_invariant()
        asyncio.run(deliver_the_rest(kinesis.endpoint_url, path))
        assert not acknowledged - consumed(kinesis).keys()
