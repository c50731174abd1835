"""One description of an option, which `Config`, the adapters, their variables and the pages share.

A class of options is a dataclass or a Struct whose fields have types such as

    max_connections: Annotated[int, Option("Connections to the endpoint.", 1, 1_000, "connections")] = 24

A reader, an editor and mypy see a field of type int. `described` has name, type, bounds, unit, default and sentence as
data, and `check_options` checks an instance. Code that takes a value from elsewhere, such as a variable or a file,
checks it with the same description and the name by which its user knows it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from kpl_core.options.validation import (
    Bound,
    FrozenMapping,
    require_choice,
    require_endpoint_url,
    require_flag,
    require_kind,
    require_number,
    require_path,
    require_region,
)

# The default of an option that must be given.
REQUIRED: Final = dataclasses.MISSING
_WANTED: Final[Mapping[Any, str]] = {
    str: "a str",
    bool: "True or False",
    Mapping: "a mapping",
    frozenset: "a frozenset of str",
    Callable: "a function",
}


class Option(NamedTuple):
    """What an option means, in one sentence, and what it may be.

    `smallest`, `largest`, `unit` and `above` are those of `Bound`. `kpl` is the KPL's name of it. A `secret` appears in
    no repr, and a configuration file may only say where it is. `check` raises ConfigError, with the given name, for
    what the type does not show.
    """

    meaning: str
    smallest: float = -math.inf
    largest: float = math.inf
    unit: str = ""
    above: bool = False
    kpl: str = ""
    secret: bool = False
    check: Callable[[str, Any], object] | None = None


# What the producer, the log handler and the exporters all have.
Region = Annotated[
    str | None, Option("The AWS region; None: as for any AWS client.", kpl="Region", check=require_region)
]
EndpointUrl = Annotated[
    str | None,
    Option(
        "An endpoint other than AWS' own, with its scheme; None: as for any AWS client.",
        kpl="KinesisEndpoint, KinesisPort",
        check=require_endpoint_url,
    ),
]


class DescribedOption(NamedTuple):
    """An option of a class: its field, with the description from its type. `kinds` are its types without None."""

    name: str
    kinds: tuple[Any, ...]
    is_optional: bool
    default: Any
    option: Option

    @property
    def is_number(self) -> bool:
        """Return True for an int or a float."""
        return bool({int, float} & {*self.kinds})

    @property
    def is_mapping(self) -> bool:
        """Return True for a mapping, which no variable can have."""
        return any(get_origin(kind) is Mapping for kind in self.kinds)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the allowed words; empty if the option is not a choice of words."""
        return get_args(self.kinds[0]) if get_origin(self.kinds[0]) is Literal else ()

    @property
    def bound(self) -> Bound | None:
        """Return the bounds of the number; None if the option is not a number."""
        if not self.is_number:
            return None
        _, smallest, largest, unit, above, *_ = self.option
        return Bound(smallest, largest, unit, whole=float not in self.kinds, optional=self.is_optional, above=above)

    def checked(self, value: Any, name: str | None = None) -> Any:  # noqa: ANN401 - of the option's own type
        """Return the value as the class keeps it: a path as a Path, a mapping as a copy that cannot be changed.

        Raises:
            ConfigError: it has another type or is out of its bounds. The message has `name`, by default the option's.
        """
        name = name or self.name
        if value is None and self.is_optional:
            return None
        is_flag = bool in self.kinds and isinstance(value, bool)
        if (bound := self.bound) is not None and not is_flag:
            require_number(name, value, bound)
        elif self.choices:
            require_choice(name, value, self.choices)
        elif self.kinds == (bool,):
            require_flag(name, value)
        elif Path in self.kinds and not is_flag:
            value = require_path(name, value)
        else:
            # A mapping, frozenset or str is what it says; a str would be taken for a collection of single letters.
            require_kind(name, value, tuple(get_origin(kind) or kind for kind in self.kinds), self._wanted())
            value = FrozenMapping(value) if isinstance(value, Mapping) else value
        if self.option.check is not None:
            self.option.check(name, value)
        return value

    def _wanted(self) -> str:
        words = " or ".join(_WANTED.get(get_origin(kind) or kind, f"a {type_name(kind)}") for kind in self.kinds)
        return f"{words}, or None" if self.is_optional else words


def type_name(kind: Any) -> str:  # noqa: ANN401 - a class or a generic alias
    """Return a type as a reader of the pages and of an error knows it."""
    if kind is Path:
        return "path"
    if (origin := get_origin(kind)) is Callable:
        return "function"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_name, get_args(kind)))}]"
    return str(getattr(kind, "__name__", kind))


# The descriptions of each class; reading them takes a millisecond.
_DESCRIBED: Final[dict[type[Any], Mapping[str, DescribedOption]]] = {}


def described(cls: type[Any]) -> Mapping[str, DescribedOption]:
    """Return the options of a dataclass or a Struct by name, in their order. A field without `Option` is none."""
    if cls not in _DESCRIBED:
        _DESCRIBED[cls] = _read(cls)
    return _DESCRIBED[cls]


def _read(cls: type[Any]) -> dict[str, DescribedOption]:
    defaults = _defaults(cls)
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        option = next((each for each in get_args(hint)[1:] if isinstance(each, Option)), None)
        if get_origin(hint) is not Annotated or option is None or name not in defaults:
            continue
        kind = get_args(hint)[0]
        kinds = get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)
        without = tuple(each for each in kinds if each is not NoneType and not (each is str and Path in kinds))
        found[name] = DescribedOption(name, without, NoneType in kinds, defaults[name], option)
    return found


def _defaults(cls: type[Any]) -> dict[str, Any]:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else msgspec.structs.fields(cls)
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    return {
        field.name: field.default
        if field.default not in missing
        else REQUIRED
        if field.default_factory in missing
        else field.default_factory()
        for field in fields
    }


def check_options(options: Any) -> None:  # noqa: ANN401 - an instance of any class of options
    """Check every option of an instance, and keep a path as a Path and a mapping as a copy.

    Raises:
        ConfigError: an option has another type or is out of its bounds.
    """
    for name, option in described(type(options)).items():
        value = getattr(options, name)
        checked = option.checked(value)
        if checked is not value:
            if isinstance(options, msgspec.Struct):
                msgspec.structs.force_setattr(options, name, checked)
            else:
                object.__setattr__(options, name, checked)
