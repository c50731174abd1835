"""The types of the installed package: mypy and pyright agree with `typed_use.py`, error by error."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environment import Environment

USE = (Path(__file__).parent / "typed_use.py").read_text(encoding="utf-8")
WRONG_LINES = {number for number, line in enumerate(USE.splitlines(), 1) if "# wrong" in line}


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typing")
    Environment(folder).install(f"{wheel}[fastapi]")
    (folder / "typed_use.py").write_text(USE, encoding="utf-8")
    return folder


def _complained(command: list[str], folder: Path, error: str) -> set[int]:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert "typed_use.py" in ended.stdout, ended.stdout + ended.stderr
    return {int(line) for line in re.findall(error, ended.stdout)}


@pytest.mark.timeout(300)
def test_mypy_reports_exactly_the_wrong_lines(folder: Path) -> None:
    python = str(folder / "venv" / "bin" / "python")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "typed_use.py"]
    assert _complained(command, folder, r"typed_use\.py:(\d+): error") == WRONG_LINES


@pytest.mark.timeout(300)
def test_pyright_reports_exactly_the_wrong_lines(folder: Path) -> None:
    python = str(folder / "venv" / "bin" / "python")
    command = [sys.executable, "-m", "pyright", "--pythonpath", python, "typed_use.py"]
    assert _complained(command, folder, r"typed_use\.py:(\d+):\d+ - error") == WRONG_LINES
