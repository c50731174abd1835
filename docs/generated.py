"""Generate the tables of the reference pages from the code: a hook of mkdocs.

The hook replaces each `<!-- generated: NAME -->` of a page by the table of that name. So a page can
never list an option, command or metric that does not exist.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterator

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from kpl_core import Config, CoordinationOptions, FairnessPolicy, RateLimitPolicy, StreamConfig
from kpl_core.options.environment import variable_of
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, SpoolOptions, TierPolicy
from kpl_integrations.cli.app import app
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.openapi import openapi_document
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.metrics.catalogue import METRICS

__all__ = ["GENERATED", "on_page_markdown"]

_MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_LONGEST = 60


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


def _type_name(hint: object) -> str:
    name = inspect.formatannotation(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", name)


def _option_rows(cls: type) -> Iterator[tuple[str, ...]]:
    hints = typing.get_type_hints(cls)
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.default is inspect.Parameter.empty:
            default = "required"
        else:
            # The signature of a dataclass shows only its factory; an instance has the value.
            default = repr(getattr(cls(), name) if "factory" in repr(parameter.default) else parameter.default)
            default = "see [Configuration](../configuration.md)" if len(default) > _LONGEST else f"`{default}`"
        yield f"`{name}`", f"`{_type_name(hints[name])}`", default


def options() -> str:
    """Return a table for each class of options, with types and defaults."""
    parts = []
    for cls in (
        Config,
        StreamConfig,
        SpoolOptions,
        DeadLetterOptions,
        BreakerPolicy,
        TierPolicy,
        FairnessPolicy,
        RateLimitPolicy,
        CoordinationOptions,
    ):
        summary = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        table = _table(("option", "type", "default"), _option_rows(cls))
        parts.append(f"## `{cls.__module__}.{cls.__name__}`\n\n{summary}\n\n{table}")
    return "\n\n".join(parts)


def environment() -> str:
    """Return the table of the variables that `Config.from_env` reads."""
    hints = typing.get_type_hints(Config)
    found = ((name, variable_of(name, hints[name])) for name in inspect.signature(Config).parameters)
    rows = ((f"`{variable[0]}`", variable[1], f"`{name}`") for name, variable in found if variable is not None)
    return _table(("variable", "value", "option"), rows)


def settings() -> str:
    """Return the table of the gateway's settings."""
    rows = (
        (f"`KPL_INGEST_{name.upper()}`", f"`{_type_name(field.annotation)}`", f"`{field.default!r}`")
        for name, field in IngestSettings.model_fields.items()
    )
    return _table(("variable", "type", "default"), rows)


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
    "options": options,
    "metrics": metrics,
    "commands": commands,
    "routes": routes,
}
