"""Where the gateway's settings come from: arguments or flags, the environment, a TOML file, defaults, in this order.

Every source has the same names: `spool_max_bytes` in the file is `KPL_INGEST_SPOOL_MAX_BYTES` in the environment. A
secret has a variable, `admin_key`, or is named by `admin_key_file` and `admin_key_env`; a file must not hold it.
"""

import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from kpl_core import Config, ConfigError, StreamConfig
from kpl_core.options.environment import is_service_link, value_of
from kpl_core.options.flat_options import flat_options
from kpl_core.options.option import DescribedOption, Option, described
from kpl_core.options.validation import did_you_mean, nearest, shown_url
from kpl_integrations.ingest.settings import PRODUCER_DEFAULTS, SPOOL_DEFAULTS, IngestSettings
from kpl_integrations.ingest.tenants.credentials import Secret
from kpl_integrations.ingest.tenants.tenants_file import SecretReference, read_checked, require_not_writable_by_others

_log: Final = logging.getLogger(__name__)
PREFIX: Final = "KPL_INGEST_"
# Settings of earlier versions that do nothing any more.
_ENDED: Final = frozenset({"fast_path"})
# The producer's options that a gateway has no setting for, and why.
NOT_IN_GATEWAY: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
        "AWS' variables, a profile or a role have the credentials",
    ),
    "botocore": "AWS' variables and profiles have the same; a proxy is in HTTPS_PROXY",
    "ordering": "tenants share a shard fairly, which does not keep the order of a key",
    **dict.fromkeys(
        ("fairness", "fairness_weights", "fairness_default_weight", "fairness_max_buffer_per_flow"),
        "each tenant is a flow; the tenants file has its weight",
    ),
    "spool_mode": "always write_ahead, which ack=spooled needs",
    "coordination_worker_id": "made from the name of the process",
}
# Names that the gateway itself has.
_RENAMED: Final = {"max_connections": "kinesis_max_connections"}
# What a gateway's producer may have less of. With "fail", `queued` would get 202 for records that then fail.
_NARROWED: Final[Mapping[str, tuple[Any, ...]]] = {"spool_failure": (Literal["bypass", "refuse"],)}
# Settings whose option of `kpl serve` has another name, because it has one of several values.
_FLAGS: Final = {"allowed_hosts": "allow_host"}
# The time between two sync rounds. A local store or Redis answers within milliseconds; AWS charges for each call.
_QUICK_SECONDS: Final = 1.0
_CHARGED_SECONDS: Final = 5.0
_CHARGED: Final = ("s3://", "dynamodb://")
_KEY: Final = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")
_TABLE: Final = re.compile(r"""\s*\[\s*(.+?)\s*\]""")
_LETTER_SINKS: Final = ("dead_letters_sqs", "dead_letters_s3")
_FILE: Final = Option("The private file that has it.")
_ENV: Final = Option("The variable that has it.")


class Setting(NamedTuple):
    """A setting that has a value: the value, and where, such as "KPL_INGEST_PORT" or "gateway.toml:3".

    A secret may have a `reference`: the name and value of the setting that says where it is.
    """

    value: Any
    origin: str
    reference: tuple[str, Any] | None = None


class LoadedSettings(NamedTuple):
    """Settings, and where each comes from by flat name; a name without an entry has its default."""

    settings: IngestSettings
    made: Mapping[str, Setting]


_NO_PRESETS: Final[Mapping[str, Setting]] = MappingProxyType({})


def gateway_options() -> dict[str, DescribedOption]:
    """Return every setting of the gateway by name: its own, its producer's, and the references to secrets."""
    found = dict(described(IngestSettings))
    for name, flat in flat_options(Config).items():
        if name not in NOT_IN_GATEWAY:
            setting = _RENAMED.get(name, name)
            found[setting] = flat.option._replace(name=setting, kinds=_NARROWED.get(name, flat.option.kinds))
    for name, option in [*found.items()]:
        if option.option.secret:
            found[f"{name}_file"] = DescribedOption(f"{name}_file", (Path,), True, None, _FILE)  # noqa: FBT003
            found[f"{name}_env"] = DescribedOption(f"{name}_env", (str,), True, None, _ENV)  # noqa: FBT003
    return found


