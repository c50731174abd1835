"""The pages of the comparison: every cell has its evidence, and every file that they name exists."""

import re
from pathlib import Path

import pytest

from benchmarks.native_rivals import KPL

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
ALL_PAGES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("comparison*.md")))
RESULTS = (ROOT / "docs" / "benchmarks" / "results.md").read_text(encoding="utf-8")
# In the order of results.md: plain HTTP with 100 B and 1 KiB, TLS with 100 B and 1 KiB.
MEASURED = [
    dict(re.findall(r"^\| ((?!producer|---).+?) \| ([\d,]+) \[", section, re.MULTILINE))
    for section in re.split(r"^## ", RESULTS, flags=re.MULTILINE)
    if section.startswith(("Beside the alternatives", "Over TLS, beside the KPL"))
]


def _rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


HEAD, _, *ROWS = _rows(PAGE.partition("\n## ")[0])
PRODUCTS = HEAD[-8:]
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.+?)\n(.*?)(?=^##? |\Z)", ALL_PAGES, re.MULTILINE | re.DOTALL))


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def _section(row: list[str]) -> str:
    link = re.search(r"\([\w.-]*#(.+?)\)", row[0])
    assert link is not None
    return next(text for title, text in SECTIONS.items() if _anchor(title) == link[1])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].partition("]")[0].strip("["))
def test_every_cell_of_a_row_has_its_evidence(row: list[str]) -> None:
    assert len(row) == len(PRODUCTS) + 1
    section = _section(row)
    if "(#speed)" not in row[0]:
        assert [product for product in PRODUCTS if f"**{product}**" not in section] == []


def test_the_files_named_as_evidence_exist() -> None:
    named = set(re.findall(r"`((?:tests|benchmarks|docs)/[\w/.]+)`", ALL_PAGES))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def _number(text: str) -> float:
    return float(text.strip("*").partition(" ")[0].replace(",", ""))


def _is_near(claimed: str, measured: str) -> bool:
    return _number(claimed) == pytest.approx(_number(measured), rel=0.1)


def test_the_speeds_match_the_measured_ones() -> None:
    plain, over_tls = (row for row in ROWS if "(#speed)" in row[0])
    for row, measured, programs in (
        (plain, MEASURED[0], {"kpl-integrations": "kpl_core", "aiokpl": "aiokpl", "async-kinesis": "async-kinesis"}),
        (over_tls, MEASURED[2], {"kpl-integrations": "kpl_core, put_many()", "KPL": KPL.name}),
    ):
        for product, program in programs.items():
            assert _is_near(row[1 + PRODUCTS.index(product)], measured[program])


def test_the_section_about_speed_has_every_measured_producer() -> None:
    tables = [_rows(block)[2:] for block in SECTIONS["Speed"].split("\n\n") if block.startswith("| ")]
    for table, small, large in zip(tables, MEASURED[::2], MEASURED[1::2], strict=True):
        assert [row[0] for row in table] == list(small) == list(large)
        for program, *claimed in table:
            assert _is_near(claimed[0], small[program])
            assert _is_near(claimed[1], large[program])


# The rows of README.md: the table of results.md, and the programs of the cells.
CLAIMS = {
    "records per CPU-second, 100 B": (0, ["kpl_core", "", "raw boto3", "aiokpl", "async-kinesis"]),
    "the same over TLS": (2, ["kpl_core, put_many()", KPL.name, "raw boto3"]),
    "the same over TLS, 1 KiB": (3, ["kpl_core, put_many()", KPL.name, "raw boto3"]),
}


@pytest.mark.parametrize("row", CLAIMS)
def test_the_speeds_in_the_readme_match_the_measured_ones(row: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", text, re.MULTILINE)
    table, programs = CLAIMS[row]
    for program, claimed in zip(programs, line.split(" | "), strict=False):
        assert not program or _is_near(claimed, MEASURED[table][program])


def test_the_first_page_states_the_number_of_compared_products() -> None:
    others = len(PRODUCTS) - 1
    assert f"beside {['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight'][others]} others" in (
        ROOT / "docs" / "index.md"
    ).read_text(encoding="utf-8")
