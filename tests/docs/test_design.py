"""The pages about the design and the decisions name only code and pages that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kpl_core
import kpl_integrations

DOCS = Path(__file__).parents[2] / "docs"
CORE = Path(next(iter(kpl_core.__path__)))
PACKAGES = {"kpl_core": CORE, "kpl_integrations": Path(next(iter(kpl_integrations.__path__)))}
DESIGN = sorted(DOCS.glob("design*.md"))
FILES = DOCS / "design-files.md"
PAGES = [*DESIGN, *sorted((DOCS / "decisions").glob("*.md"))]
LONGEST_DESIGN_LINES = 450

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _references(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, name) of each `file.py:Name.name` on a page."""
    yield from re.findall(r"`([\w/]+\.py):([\w.]+)`", page.read_text(encoding="utf-8"))


def _source(path: str) -> Path:
    """Return the file that a page names: below the named package, else below kpl_core."""
    package, _, rest = path.partition("/")
    return PACKAGES[package] / rest if package in PACKAGES else CORE / path


def _names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Return the definitions in a body, each with its own body."""
    names: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, Definition):
            names[node.name] = node.body
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: [] for target in targets if isinstance(target, ast.Name)}
    return names


def _exists(path: str, name: str) -> bool:
    source = _source(path)
    if not source.is_file():
        return False
    body = ast.parse(source.read_text(encoding="utf-8")).body
    for part in name.split("."):
        names = _names(body)
        if part not in names:
            return False
        body = names[part]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_function_a_page_names_exists(page: Path) -> None:
    assert [f"{path}:{name}" for path, name in _references(page) if not _exists(path, name)] == []


def test_the_design_shows_where_every_step_happens() -> None:
    assert len({reference for page in DESIGN for reference in _references(page)}) > 40


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.stem)
def test_a_page_of_the_design_can_be_read_in_one_sitting(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST_DESIGN_LINES


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_is_on_the_map(package: str) -> None:
    first_column = "\n".join(re.findall(r"^\| (`.+?`) \|", FILES.read_text(encoding="utf-8"), re.MULTILINE))
    named = {_source(name) for name in re.findall(r"`([\w/.]+)`", first_column)}
    missing = [
        str(path)
        for path in PACKAGES[package].rglob("*.py")
        if path.name != "__init__.py" and path not in named and named.isdisjoint(path.parents)
    ]
    assert missing == [], "give each a place in docs/design-files.md"
    assert [path for path in named if not path.exists()] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_every_linked_page_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