def load_settings(**given: object) -> IngestSettings:
    """Return the settings. `given` has precedence over the environment; None counts as not given.

    Raises:
        ConfigError: a setting is unknown or invalid. The message repeats no value that may be a secret.
    """
    return find_settings(given).settings


def find_settings(
    given: Mapping[str, object],
    *,
    file: Path | None = None,
    file_text: str | None = None,
    environment: Mapping[str, str] = os.environ,
    assigned: Mapping[str, str] | None = None,
    presets: Mapping[str, Setting] = _NO_PRESETS,
) -> LoadedSettings:
    """Return the settings of all sources. A command also has those `assigned` with `--set NAME=VALUE`.

    `file` is read, unless `file_text` is what it had. The `presets` take the place of defaults.

    Raises:
        ConfigError: as `load_settings`. The message has the flag, the variable, or file and line.
    """
    options = gateway_options()
    layers = [
        _arguments(given, options) if assigned is None else _flags(given, assigned, options),
        _variables(environment, options),
        {} if file is None else _of_file(file, read_settings_file(file) if file_text is None else file_text, options),
        presets,
    ]
    made: dict[str, Setting] = {}
    for name, option in options.items():
        found = (_found(name, option, layer, environment) for layer in layers if option.option not in {_FILE, _ENV})
        if (setting := next((each for each in found if each is not None), None)) is not None:
            made[name] = setting
    try:
        settings = _built({name: setting.value for name, setting in made.items()})
    except ConfigError as error:
        raise ConfigError(_with_origins(str(error), made)) from None
    return LoadedSettings(settings, made)


def read_settings_file(path: Path) -> str:
    """Return the text of the file of settings.

    Raises:
        ConfigError: it cannot be read, or other users may change it.
    """
    return read_checked(path, "the configuration", require_not_writable_by_others)


def flag_of(setting: str) -> str:
    """Return the option of `kpl serve` for a setting, if there is one."""
    return f"--{_FLAGS.get(setting, setting).replace('_', '-')}"


def producer_name(setting: str) -> str:
    """Return the flat name that the producer has for a setting."""
    return next((name for name, renamed in _RENAMED.items() if renamed == setting), setting)


def _found(
    name: str, option: DescribedOption, layer: Mapping[str, Setting], environment: Mapping[str, str]
) -> Setting | None:
    """Return what a layer says about a setting, which for a secret may be where it is."""
    if not option.option.secret:
        return layer.get(name)
    places = [place for place in (name, f"{name}_file", f"{name}_env") if place in layer]
    if len(places) > 1:
        message = f"{places[0]} and {places[1]} are both set; give one of them"
        raise ConfigError(_with_origins(message, layer))
    if not places or places[0] == name:
        return layer.get(name)
    setting = layer[places[0]]
    is_file = places[0].endswith("_file")
    reference = SecretReference(name, None if is_file else setting.value, setting.value if is_file else None)
    value = _checked(option, reference.read(environment), name)
    return Setting(value, f"{setting.origin} ({setting.value})", (places[0], setting.value))


def _with_origins(message: str, made: Mapping[str, Setting]) -> str:
    """Return the message with where each setting that it names comes from. An argument is known by its name."""
    named = dict.fromkeys(word for word in re.findall(r"\w+", message) if word in made and made[word].origin != word)
    places = "; ".join(f"{name}: {made[name].origin}" for name in named)
    return f"{message} ({places})" if places else message


def _checked(option: DescribedOption, value: Any, shown: str) -> Any:  # noqa: ANN401 - of the option's own type
    return option.checked(Secret(value) if Secret in option.kinds and isinstance(value, str) else value, shown)


