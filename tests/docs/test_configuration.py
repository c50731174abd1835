"""The pages of the configuration match the code: tables are generated, and each row is checked with `Config`."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.front_page.diagrams.configuration import STEPS
from docs import generated
from kpl_core import Config, ConfigError, StreamConfig
from kpl_core.options.config import NON_RETRYABLE_ERROR_CODES
from kpl_core.options.flat_options import flat_options
from kpl_core.options.option import described

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference" / "producer.md").read_text(encoding="utf-8")
ADVICE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("configuration*.md")))
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in generated.producer().splitlines()[2:]
    for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]]
}
OPTIONS = described(Config)
# One bullet describes one option, or a few related ones.
BULLETS: list[str] = re.findall(r"^- \*\*`.*?(?=^- |^\n?#|\Z)", ADVICE, re.MULTILINE | re.DOTALL)
DESCRIBED = [name for each in BULLETS for name in re.findall(r"\*\*`(\w+)`\*\*", each.partition(": ")[0])]


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def _described(name: str) -> str:
    return next(each for each in BULLETS if f"**`{name}`**" in each.partition(": ")[0])


def _accepted(name: str, value: float) -> bool:
    options: dict[str, Any] = {name: int(value) if value == int(value) else value}
    if name == "retry_backoff_base_ms":
        options["retry_backoff_cap_ms"] = 1e12
    if name == "retry_backoff_cap_ms":
        options["retry_backoff_base_ms"] = 1
    try:
        Config(**options)
    except ConfigError:
        return False
    return True


def test_the_generated_tables_have_every_option_and_no_other() -> None:
    assert set(ROWS) == {field.name for field in OPTIONS.values()} == set(Config.__dataclass_fields__)
    names = re.findall(r"^\| `KPL_(\w+)` \|", generated.environment(), re.MULTILINE)
    assert names == [name.upper() for name, flat in flat_options(Config).items() if flat.has_variable]
    assert [f"<!-- generated: {name} -->" in REFERENCE for name in ("producer", "environment")] == [True, True]


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_described_option_exists_and_says_who_needs_no_other_value(name: str) -> None:
    assert name in OPTIONS
    assert DESCRIBED.count(name) == 1
    assert re.search(r"\b[Kk]eep (the defaults?|its|it)\b|[Nn]ot needed", " ".join(_described(name).split()))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_row_of_an_option_has_its_default_and_a_sentence(name: str) -> None:
    default, option = getattr(Config(), name), OPTIONS[name]
    shown = ROWS[name][1]
    if isinstance(default, int | float) and not isinstance(default, bool):
        assert _number(shown) == default
    else:
        assert shown == (f"{len(default)} codes" if isinstance(default, frozenset) else f"`{default!r}`")
    assert ROWS[name][5] == option.option.meaning


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.is_number])
def test_the_bounds_of_a_number_match_the_code(name: str) -> None:
    _, _, smallest, largest, *_ = ROWS[name]
    lowest = _number(smallest)
    assert _accepted(name, lowest)
    assert not _accepted(name, lowest - 1 if lowest == int(lowest) else lowest * 0.99)
    if largest == "-":
        assert _accepted(name, 2.0**62)
    else:
        assert _accepted(name, _number(largest))
        assert not _accepted(name, _number(largest) + 1)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if not option.is_number])
def test_an_option_that_is_not_a_number_has_no_bounds(name: str) -> None:
    assert ROWS[name][2:5] == ["-", "-", "-"]


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.choices])
def test_every_choice_is_in_the_table_and_in_the_description(name: str) -> None:
    for choice in OPTIONS[name].choices:
        assert f'"{choice}"' in ROWS[name][0]
        assert name not in DESCRIBED or f'`"{choice}"`' in _described(name)


def test_every_code_that_is_not_retried_is_named() -> None:
    described_codes = _described("non_retryable_error_codes")
    assert [code for code in NON_RETRYABLE_ERROR_CODES if f"`{code}`" not in described_codes] == []


def test_the_options_of_a_single_stream_are_listed() -> None:
    section = PAGE.partition("### What a stream may have of its own")[2].partition("\n## ")[0]
    listed = [line for line in section.splitlines() if " · " in line]
    assert re.findall(r"`(\w+)`", "\n".join(listed)) == [*StreamConfig.__dataclass_fields__]


def test_the_picture_names_only_options() -> None:
    named = {name for _, _, lines in STEPS for line in lines for name in re.findall(r"[a-z.]+(?:_[a-z.]+)+", line)}
    assert {name for name in named if name not in OPTIONS} == {"rate_limit_..._per_sec_per_shard"}
    assert len(named) >= 15
