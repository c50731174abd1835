"""docs/migrate/: every option and method that the pages name exists."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from kpl_core import Config, Producer

FOLDER = Path(__file__).parents[2] / "docs" / "migrate"
OPTIONS = {field.name for field in dataclasses.fields(Config)} | set(inspect.signature(Producer).parameters)


def _option_rows() -> list[tuple[str, str]]:
    """Return (the KPL's names, ours) of each row of the table of options."""
    section = (FOLDER / "kpl.md").read_text(encoding="utf-8").partition("\n## The options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .*\|$", section, re.MULTILINE)
    return [row for row in rows if row[0] != "KPL" and not row[0].startswith("---")]


@pytest.mark.parametrize(("theirs", "ours"), _option_rows(), ids=[theirs for theirs, _ in _option_rows()])
def test_the_option_named_for_a_kpl_option_exists(theirs: str, ours: str) -> None:
    named = {re.match(r"\w+", text)[0] for text in re.findall(r"`(\w.*?)`", ours)}  # type: ignore[index] # the pattern matches
    assert named - OPTIONS - {"kpl_core"} == set()


def test_no_kpl_option_is_listed_twice() -> None:
    names = [re.sub(r" \(.*", "", name) for theirs, _ in _option_rows() for name in theirs.split(", ")]
    assert len(names) > 40
    assert len(names) == len(set(names))


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_the_producer_methods_on_a_page_exist(page: Path) -> None:
    # The first column has the other product's names.
    ours = re.sub(r"^\| [^|]* \|", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    called = set(re.findall(r"\bproducer\.(\w+)", ours))
    assert [name for name in called if not hasattr(Producer, name)] == []
