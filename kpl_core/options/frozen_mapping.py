"""A dict nobody can change, for options: json, pickle, copy and dataclasses.asdict take it, as no MappingProxyType."""

from collections.abc import Mapping
from typing import NoReturn, TypeVar

__all__ = ["FrozenMapping"]

K = TypeVar("K")
V = TypeVar("V")


class FrozenMapping(dict[K, V]):
    """What a checked option holds: a copy, which stays as it was checked."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        message = "an option that was checked cannot be changed; build another one"
        raise TypeError(message)

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type["FrozenMapping[K, V]"], tuple[Mapping[K, V]]]:
        return FrozenMapping, (dict(self),)
