"""Options from environment variables: a prefix and the option's flat name in capitals, as in `KPL_SPOOL_MAX_BYTES`."""

import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kpl_core.options.flat_options import FlatOption
from kpl_core.options.option import DescribedOption
from kpl_core.options.validation import nearest

PREFIX: Final = "KPL_"
# The prefixes of our other programs, and the variable that the import of this package reads.
_OTHERS: Final = ("KPL_INGEST_", "KPL_OTEL_", "KPL_GATEWAY_", "KPL_KERNELS")
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
_NUMBER: Final = re.compile(r"[+-]?(\d{1,40})(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)
# What Kubernetes sets in every pod for a service whose name begins like a prefix of ours, such as `kpl-ingest`.
_SERVICE_LINK: Final = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")


class SetVariable(NamedTuple):
    """A variable that sets an option."""

    name: str
    variable: str
    text: str


def set_variables(environment: Mapping[str, str], names: Iterable[str], prefix: str) -> Iterator[SetVariable]:
    """Yield the variables of these options that are set. An empty one counts as not set."""
    for name in names:
        text = environment.get(prefix + name.upper(), "").strip()
        if text:
            yield SetVariable(name, prefix + name.upper(), text)


def value_of(option: DescribedOption, text: str, name: str) -> Any:  # noqa: ANN401 - of the option's own type
    """Return the value that a text has for an option, checked; `name` is the variable or flag that has the text.

    Raises:
        ConfigError: it is none. The message has `name` and, unless it may be a secret, the text.
    """
    value: Any = text
    if bool in option.kinds and text.lower() in _FLAGS:
        value = _FLAGS[text.lower()]
    elif option.is_number and (match := _NUMBER.fullmatch(text)) is not None:
        value = float(text) if match[2] or match[3] else int(text)
    elif frozenset[str] in option.kinds:
        value = frozenset(word.strip() for word in text.split(",") if word.strip())
    return option.checked(value, name)


def values_from(
    environment: Mapping[str, str], options: Mapping[str, FlatOption], prefix: str = PREFIX
) -> dict[str, Any]:
    """Return those of the flat `options` that the environment sets.

    Raises:
        ConfigError: a value is wrong. The message has the variable.
    """
    names = (name for name, flat in options.items() if flat.has_variable)
    return {
        name: value_of(options[name].option, text, variable)
        for name, variable, text in set_variables(environment, names, prefix)
    }


def variables_of(options: Mapping[str, FlatOption]) -> set[str]:
    """Return the variables of these options, without the prefix."""
    return {name.upper() for name, flat in options.items() if flat.has_variable}


def is_service_link(name: str, value: str) -> bool:
    """Return True for a variable that Kubernetes sets for a service. `..._PORT` is one if its value is an address."""
    return _SERVICE_LINK.fullmatch(name.upper()) is not None or (
        name.upper().endswith("_PORT") and _ADDRESS.match(value) is not None
    )


def warn_of_unknown(
    environment: Mapping[str, str], known: Collection[str], prefix: str = PREFIX, owner: str = "the producer"
) -> None:
    """Warn once of the variables with the prefix that are not `known`, such as misspelt ones.

    It is not an error, because other programs may use the prefix. Those that Kubernetes sets for a service say nothing.
    """
    others = tuple(each for each in _OTHERS if each != prefix)
    ours = sorted(
        name
        for name, value in environment.items()
        if name.startswith(prefix) and not name.startswith(others) and not is_service_link(name, value)
    )
    unknown = [name for name in (each.removeprefix(prefix) for each in ours) if name not in known]
    found = [
        prefix + name if (near := nearest(name, known)) is None else f"{prefix}{name} (did you mean {prefix}{near}?)"
        for name in unknown
    ]
    if found:
        message = f"environment variables that are not options of {owner} are ignored: {', '.join(found)}"
        # Of the caller of `from_env`.
        warnings.warn(message, UserWarning, stacklevel=3)
