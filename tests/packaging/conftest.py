"""The wheel under test, built once. DIST names a folder that contains it; `make extras` builds both."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dist() -> Path:
    folder = os.environ.get("DIST")
    assert folder, "DIST must name the folder with the wheel and the sdist; `make extras` does"
    return Path(folder)


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*-none-any.whl")
    return found


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    (found,) = dist.glob("*.tar.gz")
    return found
