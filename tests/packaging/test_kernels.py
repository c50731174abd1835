"""What a build of the sources makes, with and without a C compiler, and what the result runs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hatch_build
from tests.packaging.environment import Environment

pytestmark = pytest.mark.timeout(300)

SMOKE = Path(__file__).with_name("smoke.py")
# As `has_compiler` in .ci/run.
HAS_COMPILER = shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def built(sdist: Path, folder: Path, **environment: str) -> tuple[Path | None, str]:
    """Build a wheel of the sdist in the tests' environment; return it, or None, and what pip printed."""
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-cache-dir", "--wheel-dir", str(folder), str(sdist)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return next(folder.glob("*.whl"), None), done.stdout + done.stderr


def names_in(wheel: Path | None) -> list[str]:
    """Return the names of the compiled modules in a wheel."""
    assert wheel is not None
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith((".so", ".pyd"))]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler with the headers of Python")
@pytest.mark.parametrize("wanted", ["", "require"])
def test_with_a_compiler_the_wheel_has_the_kernels_and_is_for_this_platform(
    sdist: Path, tmp_path: Path, wanted: str
) -> None:
    wheel, printed = built(sdist, tmp_path, KPL_KERNELS=wanted)
    assert wheel is not None, printed
    (module,) = names_in(wheel)
    assert module.startswith("kpl_core/pipeline/_open_record.cpython-3")
    assert f"-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-" in str(wheel)
    environment = Environment(tmp_path)
    environment.install(str(wheel))
    assert "compiled: 10,000 records delivered" in environment.run(str(SMOKE), "compiled")


@pytest.mark.parametrize("given", [{"CC": "no-compiler", "KPL_KERNELS": ""}, {"KPL_KERNELS": "off"}], ids=str)
def test_without_a_compiler_or_with_off_the_wheel_is_pure(sdist: Path, tmp_path: Path, given: dict[str, str]) -> None:
    wheel, printed = built(sdist, tmp_path, **given)
    assert names_in(wheel) == []
    assert str(wheel).endswith("-py3-none-any.whl")
    assert ("was not compiled, so the wheel is pure Python" in printed) is ("CC" in given)


def test_without_a_compiler_a_build_that_requires_the_kernels_says_why_it_fails(sdist: Path, tmp_path: Path) -> None:
    wheel, printed = built(sdist, tmp_path, CC="no-compiler", KPL_KERNELS="require")
    assert wheel is None
    assert "no-compiler" in printed


def initialized(version: str, folder: Path) -> None:
    """Run the hook as hatchling does."""
    unused: Any = None
    hook = hatch_build.CustomBuildHook(str(folder), {}, unused, unused, str(folder), "wheel")
    hook.initialize(version, {})
    hook.finalize(version, {}, "")


@pytest.mark.parametrize("wanted", ["required", "on", "OFF", "1"])
@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_build_fails_if_the_variable_has_another_value(
    version: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made a pure wheel without a word."""
    monkeypatch.setenv("KPL_KERNELS", wanted)
    with pytest.raises(ValueError, match=f"KPL_KERNELS is '{wanted}'; set it to off or require, or unset it"):
        initialized(version, tmp_path)


@pytest.mark.parametrize(
    ("version", "interpreter", "named"),
    [("editable", "cpython", "an editable installation"), ("standard", "pypy", "pypy")],
)
def test_a_build_that_requires_the_kernels_fails_where_there_can_be_none(
    version: str, interpreter: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hatch_build, "sys", SimpleNamespace(implementation=SimpleNamespace(name=interpreter)))
    monkeypatch.setenv("KPL_KERNELS", "require")
    with pytest.raises(ValueError, match=f"KPL_KERNELS is 'require', but {named} has no kernels in C; set it to off"):
        initialized(version, tmp_path)
    for wanted in ("", " off "):
        monkeypatch.setenv("KPL_KERNELS", wanted)
        initialized(version, tmp_path)
