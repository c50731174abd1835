"""Docstrings, comments, messages, test names and pages use plain words (CONTRIBUTING.md, "How we write").

The test counts words that readers stumble over, per 1,000 words of prose of each package. A word on the
list is sometimes right: then add its phrase to `RIGHT_USES`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kpl_core
import kpl_integrations

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "kpl_core": Path(next(iter(kpl_core.__path__))),
    "kpl_integrations": Path(next(iter(kpl_integrations.__path__))),
    "docs": ROOT / "docs",
    "tests": ROOT / "tests",
    "benchmarks": ROOT / "benchmarks",
    "examples": ROOT / "examples",
}
PAGES = {"README.md": 2, "CHANGELOG.md": 2, "CONTRIBUTING.md": 2, "SECURITY.md": 2}
MOST_PER_1000_WORDS = 1.0
SHORTEST_MESSAGE_WORDS = 4

# Each word, and what to write instead.
STUMBLING = {
    **dict.fromkeys(("nobody", "no one", "somebody", "anybody", "everybody"), "name the component or the caller"),
    **dict.fromkeys(("someone", "anyone", "everyone", "whoever", "whom"), "name the component or the caller"),
    **dict.fromkeys(("his", "her", "him", "he", "she"), "a component is 'it', a client is 'the client'"),
    **dict.fromkeys(("anew", "afresh"), "again"),
    **dict.fromkeys(("thereby", "thereof", "therein", "lest", "naught", "amid"), "two short sentences"),
    **dict.fromkeys(("for ever", "evermore", "as ever"), "without a limit"),
    **dict.fromkeys(("mend", "mends", "mended"), "fix"),
    **dict.fromkeys(("told", "tells of", "speaks of", "speak of"), "reports, returns, logs"),
    **dict.fromkeys(("heed", "heeds", "suffices", "befits", "bids"), "the ordinary verb"),
    "for want of": "without, for lack of",
    "whatever": "any, or name it",
}
WORD = re.compile(rf"\b(?:{'|'.join(map(re.escape, STUMBLING))})\b", re.IGNORECASE)
# Cheaper than the patterns: a text without any of these has no place.
SUSPECTS = (*STUMBLING, "who")
# "who" belongs to people. After any other word it stands for a thing.
PEOPLE = re.compile(
    r"administrator|(?:caller|client|customer|developer|engineer|maintainer|operator|person|reader|team|user)s?|people|those"
)
WHO = re.compile(r"(?:\b(\w+),? )?\bwho\b", re.IGNORECASE)
# The space tells a comment from a colour or an anchor.
COMMENT = re.compile(r"(?:^|\s)#:? (.*)")
# Phrases in which a word of the list is right.
RIGHT_USES = ("who may", "who must")
RIGHT = re.compile("|".join(map(re.escape, RIGHT_USES)))


class Place(NamedTuple):
    """A word that readers stumble over, and where it is."""

    path: Path
    line: int
    word: str
    advice: str


def _markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page without code."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`", "", line)


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages, test names and comments with their line numbers."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value.split()) >= SHORTEST_MESSAGE_WORDS:
                yield from enumerate(node.value.splitlines(), node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    for number, line in enumerate(text.splitlines(), 1):
        if comment := COMMENT.search(line):
            yield number, comment[1]


def _prose(path: Path) -> list[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    return list(_markdown_prose(text) if path.suffix == ".md" else _python_prose(text))


def _places(path: Path, prose: list[tuple[int, str]]) -> Iterator[Place]:
    text = "\n".join(line for _, line in prose).lower()
    suspects = [word for word in SUSPECTS if word in text]
    for number, line in prose if suspects else ():
        if not any(word in line.lower() for word in suspects):
            continue
        checked = RIGHT.sub("", line)
        for found in WORD.finditer(checked):
            yield Place(path, number, found[0], STUMBLING[found[0].lower()])
        for found in WHO.finditer(checked):
            if not PEOPLE.fullmatch((found[1] or "").lower()):
                yield Place(path, number, found[0], "'that' for a thing")


def _report(places: list[Place]) -> str:
    return "\n".join(f"{place.path}:{place.line}: {place.word}: {place.advice}" for place in places)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_written_in_plain_words(package: str) -> None:
    places: list[Place] = []
    words = 0
    for path in sorted([*PACKAGES[package].rglob("*.py"), *PACKAGES[package].rglob("*.md")]):
        if path != Path(__file__):
            prose = _prose(path)
            words += sum(len(re.findall(r"[A-Za-z']+", line)) for _, line in prose)
            places += _places(path, prose)
    rate = 1_000 * len(places) / max(1, words)
    assert rate <= MOST_PER_1000_WORDS, f"{rate:.1f} per 1,000 words:\n{_report(places)}"


@pytest.mark.parametrize("page", PAGES)
def test_a_first_page_is_written_in_plain_words(page: str) -> None:
    places = list(_places(ROOT / page, _prose(ROOT / page)))
    assert len(places) <= PAGES[page], _report(places)


@pytest.mark.parametrize("word", ["anew", "whatever", "a record who"])
def test_a_word_is_found_in_a_docstring_a_comment_a_message_a_test_name_and_a_page(word: str) -> None:
    name = word.replace(" ", "_")
    code = (
        f'def test_{name}():\n    """Do it {word} waits."""\n    # Do it {word} waits.\n    print("do it {word} now")\n'
    )
    assert len(list(_places(Path("a.py"), list(_python_prose(code))))) == len(code.splitlines())
    assert len(list(_places(Path("a.md"), list(_markdown_prose(f"Do it {word} waits."))))) == 1


def test_code_on_a_page_and_people_are_no_stumbling_words() -> None:
    page = "```sh\nkpl whatever\n```\nRun `kpl anew` as the operator who owns it.\n"
    assert list(_places(Path("a.md"), list(_markdown_prose(page)))) == []
