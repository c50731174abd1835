"""The locked versions of tests and image fit pyproject.toml, have a hash for each file, and name no index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKED = sorted((ROOT / ".ci" / "locked").glob("*.txt"))


def _of_group(name: str) -> list[str]:
    lines = PYPROJECT["dependency-groups"][name]
    return [text for line in lines for text in (_of_group(line["include-group"]) if isinstance(line, dict) else [line])]


def _of_extra(name: str) -> list[str]:
    found: list[str] = []
    for text in PYPROJECT["project"]["optional-dependencies"][name]:
        requirement = Requirement(text)
        own = requirement.name == PYPROJECT["project"]["name"]
        found += [line for extra in requirement.extras for line in _of_extra(extra)] if own else [text]
    return found


# The extras of the image, as `make lock-image` names them.
IMAGE = re.findall(r"--extra %,([\w ]+)\)", (ROOT / "Makefile").read_text(encoding="utf-8"))[0].split()
ASKED = {
    "dev": [*PYPROJECT["project"]["dependencies"], *_of_extra("all"), *_of_group("dev")],
    "docs": _of_group("docs"),
    "image": [*PYPROJECT["project"]["dependencies"], *(line for extra in IMAGE for line in _of_extra(extra))],
    "image-build": _of_group("build"),
    "release": _of_group("release"),
}


def _versions(path: Path) -> dict[str, list[Version]]:
    locked: dict[str, list[Version]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        locked.setdefault(canonicalize_name(name), []).append(Version(version))
    return locked


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_the_locked_versions_satisfy_pyproject_toml(path: Path) -> None:
    locked = _versions(path)
    for text in ASKED[path.stem]:
        asked = Requirement(text)
        versions = locked.get(canonicalize_name(asked.name), [])
        assert versions, f"{text} is not in {path.name}: run `make lock`"
        assert all(each in asked.specifier for each in versions), f"{text}, locked {versions}: run `make lock`"


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_every_locked_file_has_a_hash_and_no_index_is_named(path: Path) -> None:
    requirements = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip())
    for each in requirements:
        assert re.fullmatch(r"[\w.-]+==\S+( ; .*?)?( \\\n    --hash=sha256:[0-9a-f]{64})+", each), each
    assert {path.stem for path in LOCKED} == set(ASKED)


@pytest.mark.parametrize("name", ["image", "image-build"])
def test_the_image_has_the_versions_that_the_tests_ran_with(name: str) -> None:
    folder = ROOT / ".ci" / "locked"
    tested = _versions(folder / "dev.txt")
    assert _versions(folder / f"{name}.txt").items() <= tested.items()


def test_the_image_has_the_gateway_its_commands_and_the_stores() -> None:
    assert IMAGE == ["cli", "ingest", "local", "redis"]
