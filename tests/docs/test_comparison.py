"""docs/comparison.md: every cell has its evidence, and every file that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
HEAD, _, *ROWS = (line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| "))
PRODUCTS = HEAD[-8:]
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def _section(row: list[str]) -> str:
    link = re.search(r"\(#(.+?)\)", row[0])
    assert link is not None
    return next(text for title, text in SECTIONS.items() if _anchor(title) == link[1])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].partition("]")[0].strip("["))
def test_every_cell_of_a_row_has_its_evidence(row: list[str]) -> None:
    assert len(row) == len(PRODUCTS) + 1
    section = _section(row)
    if "(#speed)" not in row[0]:
        assert [product for product in PRODUCTS if f"**{product}**" not in section] == []


def test_the_files_named_as_evidence_exist() -> None:
    named = set(re.findall(r"`((?:tests|benchmarks|docs)/[\w/.]+)`", PAGE))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_speeds_match_the_measured_ones() -> None:
    results = (ROOT / "docs" / "benchmarks" / "results.md").read_text(encoding="utf-8")
    (row,) = (row for row in ROWS if "(#speed)" in row[0])
    for product, program in {
        "kpl-integrations": "kpl_core",
        "aiokpl": "aiokpl",
        "async-kinesis": "async-kinesis",
    }.items():
        measured = re.search(rf"^\| {program} \| ([\d,]+) ", results, re.MULTILINE)
        assert measured is not None
        claimed = float(row[1 + PRODUCTS.index(product)].replace(",", ""))
        assert claimed == pytest.approx(float(measured[1].replace(",", "")), rel=0.1)


CLAIMS = {
    "README.md": {
        "records per CPU-second, 100 B": ["kpl_core", "", "raw boto3", "aiokpl", "async-kinesis"],
    },
    "docs/index.md": {
        "**kpl-integrations**": ["kpl_core"],
        "raw boto3, no retries, no limits": ["raw boto3"],
        "async-kinesis, aggregating": ["async-kinesis, aggregating"],
        "async-kinesis": ["async-kinesis"],
        "aiokpl": ["aiokpl"],
    },
}


@pytest.mark.parametrize(("page", "row"), [(page, row) for page, rows in CLAIMS.items() for row in rows])
def test_the_speeds_on_the_first_pages_match_the_measured_ones(page: str, row: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", text, re.MULTILINE)
    results = (ROOT / "docs" / "benchmarks" / "results.md").read_text(encoding="utf-8")
    for program, claimed in zip(CLAIMS[page][row], line.split(" | "), strict=False):
        if program:
            measured = re.search(rf"^\| {program} \| ([\d,]+) ", results, re.MULTILINE)
            assert measured is not None
            speed = float(claimed.strip("*").replace(",", ""))
            assert speed == pytest.approx(float(measured[1].replace(",", "")), rel=0.1)


def test_the_first_page_states_the_number_of_compared_products() -> None:
    others = len(PRODUCTS) - 1
    assert f"beside {['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight'][others]} others" in (
        ROOT / "docs" / "index.md"
    ).read_text(encoding="utf-8")
