"""The table of where each option can be set has every option, and a reason for each place where it cannot be set."""

import re

import pytest

from docs import generated
from kpl_core import Config
from kpl_core.options.environment import value_of
from kpl_core.options.flat_options import flat_options
from kpl_core.options.option import described
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.settings_sources import gateway_options
from kpl_integrations.logging_handler.options import LogOptions, LogSettings
from kpl_integrations.otel.options import ExporterArguments, ExporterSettings

LINES = [line.strip("| ").split(" | ") for line in generated.places().splitlines()[2:]]


def test_the_table_has_every_option_of_every_adapter() -> None:
    flat = flat_options(Config)
    named = {cell.strip("`").replace(".", "_") for cell, *_ in LINES}
    members = {
        f"{option.group}_{option.member}" if option.group and option.member else name for name, option in flat.items()
    }
    own = {*described(IngestSettings), *described(LogSettings), *described(ExporterSettings)}
    assert named >= members
    assert own - named == {"aggregation", "max_buffer_bytes"} & own - named
    assert all(any(f"`KPL_OTEL_{suffix}`" in line for line in LINES) for suffix in ("AGGREGATION", "BUFFER_BYTES"))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_a_place_where_an_option_cannot_be_set_has_a_reason(line: list[str]) -> None:
    assert len(line) == 6
    for cell in line:
        assert re.fullmatch(r"`[^`]+`|- \(.{6,}\)", cell), cell


def test_each_named_variable_of_the_gateway_is_a_setting() -> None:
    names = re.findall(r"`KPL_INGEST_(\w+)`", generated.places())
    assert {name.lower() for name in names} <= set(gateway_options())
    assert len(names) == len(set(names))


def test_the_keywords_for_type_checkers_are_those_of_the_settings() -> None:
    assert set(LogOptions.__annotations__) == set(described(LogSettings))
    others = {"partition_key", "config", "meter_provider", "transport", "flush_on_sigterm"}
    assert set(ExporterArguments.__annotations__) == set(described(ExporterSettings)) | others


def test_a_default_in_the_help_of_kpl_serve_is_that_of_the_setting() -> None:
    options, checked = gateway_options(), []
    for parameter in generated.serve_parameters():
        shown = re.search(r"\[default: ([^\] ]+)\]", getattr(parameter, "help", None) or "")
        option = options.get(parameter.name or "")
        if shown is not None and option is not None:
            assert value_of(option, shown[1], "help") == option.default
            checked.append(parameter.name)
    assert checked == ["host", "port", "workers", "drain_delay_seconds"]
