"""`kpl coordinate`: a summary for workers that share a folder."""

import json
import os
import signal
from pathlib import Path

import anyio
import pytest

from kpl_core.coordination.lease_sync import REPORT_PREFIX, SUMMARY_NAME
from kpl_core.coordination.store_objects import Claim, Summary, WorkerReport, decode, encode
from kpl_core.coordination.stores.file import FileStore
from tests.support.kpl_process import started


def own_folder(folder: Path) -> Path:
    """Create the subfolder that the store keeps its files in."""
    own = folder / f"kpl-{os.geteuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def report_of(folder: Path, worker_id: str) -> None:
    claims = {"orders/shard-0": Claim((100.0, 1e5), (0.1, 1.0), (1_000.0, 1e6))}
    store = FileStore(folder)

    async def write() -> None:
        at = (await store.read("nothing")).at
        report = WorkerReport(worker_id=worker_id, written_at=at, generation=0, claims=claims, max_workers=4)
        await store.write(f"{REPORT_PREFIX}{worker_id}.json", encode(report))

    anyio.run(write)


def test_it_counts_the_workers_and_writes_a_summary(kpl, tmp_path):
    for worker_id in ("one", "two"):
        report_of(tmp_path, worker_id)
    outcome = kpl("coordinate", f"file://{tmp_path}", "--once", "--json")
    assert (outcome.status, json.loads(outcome.out)) == (0, {"workers": 2, "outcome": "computed"})
    summary = decode((own_folder(tmp_path) / SUMMARY_NAME).read_bytes(), Summary)
    assert set(summary.members) == {"one", "two"}
    assert summary.dedicated


def test_it_runs_until_it_is_stopped(tmp_path):
    with started("coordinate", f"file://{tmp_path}", "--interval", "0.2") as running:
        assert "0 workers, summary written" in running.stdout.readline()
        assert running.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("ftp://host",), 2, "not a URL of a known kind"),
        (("file://relative/x",), 2, "give the full path of a folder"),
        (("memory://x",), 2, "no producer is in this one"),
        (("memory://x", "--interval", "0"), 2, "between 0.05 and 3,600 (seconds)"),
    ],
)
def test_a_wrong_option_is_one_sentence(kpl, arguments, status, message):
    outcome = kpl("coordinate", *arguments)
    assert outcome.status == status
    assert message in outcome.err


def test_a_summary_of_another_release_is_not_overwritten(kpl, tmp_path):
    (own_folder(tmp_path) / SUMMARY_NAME).write_text('{"version": 9, "generation": 1}')
    outcome = kpl("coordinate", f"file://{tmp_path}", "--once")
    assert outcome.status == 3
    assert "version 9 and this release reads 1" in outcome.err
    assert json.loads((own_folder(tmp_path) / SUMMARY_NAME).read_text())["version"] == 9
