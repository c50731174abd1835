"""The contents of the wheel: every module and page, the marker for type checkers, the licence, and no tests."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_wheel_contains_every_file_of_the_packages_and_no_test(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = {
        str(path.relative_to(ROOT))
        for package in ("kpl_core", "kpl_integrations")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == files
    assert {"kpl_core/py.typed", "kpl_integrations/py.typed"} <= files
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert [name for name in names if name.partition("/")[0] in {"tests", "benchmarks", "examples", "docs"}] == []


def test_the_sdist_contains_everything_for_tests_checks_and_site(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = ("kpl_core", "kpl_integrations", "tests", "benchmarks", "examples", "docs")
    sources = {
        str(path.relative_to(ROOT))
        for folder in kept
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "node_modules" not in path.parts
    }
    whole = {*map(str, (path.relative_to(ROOT) for path in ROOT.glob("*.md"))), "LICENSE", "Makefile", "mkdocs.yml"}
    assert (sources | whole | {".ci/run", "pyproject.toml"}) - names == set()


@pytest.mark.timeout(300)
def test_the_sdist_is_complete_even_if_benchmarks_left_symbolic_links(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".venv-bench").mkdir()
    (tmp_path / ".venv-bench" / "benchmarks").symlink_to(tmp_path / "benchmarks")
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path / "dist"), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")} <= names


def test_the_bill_of_materials_lists_the_installed_packages(dist: Path) -> None:
    bill = (dist / "sbom.cdx.json").read_text(encoding="utf-8")
    subject = json.loads(bill)["metadata"]["component"]
    assert (subject["name"], subject["type"]) == ("kpl-integrations", "library")
    licences = (dist / "LICENCES.md").read_text(encoding="utf-8")
    for name in ("aiobotocore", "anyio", "msgspec", "sortedcontainers"):
        assert f'"{name}"' in bill
        assert name in licences
    assert "UNKNOWN" not in licences
