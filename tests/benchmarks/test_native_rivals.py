"""The alternatives in other languages: built once, run with the records on standard input, or not run and why."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import native_rivals
from benchmarks.native_rivals import EXPERT, GO, KPL, RIVALS, Rival, build_all
from benchmarks.peer_programs import native_rival
from benchmarks.plan import Row, full_plan, short_plan
from benchmarks.rounds import run_rounds
from benchmarks.workload import Workload

# Builds by appending a line to a file, or fails if its source says so.
BUILD = """
import pathlib, sys
if pathlib.Path("source").read_text() == "broken":
    sys.exit("Error: the source is broken")
with pathlib.Path("../builds").open("a") as builds:
    builds.write("built\\n")
"""
# Counts the pieces on its standard input, the task and two for each record.
RIVAL = """
import json, struct, sys
task, count = None, 0
while length := sys.stdin.buffer.read(4):
    piece = sys.stdin.buffer.read(struct.unpack(">I", length)[0])
    task = task or json.loads(piece)
    count += 1
figures = {"acknowledged": task["measured_count"], "pieces": count, "stream": task["stream"], "versions": {"it": "1"}}
print(json.dumps(figures))
"""


@pytest.fixture
def rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rival:
    monkeypatch.setattr(native_rivals, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setattr(native_rivals, "_SOURCES", tmp_path)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "source").write_text("right")
    build, run = (sys.executable, "-c", BUILD), (sys.executable, "-c", RIVAL)
    rival = Rival("a rival", "rival", "sources", (sys.executable,), build, run)
    monkeypatch.setitem(RIVALS, "rival", rival)
    return rival


def give_task(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {
        "endpoint_url": "https://127.0.0.1:1",
        "control_url": "http://127.0.0.1:2",
        "workload": Workload(record_count=10).fields(),
        "cpu": None,
        "options": {"rival": "rival", "warm_up_rounds": 3},
    }
    monkeypatch.setattr(sys, "argv", ["native_rival", json.dumps(task)])


def build_count(rival: Rival) -> int:
    return len((rival.directory.parent / "builds").read_text().splitlines())


def test_a_rival_is_built_again_only_after_its_sources_have_changed(rival: Rival, tmp_path: Path) -> None:
    assert [build_all(["rival"]) for _ in range(3)] == [{}] * 3
    assert build_count(rival) == 1
    (tmp_path / "sources" / "source").write_text("changed")
    assert build_all(["rival"]) == {}
    assert build_count(rival) == 2


def test_a_build_leaves_nothing_beside_the_sources(rival: Rival, tmp_path: Path) -> None:
    assert build_all(["rival"]) == {}
    assert [path.name for path in (tmp_path / "sources").iterdir()] == ["source"]
    assert (rival.directory / "source").exists()


def test_a_build_that_fails_gives_its_reason_and_is_tried_again(rival: Rival, tmp_path: Path) -> None:
    (tmp_path / "sources" / "source").write_text("broken")
    assert build_all(["rival"]) == {"rival": "Error: the source is broken"}
    assert build_all(["rival"]) == {"rival": "Error: the source is broken"}
    (tmp_path / "sources" / "source").write_text("right")
    assert build_all(["rival"]) == {}
    assert build_count(rival) == 1


def test_other_environments_are_not_built(rival: Rival) -> None:
    assert build_all(["", "compiled", "raw-boto3"]) == {}
    assert not rival.directory.exists()


@pytest.mark.parametrize(("rival", "reason"), [(GO, "no go here"), (EXPERT, "no go here"), (KPL, "no java here")])
def test_without_its_tools_a_rival_is_not_run(rival: Rival, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    not_installed = build_all([rival.environment])
    assert not_installed == {rival.environment: reason}
    row = next(row for row in short_plan() if row.subject == rival.name)
    results = run_rounds([row], 2, (None, None), not_installed)
    assert results.failure_of(row) == f"not run: {reason}"
    assert results.of(row) == []


def test_without_openssl_rows_over_tls_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    row = Row("over_tls", "kpl_core", Workload(), "benchmarks.end_to_end")
    assert run_rounds([row], 1, (None, None), {}).failure_of(row) == "not run: no openssl here"


def test_a_rival_gets_the_task_and_all_records_and_its_figures_are_the_answer(
    rival: Rival, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert build_all(["rival"]) == {}
    give_task(monkeypatch)
    native_rival.main()
    answer = json.loads(capfd.readouterr().out)
    assert (answer["acknowledged"], answer["stream"], answer["versions"]) == (10, "bench", {"it": "1"})
    assert answer["pieces"] == 1 + 2 * (2_000 + 10)
    assert answer["calibration_ms"] > 0
    assert rival.directory.exists()


def test_a_rival_that_fails_ends_the_trial_with_its_exit_code(
    rival: Rival, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert build_all(["rival"]) == {}
    broken = replace(rival, run=(sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit('Error: no stream')"))
    monkeypatch.setitem(RIVALS, "rival", broken)
    give_task(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        native_rival.main()
    assert ended.value.code == 1
    assert "Error: no stream" in capfd.readouterr().err


@pytest.mark.parametrize("plan", [short_plan, full_plan])
def test_a_plan_has_all_rivals_and_ours_over_tls_in_both_sizes(plan: Callable[[], list[Row]]) -> None:
    rows = [row for row in plan() if row.is_over_tls and row.workload.keys == "10k"]
    assert {row.workload.data_bytes for row in rows} == {100, 1024}
    for size in (100, 1024):
        assert [row.subject for row in rows if row.workload.data_bytes == size] == [
            *["kpl_core"] * 6,
            GO.name,
            EXPERT.name,
            KPL.name,
            "raw boto3",
        ]
