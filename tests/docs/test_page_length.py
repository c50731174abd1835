"""A page of one task has at most 900 words of prose, and pages that were longer do not grow."""

from pathlib import Path

import pytest

from benchmarks.page_words import MOST_WORDS, prose_words

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions"]
# Pages in which a reader searches for one row, and pages that are still to be divided; each with its bound.
LONGER = {
    "benchmarks/results.md": 989,
    "comparison.md": 1_436,
    "howto/asgi.md": 939,
    "howto/cli.md": 1_692,
    "howto/coordination.md": 1_136,
    "howto/opentelemetry.md": 1_081,
    "howto/policies.md": 924,
    "howto/process-end.md": 1_104,
    "howto/producer.md": 1_539,
    "interop.md": 1_084,
    "runbook.md": 1_880,
    "testing.md": 1_600,
    "troubleshooting.md": 1_144,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_can_be_read_at_one_sitting(page: Path) -> None:
    most = LONGER.get(str(page.relative_to(DOCS)), MOST_WORDS)
    assert prose_words(page.read_text(encoding="utf-8")) <= most


@pytest.mark.parametrize("name", LONGER)
def test_a_longer_page_is_still_above_the_bound(name: str) -> None:
    assert prose_words((DOCS / name).read_text(encoding="utf-8")) > MOST_WORDS, "remove it from LONGER"


def test_tables_code_pictures_and_targets_of_links_do_not_count() -> None:
    not_prose = "![a picture](a.svg)\n\n```sh\nkpl serve\n```\n\n| a | table |\n| --- | --- |\n"
    page = f"# Two words\n\n{not_prose}\nSee [this page](b.md#c).\n"
    assert prose_words(page) == 5
