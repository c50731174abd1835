"""docs/configuration.md matches the code: each row of its tables is checked with `Config`."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from kpl_core import Config, ConfigError, StreamConfig
from kpl_core.options.config import NON_RETRYABLE_ERROR_CODES

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
ROWS = {
    name: (default, smallest, largest)
    for name, default, smallest, largest in re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| .+? \|$", PAGE, re.MULTILINE
    )
}
OPTIONS = {field.name: field for field in dataclasses.fields(Config)}
HINTS = get_type_hints(Config)
# One bullet describes one option, or a few related ones.
BULLETS: list[str] = re.findall(r"^- \*\*`.*?(?=^- |^\n?#|\Z)", PAGE, re.MULTILINE | re.DOTALL)


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def _default(name: str) -> object:
    return getattr(Config(), name)


def _is_number(hint: Any) -> bool:
    return hint in {int, float} or bool({int, float} & set(get_args(hint)))


def _described(name: str) -> str:
    found = [each for each in BULLETS if f"**`{name}`**" in each.partition(": ")[0]]
    assert len(found) == 1, f"{name} has {len(found)} descriptions"
    return found[0]


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


def test_the_page_names_every_option_and_no_other() -> None:
    assert set(ROWS) == set(OPTIONS), "each option has a row and a description in docs/configuration.md"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_a_description_that_says_when_to_leave_it_alone(name: str) -> None:
    assert "Leave" in _described(name)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_default_matches_the_code(name: str) -> None:
    cell, default = ROWS[name][0], _default(name)
    match default:
        case None | bool():
            assert cell == f"`{default}`"
        case int() | float():
            assert _number(cell) == default
        case str():
            assert cell == f'`"{default}"`'
        case frozenset():
            assert cell == f"{len(default)} codes"
        case _:
            assert isinstance(default, Mapping)
            assert cell == "`{}`" == f"`{dict(default)}`"


@pytest.mark.parametrize("name", [name for name in OPTIONS if _is_number(HINTS[name])])
def test_the_bounds_of_a_number_match_the_code(name: str) -> None:
    _, smallest, largest = ROWS[name]
    lowest = _number(smallest)
    assert _accepted(name, lowest)
    assert not _accepted(name, lowest - 1 if lowest == int(lowest) else lowest * 0.99)
    if largest == "-":
        assert _accepted(name, 2.0**62)
    else:
        assert _accepted(name, _number(largest))
        assert not _accepted(name, _number(largest) + 1)


@pytest.mark.parametrize("name", [name for name in OPTIONS if not _is_number(HINTS[name])])
def test_an_option_that_is_not_a_number_has_no_bounds(name: str) -> None:
    assert ROWS[name][1:] == ("-", "-")


@pytest.mark.parametrize("name", [name for name in OPTIONS if get_origin(HINTS[name]) is Literal])
def test_every_choice_is_named(name: str) -> None:
    assert [choice for choice in get_args(HINTS[name]) if f'`"{choice}"`' not in _described(name)] == []


def test_every_code_that_is_not_retried_is_named() -> None:
    described = _described("non_retryable_error_codes")
    assert [code for code in NON_RETRYABLE_ERROR_CODES if f"`{code}`" not in described] == []


def test_the_options_of_a_single_stream_are_listed() -> None:
    section = PAGE.partition("### What a stream may have of its own")[2].partition("\n## ")[0]
    listed = [line for line in section.splitlines() if " · " in line]
    assert re.findall(r"`(\w+)`", "\n".join(listed)) == [field.name for field in dataclasses.fields(StreamConfig)]
