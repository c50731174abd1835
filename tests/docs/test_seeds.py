"""The page of specifications: its files exist, and the names that a specification gives are in the package root."""

import re
from pathlib import Path

import kpl_core

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "seeds.md"


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] not in {"behaviour", "---"}]


def test_every_row_names_code_and_a_test_that_exist() -> None:
    assert len(rows()) >= 35
    for behaviour, where, test, differs in rows():
        code, proof = where.strip("`"), test.strip("`")
        assert (ROOT / code).is_file() or (ROOT / "kpl_core" / code).is_file(), behaviour
        assert (ROOT / "tests" / proof).is_file(), behaviour
        for link in re.findall(r"\]\((.+?)\)", differs):
            assert (PAGE.parent / link).is_file(), behaviour


def test_the_limits_of_a_shard_are_in_the_package_root() -> None:
    assert kpl_core.RECORDS_PER_SEC_PER_SHARD == 1_000.0
    assert kpl_core.BYTES_PER_SEC_PER_SHARD == 1_048_576.0
