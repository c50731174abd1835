"""Orphaned spools of `kpl serve --workers`: a process of its own drains each, and is no worker once it has ended."""

import re
import signal
from pathlib import Path

import pytest

from kpl_core.testing import When
from tests.cli.conftest import Stream
from tests.cli.test_serve_workers import OUTAGE, Gateway, accounts, gateway, stored
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_an_orphaned_spool_is_drained(stream, tmp_path, monkeypatch):
    monkeypatch.setenv("KPL_INGEST_CLOSE_SECONDS", "0.5")
    options = ("--local", "--spool", str(tmp_path / "spool.db"))
    with (
        stream.fault(OUTAGE, When(operation="PutRecords")),
        gateway(stream, *options, workers=3) as running,
    ):
        given = running.post_to_all(stream, "orphaned", ack="spooled", workers=3)
        assert running.end(signal.SIGTERM) == 0
        assert f"{len(given):,} spooled" in running.serve.stderr.read()
    with gateway(stream, *options) as running:
        wait_until(lambda: set(given) <= set(stored(stream)), "the records of the orphaned spool")
        assert running.end(signal.SIGTERM) == 0


def parts(running: Gateway) -> set[float]:
    """Return how many processes each part counts."""
    counts: dict[str, float] = {}
    metrics = running.ask("GET", "/metrics")[1].decode()
    for part, count in re.findall(r'^kinesis_ingest_part{part="(\w+)",.*} (\S+)$', metrics, re.MULTILINE):
        counts[part] = counts.get(part, 0.0) + float(count)
    return set(counts.values())


def leave_spooled(stream: Stream, options: tuple[str, ...], workers: int) -> list[str]:
    """Run a gateway in an outage; return the records that its spools have then."""
    with stream.fault(OUTAGE, When(operation="PutRecords")), gateway(stream, *options, workers=workers) as running:
        if workers > 1:
            given = running.post_to_all(stream, "left", ack="spooled", workers=workers)
        else:
            given = [f"left {number}" for number in range(100)]
            assert running.post(stream, given, ack="spooled") == 202
        assert running.end(signal.SIGTERM) == 0
    return given


@pytest.mark.parametrize(("workers", "orphaned"), [(1, ["spool.db"]), (4, ["spool-2.db", "spool-3.db"])])
def test_a_drainer_that_has_ended_is_no_worker_and_its_counts_stay(stream, tmp_path, monkeypatch, workers, orphaned):
    monkeypatch.setenv("KPL_INGEST_CLOSE_SECONDS", "0.5")
    spool: Path = tmp_path / "spool.db"
    options = ("--local", "--spool", str(spool))
    given = leave_spooled(stream, options, workers)
    with gateway(stream, *options) as running:

        def is_drained() -> bool:
            stats = running.stats()
            return list(stats["workers"]) == ["0", "1"] and stats["records"]["delivered"] == len(given)

        wait_until(is_drained, "the drainers to end")
        assert running.stats()["records"]["accepted"] == len(given)
        assert running.counters()["kinesis_producer_accepted_records_total"] == len(given)
        assert parts(running) == {2.0}
        assert running.end(signal.SIGTERM) == 0
        said = running.serve.stderr.read()
    assert accounts(said) == (len(given), len(given))
    for name in orphaned:
        assert f"the drainer of {tmp_path / name}: gateway closed: " in said
    assert set(given) <= set(stored(stream))
