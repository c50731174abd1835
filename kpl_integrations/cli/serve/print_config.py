"""`kpl serve --print-config`: every setting as a TOML file, each with a comment that says where its value comes from.

The output can be the file of `--config`: what has no effect or must not be in a file is a comment.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kpl_core import Config, StreamConfig
from kpl_core.options.flat_options import flat_options
from kpl_core.options.option import REQUIRED, described
from kpl_core.options.validation import shown_url
from kpl_integrations.cli.terminal import printable
from kpl_integrations.ingest.settings_sources import LoadedSettings, gateway_options, producer_name

_MASK = "***"


def printed_settings(loaded: LoadedSettings) -> str:
    """Return all settings as TOML, secrets masked. Single streams are at the end, because they are tables."""
    return "\n".join([*_lines(loaded), ""])


def _lines(loaded: LoadedSettings) -> Iterator[str]:
    settings, made = loaded
    flat, own = flat_options(Config), described(type(settings))
    masked: set[str] = set()
    for name, option in gateway_options().items():
        producers = None if name in own else flat.get(producer_name(name))
        if (name not in own and producers is None) or name == "streams":
            continue
        setting = made.get(name)
        origin = "default" if setting is None else printable(setting.origin)
        if setting is not None and setting.reference is not None:
            reference, place = setting.reference
            yield f"{reference} = {_toml(place)}  # {origin}"
            continue
        if producers is None:
            value, has_effect = getattr(settings, name), True
        else:
            value, has_effect = _of_producer(settings.producer, producers.group, producers.member, name)
        if option.option.secret and value is not None:
            is_shown = isinstance(value, str) and shown_url(value) == value
            masked |= set() if is_shown else {name}
            yield f"{name} = {_toml(value)}  # {origin}" if is_shown else f'# {name} = "{_MASK}"  # {origin}'
        elif value is None or not has_effect:
            default = option.default if option.default not in (None, REQUIRED) else ""
            reason = origin if value is None and has_effect else f"{origin}, without effect"
            yield f"# {name} = {_toml(default)}  # {reason}"
        elif producers is not None and producers.group in masked:
            # Without the masked one it would be an error.
            yield f"# {name} = {_toml(value)}  # {origin}, belongs to {producers.group}"
        else:
            yield f"{name} = {_toml(value)}  # {origin}"
    for stream, options in settings.producer.streams.items():
        yield from _stream(stream, options, made["streams"].origin)


def _of_producer(config: Config, group: str, member: str, name: str) -> tuple[Any, bool]:
    """Return the value of an option of the producer, and whether it has an effect."""
    if not group:
        return getattr(config, member), True
    found = getattr(config, group)
    if name == group and member:
        # The name of a group is its leading option; a group that may be without it is there, or is not.
        lead = None if found is None else getattr(found, member)
        return (True if lead is None and found is not None else lead), True
    return (found is not None, True) if name == group else (getattr(found, member, None), found is not None)


def _stream(stream: str, options: StreamConfig, origin: str) -> Iterator[str]:
    yield f"\n[streams.{_quoted(stream)}]  # {printable(origin)}"
    for name, value in options.overrides().items():
        yield f"{name} = {_toml(value)}"


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case frozenset():
            return f"[{', '.join(map(_quoted, sorted(value)))}]"
        case Mapping():
            return "{" + ", ".join(f"{_quoted(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    return _quoted(value)


def _quoted(value: object) -> str:
    """Return a text as TOML has it: as in JSON, but without surrogates, and with DEL escaped."""
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
