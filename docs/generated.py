"""Generate the tables of the reference pages from the code: a hook of mkdocs.

The hook replaces each `<!-- generated: NAME -->` of a page by the table of that name. So a page can
never list an option, command or metric that does not exist.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from kpl_core import Config, CoordinationOptions, FairnessPolicy, RateLimitPolicy, StreamConfig
from kpl_core.options.environment import PREFIX
from kpl_core.options.flat_options import flat_options
from kpl_core.options.option import REQUIRED, DescribedOption, described, type_name
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, SpoolOptions, TierPolicy
from kpl_integrations.cli.app import app
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.openapi import openapi_document
from kpl_integrations.ingest.settings import PRODUCER_DEFAULTS, SPOOL_DEFAULTS, IngestSettings
from kpl_integrations.ingest.settings_sources import NOT_IN_GATEWAY, flag_of, gateway_options, producer_name
from kpl_integrations.logging_handler.options import LogSettings
from kpl_integrations.metrics.catalogue import METRICS
from kpl_integrations.otel.options import OWN_NAMES, ExporterSettings, variable_suffix

__all__ = ["GENERATED", "on_page_markdown"]

_ONLY_GATEWAY = "- (of a server)"
_ONLY_HANDLER = "- (of log records)"
_ONLY_TELEMETRY = "- (of telemetry)"
_MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
# Numbers from here on are easier to read as a power of ten.
_SHORTEST_IN_POWERS = 1e12


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each marker by its table, and an escaped `|` in the code of a table by a plain one.

    The repository's pages need the backslash. Here the reader would see it.

    Raises:
        KeyError: a marker names no table.
    """
    text = _MARKER.sub(lambda marker: GENERATED[marker[1]](), markdown)
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), text)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _plain(value: object) -> str:
    """Return a number as a reader writes it, and anything else as code."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value in {math.inf, -math.inf}:
            return "-"
        return f"{value:,.0f}" if value == int(value) and abs(value) < _SHORTEST_IN_POWERS else f"{value:g}"
    return f"`{value!r}`"


def _default(option: DescribedOption) -> str:
    if option.default is REQUIRED:
        return "required"
    if isinstance(option.default, frozenset):
        return f"{len(option.default)} codes"
    return _plain(option.default)


def _bounds(option: DescribedOption) -> tuple[str, str, str]:
    """Return the smallest and the largest number, and the unit."""
    bound = option.bound
    if bound is None:
        return "-", "-", "-"
    smallest = f"above {_plain(bound.smallest)}" if bound.above else _plain(bound.smallest)
    return smallest, _plain(bound.largest), bound.unit


def _type(option: DescribedOption) -> str:
    shown = [" or ".join(f'"{word}"' for word in option.choices)] if option.choices else map(type_name, option.kinds)
    return " or ".join([*shown, *(["None"] if option.is_optional else [])])


def shown_kind(option: DescribedOption) -> str:
    """Return what the text of a variable is, for the table of variables."""
    if option.choices:
        return ", ".join(f'"{word}"' for word in option.choices)
    if option.is_number:
        return "a number"
    if option.kinds == (bool,):
        return "true or false"
    if Path in option.kinds:
        return "a path"
    return "words with commas" if frozenset[str] in option.kinds else "a word"


def _option_row(name: str, option: DescribedOption) -> tuple[str, ...]:
    return f"`{name}`", f"`{_type(option)}`", _default(option), *_bounds(option), option.option.meaning


_OPTION_HEAD = ("option", "type", "default", "smallest", "largest", "unit", "meaning")


def producer() -> str:
    """Return the table of all options of `Config`, with the KPL's names."""
    rows = ((*_option_row(name, option), option.option.kpl or "-") for name, option in described(Config).items())
    return _table((*_OPTION_HEAD, "in the KPL"), rows)


def options() -> str:
    """Return a table for each class of options, apart from `Config`, which has a page of its own."""
    parts = []
    for cls in (
        SpoolOptions,
        DeadLetterOptions,
        BreakerPolicy,
        TierPolicy,
        FairnessPolicy,
        RateLimitPolicy,
        CoordinationOptions,
    ):
        summary = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        table = _table(_OPTION_HEAD, (_option_row(name, option) for name, option in described(cls).items()))
        parts.append(f"## `{cls.__module__}.{cls.__name__}`\n\n{summary}\n\n{table}")
    names = " · ".join(f"`{name}`" for name in inspect.signature(StreamConfig).parameters)
    parts.append(f"## `{StreamConfig.__module__}.StreamConfig`\n\nOverrides for one stream, as in `Config`: {names}.")
    return "\n\n".join(parts)


def environment() -> str:
    """Return the table of the variables that `Config.from_env` reads."""
    rows = (
        (f"`{PREFIX}{name.upper()}`", shown_kind(flat.option), flat.option.option.meaning)
        for name, flat in flat_options(Config).items()
        if flat.has_variable
    )
    return _table(("variable", "value", "meaning"), rows)


def settings() -> str:
    """Return the table of the gateway's settings, with the gateway's own defaults."""
    defaults = {
        **PRODUCER_DEFAULTS,
        **{name: value for name, value in SPOOL_DEFAULTS.items() if name != "dead_letters"},
    }
    rows = (
        _option_row(name, option._replace(default=defaults.get(name, option.default)))
        for name, option in gateway_options().items()
    )
    return _table(("setting", *_OPTION_HEAD[1:]), rows)


def handler() -> str:
    """Return the table of the log handler's own options."""
    return _table(_OPTION_HEAD, (_option_row(name, option) for name, option in described(LogSettings).items()))


def serve_parameters() -> list[Any]:
    """Return the parameters of `kpl serve`, as typer has them."""
    return dict(_commands(typer.main.get_command(app), "kpl"))["kpl serve"].params


