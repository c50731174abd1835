"""A page of one task has at most 900 words of prose. Pages in which a reader searches for one line may have more."""

from pathlib import Path

import pytest

from benchmarks.page_words import MOST_WORDS, prose_words

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions"]
# A reader searches these for one row or one heading.
LOOKED_UP = {
    "howto/cli.md",
    "interop.md",
    "runbook.md",
    "testing.md",
    "troubleshooting.md",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_can_be_read_at_one_sitting(page: Path) -> None:
    name = str(page.relative_to(DOCS))
    words = prose_words(page.read_text(encoding="utf-8"))
    assert name in LOOKED_UP or words <= MOST_WORDS


@pytest.mark.parametrize("name", sorted(LOOKED_UP))
def test_a_longer_page_is_still_above_the_bound(name: str) -> None:
    assert prose_words((DOCS / name).read_text(encoding="utf-8")) > MOST_WORDS, "remove it from the list"


def test_tables_code_pictures_and_targets_of_links_do_not_count() -> None:
    not_prose = "![a picture](a.svg)\n\n```sh\nkpl serve\n```\n\n| a | table |\n| --- | --- |\n"
    page = f"# Two words\n\n{not_prose}\nSee [this page](b.md#c).\n"
    assert prose_words(page) == 5