def _flags(
    given: Mapping[str, object], assigned: Mapping[str, str], options: Mapping[str, DescribedOption]
) -> dict[str, Setting]:
    if twice := [name for name in assigned if given.get(name) is not None]:
        message = f"--set {twice[0]} and {flag_of(twice[0])} are both set; give one of them"
        raise ConfigError(message)
    if secrets := [name for name, text in assigned.items() if _holds_secret(name, text, options)]:
        message = (
            f"--set {secrets[0]} is a secret, and other users can read a command line; name the variable that has it "
            f"with --set {secrets[0]}_env=NAME, or its file with --set {secrets[0]}_file=PATH"
        )
        raise ConfigError(message)
    flags = {flag_of(name): (name, value) for name, value in given.items()}
    return _given({**flags, **{f"--set {name}": (name, text) for name, text in assigned.items()}}, options)


def _arguments(given: Mapping[str, object], options: Mapping[str, DescribedOption]) -> dict[str, Setting]:
    return _given({name: (name, value) for name, value in given.items()}, options)


def _given(given: Mapping[str, tuple[str, object]], options: Mapping[str, DescribedOption]) -> dict[str, Setting]:
    """Return the settings of what a caller gave; the keys are how the caller knows each."""
    found = {}
    for shown, (name, value) in given.items():
        if value is None or _has_ended(name, shown):
            continue
        _require_known(name, options, shown)
        option = options[name]
        is_text = isinstance(value, str) and not option.option.secret
        found[name] = Setting(value_of(option, str(value), shown) if is_text else _checked(option, value, shown), shown)
    return found


def _variables(environment: Mapping[str, str], options: Mapping[str, DescribedOption]) -> dict[str, Setting]:
    # As pydantic-settings did, so that `kpl_ingest_port` works.
    by_upper = {
        name.upper(): name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX)
        and not (is_service_link(name, value) or _has_ended(name.lower().removeprefix(PREFIX.lower()), name))
    }
    known = {f"{PREFIX}{name}".upper(): name for name in options}
    if unknown := sorted(name for upper, name in by_upper.items() if upper not in known):
        # The prefix is the same in all of them, so it says nothing about what was meant.
        near = nearest(unknown[0].upper().removeprefix(PREFIX), [name.upper() for name in options])
        meant = "; `kpl serve --print-config` lists all" if near is None else f"; did you mean {PREFIX}{near}?"
        more = f" (nor is {', '.join(unknown[1:])})" if unknown[1:] else ""
        message = f"{unknown[0]} is not a setting of the gateway{more}{meant}"
        raise ConfigError(message)
    found = {}
    for name, option in options.items():
        variable = by_upper.get(f"{PREFIX}{name}".upper())
        text = "" if variable is None else environment[variable].strip()
        # A key without a value is a mistake that would leave the gateway without an administrator.
        if variable is None or not (text or name == "admin_key"):
            continue
        if option.is_mapping:
            message = f"{variable} is set, and {name} is a table; write it into a file, and name that with --config"
            raise ConfigError(message)
        value = _checked(option, text, variable) if option.option.secret else value_of(option, text, variable)
        found[name] = Setting(value, variable)
    return found


def _has_ended(name: str, shown: str) -> bool:
    if name in _ENDED:
        _log.warning("%s does nothing any more; remove it", shown)
    return name in _ENDED


def _require_known(name: str, options: Mapping[str, DescribedOption], shown: str) -> None:
    if name not in options:
        fix = did_you_mean(name, options) or "; `kpl serve --print-config` lists all"
        message = f"{shown} is not a setting of the gateway{fix}"
        raise ConfigError(message)


