"""What a build of the sources makes, with and without a C compiler, and what the result runs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environment import Environment

pytestmark = pytest.mark.timeout(300)

SMOKE = Path(__file__).with_name("smoke.py")


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


def test_with_a_compiler_the_wheel_has_the_kernels_and_is_for_this_platform(sdist: Path, tmp_path: Path) -> None:
    wheel, printed = built(sdist, tmp_path, KPL_KERNELS="")
    if "was not compiled" in printed:
        pytest.skip("no C compiler with the headers of Python")
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
