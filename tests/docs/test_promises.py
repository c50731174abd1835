"""Each promise of the guarantees and of SECURITY.md is in a table of docs/testing.md, with tests that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "docs/guarantees.md",
    "docs/guarantees-order.md",
    "docs/guarantees-spool.md",
    "docs/guarantees-failures.md",
    "SECURITY.md",
)
# Tables whose rows are promises: the page, and the first cell of the head.
TABLES = [
    ("docs/guarantees.md", ""),
    ("docs/guarantees-order.md", 'with `ordering="per_key"`'),
    ("docs/guarantees-spool.md", "`failure`"),
    ("SECURITY.md", "a client wants to use"),
    ("SECURITY.md", "per request"),
    ("SECURITY.md", "input"),
]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def proofs(page: str) -> Iterator[tuple[str, list[str]]]:
    """Each promise of a page with the ids of its tests, as docs/testing.md has them."""
    section = text_of("docs/testing.md").partition("## What proves each promise")[2].partition("\n## ")[0]
    part = section.partition(f"### {page}\n")[2].partition("\n### ")[0]
    for line in part.splitlines():
        if line.startswith("| ") and "::" in line:
            promise, tests = cells(line)
            yield promise, re.findall(r"`([^`]+)`", tests)


PROOFS = [(page, promise, test) for page in PAGES for promise, tests in proofs(page) for test in tests]


@cache
def names_in(path: str) -> set[str]:
    """The names that pytest can collect from a file: functions, and the TestCase of a state machine."""
    names: set[str] = set()
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def test_each_page_has_a_table() -> None:
    assert {page for page, _, _ in PROOFS} == set(PAGES)


@pytest.mark.parametrize(("page", "promise", "test"), PROOFS)
def test_a_promise_is_on_its_page_and_its_test_exists(page: str, promise: str, test: str) -> None:
    assert promise in " ".join(text_of(page).split()), f"{page} does not say this any more"
    path, _, name = test.partition("::")
    assert name in names_in(path), f"{test} does not exist"


@pytest.mark.parametrize(("page", "head"), TABLES)
def test_every_row_of_a_table_of_promises_has_a_proof(page: str, head: str) -> None:
    proved = {promise for promise, _ in proofs(page)}
    is_in_table = False
    rows = []
    for line in text_of(page).splitlines():
        if not line.startswith("|"):
            is_in_table = False
        elif is_in_table and not line.startswith("| ---"):
            rows.append(cells(line)[0])
        elif not is_in_table:
            is_in_table = cells(line)[0] == head
    assert rows
    assert {*rows} <= proved


def test_every_promise_of_the_library_about_security_has_a_proof() -> None:
    section = text_of("SECURITY.md").partition("## What the library promises")[2].partition("\n## ")[0]
    promises = set(re.findall(r"^- (\*\*[^*]+\*\*)", section, re.MULTILINE))
    assert promises
    assert promises <= {promise for promise, _ in proofs("SECURITY.md")}
