"""Options from environment variables: `KPL_` and the option's name in capitals.

Every option whose value is a word, a number or a flag has a variable. The other options are objects; of these, the
spool, the dead letters and the coordination store have a variable for the one value that each deployment sets.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kpl_core.errors import ConfigError
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.options.validation import nearest

PREFIX: Final = "KPL_"
# The prefixes of our other programs.
_OTHERS: Final = ("KPL_INGEST_", "KPL_OTEL_", "KPL_GATEWAY_")
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
_NUMBER: Final = re.compile(r"[+-]?(\d{1,40})(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)
# The options that are objects: what their variable has, and how the object is made of it.
_OBJECTS: Final[Mapping[str, tuple[str, Any]]] = {
    "spool": ("the path of its file", lambda text: SpoolOptions(path=Path(text))),
    "dead_letters": ("the path of their file", lambda text: DeadLetterOptions(path=Path(text))),
    "coordination": ("the URL of the store", lambda text: CoordinationOptions(store=text)),
}
_NONE: Final = {"botocore", "streams", "fairness", "breaker", "tiers"}


def variable_of(option: str, hint: object) -> tuple[str, str] | None:
    """Return the variable of an option and what its value is, or None for an option without one."""
    if option in _NONE:
        return None
    if option in _OBJECTS:
        return PREFIX + option.upper(), _OBJECTS[option][0]
    shown = str(hint)
    if shown.startswith("frozenset"):
        return PREFIX + option.upper(), "words with commas"
    if hint is bool:
        return PREFIX + option.upper(), "true or false"
    is_number = "int" in shown or "float" in shown
    return PREFIX + option.upper(), "a number" if is_number else "a word"


def options_from(environment: Mapping[str, str], hints: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of these types that the environment sets. An empty variable counts as not set.

    Raises:
        ConfigError: a value has the wrong type. The message has the variable and the value; no variable has a secret.
    """
    found: dict[str, Any] = {}
    for option, hint in hints.items():
        variable = variable_of(option, hint)
        text = "" if variable is None else environment.get(variable[0], "").strip()
        if variable is None or not text:
            continue
        name, kind = variable
        if option in _OBJECTS:
            found[option] = _OBJECTS[option][1](text)
        elif kind == "words with commas":
            found[option] = frozenset(word.strip() for word in text.split(",") if word.strip())
        elif kind == "true or false":
            found[option] = _flag(name, text)
        elif kind == "a number":
            found[option] = _number(name, text)
        else:
            found[option] = _FLAGS.get(text.lower(), text) if option == "verify_ssl" else text
    return found


def warn_of_unknown(environment: Mapping[str, str], hints: Mapping[str, object]) -> None:
    """Warn once of the variables with our prefix that are no option, such as misspelt ones.

    It is no error, because other programs may use the prefix.
    """
    known = {variable[0] for option, hint in hints.items() if (variable := variable_of(option, hint)) is not None}
    unknown = [name for name in sorted(environment) if name.startswith(PREFIX) and name not in known]
    found = [
        name if (near := nearest(name, known)) is None else f"{name} (did you mean {near}?)"
        for name in unknown
        if not name.startswith(_OTHERS)
    ]
    if found:
        message = f"environment variables that are no option of the producer are ignored: {', '.join(found)}"
        # Of the caller of `from_env`.
        warnings.warn(message, UserWarning, stacklevel=3)


def _flag(name: str, text: str) -> bool:
    flag = _FLAGS.get(text.lower())
    if flag is None:
        message = f"{name} is {text!r}; set it to true or false"
        raise ConfigError(message)
    return flag


def _number(name: str, text: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        message = f"{name} is {text!r}; set it to a number"
        raise ConfigError(message)
    return float(text) if match[2] or match[3] else int(text)
