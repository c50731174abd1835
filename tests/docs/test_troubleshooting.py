"""The headings of docs/troubleshooting.md are the program's own words."""

import re
from pathlib import Path

import pytest

import kpl_core
import kpl_integrations

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
WORDS = re.findall(r"^### `(\w[\w ]+)`$", PAGE, re.MULTILINE)
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for package in (kpl_core, kpl_integrations)
    for path in sorted(Path(next(iter(package.__path__))).rglob("*.py"))
)


@pytest.mark.parametrize("word", WORDS)
def test_a_heading_is_a_word_of_the_program(word: str) -> None:
    assert f'"{word}"' in SOURCES or f"class {word}(" in SOURCES


def test_there_are_such_words() -> None:
    assert len(WORDS) >= 10
