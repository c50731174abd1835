"""What the wheel holds: every module, the marker for type checkers, the licence, and nothing of the tests."""

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


def test_the_bill_of_materials_names_what_is_installed(dist: Path) -> None:
    bill = (dist / "sbom.cdx.json").read_text(encoding="utf-8")
    licences = (dist / "LICENCES.md").read_text(encoding="utf-8")
    for name in ("aiobotocore", "anyio", "msgspec", "sortedcontainers"):
        assert f'"{name}"' in bill
        assert name in licences
    assert "UNKNOWN" not in licences
