"""kill -9 at any instant: what was acknowledged is there, in order, and what was confirmed hardly ever is.

Real processes in real time, a few seconds; the longer series belongs to the chaos suite.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kpl_core.durability.spool import Spool, SpoolOptions

KILLS = 6
ROOT = Path(__file__).parents[3]


def spool_and_kill(path: Path, first: int, *, after: float) -> tuple[set[int], set[int], int]:
    """Let a process spool and kill it `after` seconds of work; return acknowledged, confirmed, next number."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.durability.spool.spooling_process", str(path), str(first)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        lines = [output.readline()]
        deadline = time.monotonic() + after
        while time.monotonic() < deadline:
            lines.append(output.readline())
        process.send_signal(signal.SIGKILL)
        lines += output.readlines()
    assert process.returncode == -signal.SIGKILL
    numbers: dict[bytes, set[int]] = {b"a": set(), b"c": set()}
    for line in lines:
        letter, start, count = line.split()
        numbers[letter].update(range(int(start), int(start) + int(count)))
    return numbers[b"a"], numbers[b"c"], max(numbers[b"a"]) + 100_000


@pytest.mark.long
def test_no_acknowledged_record_is_lost_after_any_kill(tmp_path: Path) -> None:
    path = tmp_path / "spool.db"
    chance = random.Random(os.environ.get("SPOOL_KILL_SEED"))
    acknowledged: set[int] = set()
    confirmed: set[int] = set()
    number = 0
    for _ in range(KILLS):
        newly_acknowledged, newly_confirmed, number = spool_and_kill(path, number, after=chance.uniform(0.0, 0.3))
        acknowledged |= newly_acknowledged
        confirmed |= newly_confirmed
        with Spool(SpoolOptions(path=path, max_bytes=1 << 30)) as spool:
            claimed = spool.claim_backlog_nowait(10_000_000, max_bytes=1 << 30).result(30.0)
            present = [int(each.record.data) for each in claimed]
            assert spool.statistics().damaged_records == 0
        assert acknowledged - confirmed <= set(present)
        assert len(present) == len(set(present))
        assert present == sorted(present)
        # Confirmed, but killed before the confirmation was committed: at most one commit's worth.
        assert len(confirmed & set(present)) <= KILLS * 2_000
    assert len(acknowledged) > KILLS * 7


def test_a_spool_killed_while_it_commits_opens_again_without_repair(tmp_path: Path) -> None:
    path = tmp_path / "spool.db"
    first_acknowledged, first_confirmed, _ = spool_and_kill(path, 0, after=0.05)
    # Killed again before its write-ahead log was ever checkpointed.
    acknowledged, confirmed, _ = spool_and_kill(path, 1_000_000, after=0.0)
    with Spool(SpoolOptions(path=path)) as spool:
        claimed = spool.claim_backlog_nowait(1_000_000, max_bytes=1 << 30).result(30.0)
    present = {int(each.record.data) for each in claimed}
    assert first_acknowledged - first_confirmed <= present
    assert acknowledged - confirmed <= present
