"""What the wheel holds: every module, the marker for type checkers, the licence, and nothing of the tests."""

import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_every_module_and_no_test(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {
        str(path.relative_to(ROOT))
        for package in ("kpl_core", "kpl_integrations")
        for path in (ROOT / package).rglob("*.py")
    }
    assert modules - names == set()
    assert {"kpl_core/py.typed", "kpl_integrations/py.typed"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert [name for name in names if name.partition("/")[0] in {"tests", "benchmarks", "examples", "docs"}] == []


def test_the_sdist_holds_what_its_tests_its_checks_and_its_site_need(sdist: Path) -> None:
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


def test_the_bill_of_materials_names_what_is_installed(dist: Path) -> None:
    bill = (dist / "sbom.cdx.json").read_text(encoding="utf-8")
    licences = (dist / "LICENCES.md").read_text(encoding="utf-8")
    for name in ("aiobotocore", "anyio", "msgspec", "sortedcontainers"):
        assert f'"{name}"' in bill
        assert name in licences
    assert "UNKNOWN" not in licences