def serve_flags() -> dict[str, str]:
    """Return the settings that have an option of `kpl serve`, with that option."""
    flags = {parameter.opts[0] for parameter in serve_parameters()}
    return {name: flag for name in gateway_options() if (flag := flag_of(name)) in flags}


def _flag_cell(setting: str, flags: dict[str, str]) -> str:
    option = gateway_options()[setting]
    if option.is_mapping:
        return "- (a table)"
    # Other users can read a command line.
    return f"`{flags[setting]}`" if setting in flags else f"`--set {setting}{'_file' if option.option.secret else ''}`"


def _gateway_cells(setting: str, flags: dict[str, str]) -> tuple[str, str]:
    """Return the variable of a setting, and its option of `kpl serve`."""
    is_table = gateway_options()[setting].is_mapping
    variable = f"- (a table of the file: `[{setting}.NAME]`)" if is_table else f"`KPL_INGEST_{setting.upper()}`"
    return variable, _flag_cell(setting, flags)


def _place_rows() -> Iterator[tuple[str, ...]]:
    flags, own_names = serve_flags(), {name: otel for name, otel in OWN_NAMES.items() if name != otel}
    settings_by_option = {producer_name(setting): setting for setting in gateway_options()}
    handler, telemetry = described(LogSettings), described(ExporterSettings)
    for name, flat in flat_options(Config).items():
        place = f"`{flat.group}.{flat.member}`" if flat.group and flat.member else f"`{name}`"
        variable = f"`KPL_{name.upper()}`" if flat.has_variable else "- (a table)"
        if name in NOT_IN_GATEWAY:
            of_gateway = (f"- ({NOT_IN_GATEWAY[name]})", "- (as the gateway)")
        else:
            of_gateway = _gateway_cells(settings_by_option[name], flags)
        in_handler = f"`{name}`" if name in handler else f'`config["{name}"]`'
        if name in OWN_NAMES:
            in_telemetry = f"`KPL_OTEL_{variable_suffix(own_names.get(name, name))}`"
        else:
            in_telemetry = f"`KPL_OTEL_{name.upper()}`" if flat.has_variable else "- (a table: pass `config`)"
        yield place, variable, *of_gateway, in_handler, in_telemetry
    for name in described(IngestSettings):
        yield f"`{name}`", *(_ONLY_GATEWAY,), *_gateway_cells(name, flags), _ONLY_GATEWAY, _ONLY_GATEWAY
    for name in handler:
        if name not in flat_options(Config):
            in_telemetry = "`KPL_OTEL_PARTITION_KEY`" if name == "partition_key" else _ONLY_HANDLER
            yield f"`{name}`", _ONLY_HANDLER, _ONLY_HANDLER, _ONLY_HANDLER, f"`{name}`", in_telemetry
    for name in telemetry:
        if name not in OWN_NAMES.values():
            variable = f"`KPL_OTEL_{variable_suffix(name)}`"
            yield f"`{name}`", _ONLY_TELEMETRY, _ONLY_TELEMETRY, _ONLY_TELEMETRY, _ONLY_TELEMETRY, variable


def places() -> str:
    """Return where each option can be set, and the reason for each place where it cannot."""
    head = ("option", "producer", "gateway", "`kpl serve`", "log handler", "OpenTelemetry")
    return _table(head, _place_rows())


def metrics() -> str:
    """Return the table of all metrics."""
    rows = (
        (f"`{metric.name}`", str(metric.kind), ", ".join(f"`{label}`" for label in metric.labels), metric.meaning)
        for metric in METRICS.values()
    )
    return _table(("metric", "kind", "labels", "meaning"), rows)


def _commands(command: object, name: str) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        for each in sorted(command.commands):
            yield from _commands(command.commands[each], f"{name} {each}")
    elif isinstance(command, TyperCommand):
        yield name, command


def _parameter_rows(command: TyperCommand) -> Iterator[tuple[str, ...]]:
    for parameter in command.params:
        meaning = getattr(parameter, "help", None) or ""
        if isinstance(parameter, TyperOption):
            names = ", ".join(f"`{text}`" for text in [*parameter.opts, *parameter.secondary_opts])
            default = "" if parameter.default in (None, False) or parameter.required else f"`{parameter.default}`"
            yield names, default, meaning
        else:
            yield f"`{(parameter.name or '').upper()}`", "", meaning


def commands() -> str:
    """Return every command with its help and its options."""
    parts = []
    for name, command in _commands(typer.main.get_command(app), "kpl"):
        text = re.sub(r"\n(?!\n)", " ", inspect.cleandoc(command.help or "").replace("\n\n", "\0")).replace(
            "\0", "\n\n"
        )
        parts.append(f"## `{name}`\n\n{text}\n\n{_table(('option', 'default', 'meaning'), _parameter_rows(command))}")
    return "\n\n".join(parts)


def routes() -> str:
    """Return every route of the gateway with its responses, from its OpenAPI document."""
    document = openapi_document(load_settings(endpoint_url="http://127.0.0.1:4567", region="us-east-1"))
    parts = []
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method not in {"get", "post"}:
                continue
            answers = (
                (status, " ".join(str(answer.get("description", "")).split()))
                for status, answer in sorted(operation["responses"].items())
            )
            text = operation.get("description", "") or operation.get("summary", "")
            parts.append(f"## `{method.upper()} {path}`\n\n{text}\n\n{_table(('status', 'when'), answers)}")
    return "\n\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "environment": environment,
    "settings": settings,
    "handler": handler,
    "options": options,
    "producer": producer,
    "places": places,
    "metrics": metrics,
    "commands": commands,
    "routes": routes,
}