def _of_file(path: Path, text: str, options: Mapping[str, DescribedOption]) -> dict[str, Setting]:
    """Return the settings of a TOML file.

    Raises:
        ConfigError: the text is not TOML, or has an unknown name, a wrong value or a secret.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{path} is not TOML: {error if isinstance(error, ValueError) else 'it is nested too deep'}"
        raise ConfigError(message) from None
    lines = dict(_lines(text))
    found = {}
    for name, value in table.items():
        place = f"{path}:{lines.get((name,), lines.get((name, ''), 1))}"
        if _has_ended(name, f"{place}: {name}"):
            continue
        _require_known(name, options, f"{place}: {name}")
        option = options[name]
        if _holds_secret(name, value, options):
            message = (
                f"{place}: {name} is a secret, which a configuration file must not hold; name the variable that has it "
                f"with {name}_env, or its file with {name}_file"
            )
            raise ConfigError(message)
        if name == "streams":
            found[name] = Setting(_streams(path, value, lines), place)
            continue
        # TOML has lists only.
        plain = frozenset(value) if frozenset[str] in option.kinds and isinstance(value, list) else value
        found[name] = Setting(_checked(option, plain, f"{place}: {name}"), place)
    return found


def _holds_secret(name: str, value: object, options: Mapping[str, DescribedOption]) -> bool:
    """Return True for a secret, except for the URL of a store that has no password."""
    if name not in options or not options[name].option.secret:
        return False
    return name != "coordination" or not isinstance(value, str) or shown_url(value) != value


def _streams(path: Path, value: Any, lines: Mapping[tuple[str, ...], int]) -> dict[str, StreamConfig]:  # noqa: ANN401
    """Return the options of single streams: a table [streams.NAME] for each."""
    made: dict[str, StreamConfig] = {}
    for stream, options in (value if isinstance(value, dict) else {"": value}).items():
        place = f"{path}:{lines.get(('streams', stream), 1)}: [streams.{stream}]"
        if not isinstance(options, dict):
            message = f"{place} is not a table of options; write [streams.NAME] before the options"
            raise ConfigError(message)
        for name, option in options.items():
            # One at a time, so that an error has its line.
            line = lines.get(("streams", stream, name), 1)
            try:
                Config.from_mapping({"streams": {stream: {name: option}}})
            except ConfigError as error:
                message = f"{path}:{line}: {error}"
                raise ConfigError(message) from None
        made[stream] = StreamConfig(**options)
    return made


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the number of the line of each name, with the tables that it is in.

    A line of a text over several lines may look like a name; then the number of that name may be wrong.
    """
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _TABLE.match(line)) is not None:
            table = tuple(part.strip(" \"'") for part in _parts(header[1]))
            yield table, number
            yield (table[0], ""), number
        elif (key := _KEY.match(line)) is not None:
            yield (*table, key[1]), number


def _parts(header: str) -> Sequence[str]:
    """Return the parts of a table's name; a quoted one may have dots."""
    return re.findall(r'"[^"]*"|\'[^\']*\'|[^.\s]+', header)


def _built(values: Mapping[str, Any]) -> IngestSettings:
    """Return the settings of these flat values, which are checked each for itself."""
    _require_place_of_letters(values)
    own, producers = described(IngestSettings), dict(PRODUCER_DEFAULTS)
    if values.get("spool") is not None:
        producers.update(SPOOL_DEFAULTS)
    if values.get("coordination") is not None:
        is_charged = values["coordination"].startswith(_CHARGED)
        producers["coordination_interval_seconds"] = _CHARGED_SECONDS if is_charged else _QUICK_SECONDS
    if any(values.get(name) for name in _LETTER_SINKS):
        producers["dead_letters"] = True
    given = {producer_name(name): value for name, value in values.items() if name not in own}
    for name in ("breaker", "tiers"):
        # A group that is switched off has no defaults, and none of its options may be set.
        if given.get(name) is False:
            producers.pop(name)
    return IngestSettings(
        **{name: value for name, value in values.items() if name in own},
        producer=Config.from_mapping({**producers, **given}),
    )


def _require_place_of_letters(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if dead letters are off and have a place, or are on and have none or two."""
    letters = values.get("dead_letters")
    sinks = [name for name in _LETTER_SINKS if values.get(name)]
    if letters is False:
        if sinks:
            message = f"dead_letters is false, and {sinks[0]} is set; remove one of them"
            raise ConfigError(message)
        return
    if isinstance(letters, Path | str) and values.get("spool") is not None:
        message = (
            f"dead_letters is {str(letters)!r}, and spool is set; remove dead_letters, because the spool's own file "
            f"holds them"
        )
        raise ConfigError(message)
    flat = flat_options(Config)
    options = [name for name in values if name in flat and flat[name].group == "dead_letters"]
    if options and not sinks and letters in {None, True} and values.get("spool") is None:
        said = "dead_letters is true" if letters else f"{options[0]} is set"
        message = f"{said}, and there is no place; give a path, spool, dead_letters_sqs or dead_letters_s3"
        raise ConfigError(message)
