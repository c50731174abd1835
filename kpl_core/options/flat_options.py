"""Every option of the producer under one flat name, as variables, files and `dictConfig` have them.

    max_connections = 24            an option of `Config`
    spool = "/var/lib/app/spool.db" the option that gives a group its name: here the path of `SpoolOptions`
    spool_max_bytes = 50000000000   another option of that group
    breaker = true                  a group that needs no option of its own

An option that is added to `Config` or to the class of a group has its flat name without further code.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kpl_core.errors import ConfigError
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.options.option import REQUIRED, DescribedOption, described
from kpl_core.options.policy import FairnessPolicy
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, SpoolOptions, TierPolicy
from kpl_core.options.validation import did_you_mean


class _Group(NamedTuple):
    """An option of `Config` that is an object. `lead` is its option that the group's name sets; "": a flag does."""

    make: type[Any]
    lead: str = ""


GROUPS: Final[Mapping[str, _Group]] = {
    "spool": _Group(SpoolOptions, "path"),
    "dead_letters": _Group(DeadLetterOptions, "path"),
    "coordination": _Group(CoordinationOptions, "store"),
    "breaker": _Group(BreakerPolicy),
    "tiers": _Group(TierPolicy),
    "fairness": _Group(FairnessPolicy),
}


class FlatOption(NamedTuple):
    """An option by its flat name. `group` is empty for one of `Config` itself; `member` is its name in its class."""

    option: DescribedOption
    group: str
    member: str

    @property
    def has_variable(self) -> bool:
        """Return True if a text can be its value; False for a mapping."""
        return not self.option.is_mapping


_FLAT: Final[dict[type[Any], Mapping[str, FlatOption]]] = {}


def flat_options(config: type[Any]) -> Mapping[str, FlatOption]:
    """Return all options of the producer by flat name; `config` is `Config`."""
    if config not in _FLAT:
        _FLAT[config] = _flattened(config)
    return _FLAT[config]


def _flattened(config: type[Any]) -> dict[str, FlatOption]:
    found: dict[str, FlatOption] = {}
    for name, option in described(config).items():
        group = GROUPS.get(name)
        if group is None:
            found[name] = FlatOption(option, "", name)
            continue
        members = described(group.make)
        found[name] = FlatOption(_of_group(option, members.get(group.lead)), name, group.lead)
        for member, each in members.items():
            if member != group.lead:
                flat = f"{name}_{member}"
                found[flat] = FlatOption(each._replace(name=flat), name, member)
    return found


def _of_group(group: DescribedOption, lead: DescribedOption | None) -> DescribedOption:
    """Return what a group's own name may be: what its leading option may be, or whether there is the group."""
    if lead is None:
        return group._replace(kinds=(bool,), is_optional=False, default=False)
    # A group whose leading option may be left out can be there without it.
    kinds = (bool, *lead.kinds) if lead.is_optional else lead.kinds
    meaning = group.option.meaning
    return group._replace(kinds=kinds, is_optional=True, option=lead.option._replace(meaning=meaning))


def nested(config: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Config` for flat options, whose values are checked already.

    Raises:
        ConfigError: an option is unknown, needs another one, or excludes another one.
    """
    flat = flat_options(config)
    arguments: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in flat:
            message = f"there is no option {name!r}{did_you_mean(name, flat)}"
            raise ConfigError(message)
        _, group, member = flat[name]
        if not group:
            arguments[member] = value
        elif name != group:
            groups.setdefault(group, {})[member] = value
        elif value not in {None, False}:
            groups.setdefault(group, {}).update({member: value} if value is not True else {})
    for group, members in groups.items():
        if (made := _made(group, members, values)) is not None:
            arguments[group] = made
    return arguments


def _made(group: str, members: dict[str, Any], values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of the group's class
    make, lead = GROUPS[group]
    first = next((f"{group}_{member}" for member in members if member != lead), "")
    if values.get(group) is False:
        message = f"{group} is false, and {first} is set; remove one of them"
        raise ConfigError(message)
    if lead and described(make)[lead].default is REQUIRED and lead not in members:
        message = f"{first} is set, and {group} is not; set {group} too, or remove {first}"
        raise ConfigError(message)
    try:
        return make(**members)
    except ConfigError as error:
        # One option excludes another one.
        message = re.sub(rf"\b({'|'.join(described(make))})\b", lambda found: _flat_name(group, found[0]), str(error))
        raise ConfigError(message) from None


def _flat_name(group: str, member: str) -> str:
    return group if member == GROUPS[group].lead else f"{group}_{member}"
