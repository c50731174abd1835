"""The gate runs each part once, and lets nothing be left out that is not listed."""

import os
import subprocess
import sys
import tomllib
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNSTEADY = tomllib.loads((ROOT / "tests" / "unsteady.toml").read_text(encoding="utf-8"))
# Fails the first time and passes the second time, as a test of a rare loss does.
RARE_LOSS = """
from pathlib import Path

def test_no_acknowledged_record_is_lost():
    ran_before = Path("ran-before")
    first = not ran_before.exists()
    ran_before.touch()
    assert not first, "1 acknowledged record lost"
"""


def gate(folder: Path, *parts: str, user: str = "0", expected: str = "") -> subprocess.CompletedProcess[str]:
    """Run parts with the functions of the gate in a checkout that has only a chaos suite."""
    (folder / "tests").mkdir()
    (folder / "tests" / "unsteady.toml").touch()
    (folder / "test_chaos.py").write_text(RARE_LOSS)
    (folder / "Makefile").write_text("chaos:\n\t@python -m pytest -q -ra -p no:cacheprovider test_chaos.py\n")
    program = f"""
        work=$(mktemp -d -p .); TOTAL_SECONDS=50; source {ROOT}/.ci/gate.sh
        id() {{ echo {user}; }}; apt-get() {{ false; }}
        {"; ".join(parts)}
        summary {expected}
    """
    python_first = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        ["bash", "-c", program],
        cwd=folder,
        env={**os.environ, "PATH": python_first},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_loss_that_happens_once_makes_the_gate_fail(tmp_path: Path) -> None:
    ended = gate(tmp_path, "part chaos 40 make --no-print-directory chaos")
    assert "1 acknowledged record lost" in ended.stdout
    assert "chaos            FAILED" in ended.stdout
    assert ended.returncode == 1


def test_a_part_that_does_not_report_fails(tmp_path: Path) -> None:
    ended = gate(tmp_path, "part after 5 true", expected="lost after")
    assert "lost             FAILED (no report)" in ended.stdout
    assert ended.stdout.count("after ") == 1
    assert ended.returncode == 1


def test_a_part_over_its_budget_fails(tmp_path: Path) -> None:
    ended = gate(tmp_path, "part slow 1 sleep 30", "part after 5 true")
    assert "slow             FAILED (over 1 s)" in ended.stdout
    assert "after            passed" in ended.stdout
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("reason", "user", "outcome"),
    [
        ("the moon is full", "0", "FAILED (may not be left out)"),
        ("no `java` on the PATH", "0", "FAILED (may not be left out)"),
        ("no `java` on the PATH", "1000", "NOT RUN (Debian: default-jre-headless)"),
        ("root may write anywhere", "0", "NOT RUN (root passes every check of rights)"),
    ],
)
def test_only_what_is_listed_may_be_left_out(reason: str, user: str, outcome: str, tmp_path: Path) -> None:
    lines = f"SKIPPED [2] tests/test_x.py:1: {reason}\\nSKIPPED [1] tests/test_y.py:7: {reason}\\n"
    ended = gate(tmp_path, f"part interop 5 printf '{lines}'", user=user)
    assert ended.stdout.count(f"{outcome}: 3 tests, {reason}") == 1
    assert ended.returncode == (1 if "FAILED" in outcome else 0)


def test_no_part_of_the_gate_runs_twice() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8") + (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "last-failed" not in text
    assert "reruns" not in text


def test_few_tests_may_run_twice_and_not_for_long() -> None:
    entries = UNSTEADY.get("unsteady", [])
    assert len(entries) <= 5
    for entry in entries:
        assert set(entry) == {"test", "cause", "since"}, entry
        assert entry["cause"].strip(), entry
        path, _, name = entry["test"].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), entry
        assert timedelta(0) <= _committed_on() - entry["since"] <= timedelta(days=14), entry


def _committed_on() -> date:
    """Return the date of the checkout's commit, or today in a copy without a repository."""
    said = subprocess.run(["git", "log", "-1", "--format=%cs"], cwd=ROOT, capture_output=True, text=True, check=False)
    return date.fromisoformat(said.stdout.strip()) if said.returncode == 0 else datetime.now(UTC).date()
