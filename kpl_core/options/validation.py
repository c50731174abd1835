"""One checker for every option: its type, its bounds, its choices, and one wording of what is wrong.

A class of options has a table `{option: Bound}` and calls `require_bounds` once. An error states the option,
its value and what is allowed. The adapters use the same functions, so an operator reads the same sentence
whether a value came from Python, from `dictConfig` or from the environment.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar
from urllib.parse import SplitResult, urlsplit

from kpl_core.errors import ConfigError

K = TypeVar("K")
V = TypeVar("V")
C = TypeVar("C")


class Bound(NamedTuple):
    """What a number may be.

    `smallest` and `largest` are allowed, unless `above` excludes `smallest`. An infinite `largest` means that
    there is no upper bound; the number itself must be finite all the same. `unit` ends the error's sentence.
    """

    smallest: float
    largest: float
    unit: str
    whole: bool = False
    optional: bool = False
    above: bool = False


# "user:password@" of any URL in a text. An unescaped @ in a password belongs to the password.
# Up to the last "@", because a password that is not percent-encoded may contain one, or a "/".
_USER_IN_TEXT: Final = re.compile(r"(?<=://)\S*@")
_USER_OF_URL: Final = re.compile(r"(?<=://).*@", re.DOTALL)
_SECRET_PARAMETER: Final = re.compile(
    r"([?&][^=&\s]*(?:password|passwd|token|secret|signature|credential)[^=&\s]*=)[^&\s]*", re.IGNORECASE
)
# A query or a fragment of a URL.
_QUERY: Final = re.compile(r"[?#].*", re.DOTALL)
_UNPRINTABLE: Final = re.compile(r"[^\x21-\x7e]")
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,63}")

# A finite number above 0 of any unit.
ABOVE_ZERO: Final = Bound(0.0, math.inf, "", above=True)


def require_bounds(options: object, bounds: Mapping[str, Bound]) -> None:
    """Check every attribute of `options` that has a row in `bounds`.

    Raises:
        ConfigError: a value is not a number, or out of its bounds.
    """
    for name, bound in bounds.items():
        require_number(name, getattr(options, name), bound)


def require_number(name: str, value: Any, bound: Bound, *, error: type[ValueError] = ConfigError) -> None:  # noqa: ANN401
    """Check one number; a bool is not a number.

    Raises:
        ConfigError: `value` is not a number, not finite, or out of its bounds; or `error`, if one is given.
    """
    if value is None and bound.optional:
        return
    reason = f" ({bound.unit})" if bound.unit else ""
    if isinstance(value, bool) or not isinstance(value, int if bound.whole else int | float):
        message = f"{name} is {value!r}; it must be {'a whole number' if bound.whole else 'a number'}{reason}"
        raise error(message)
    inside = value > bound.smallest if bound.above else value >= bound.smallest
    if not (inside and value <= bound.largest and math.isfinite(value)):
        message = f"{name} is {value!r}; it must be {_allowed(bound)}{reason}"
        raise error(message)


def _allowed(bound: Bound) -> str:
    smallest = _plain(bound.smallest)
    if bound.largest == math.inf:
        # Of a whole number "finite" would be a strange thing to say.
        return f"{'' if bound.whole else 'a finite number '}{'above' if bound.above else 'at least'} {smallest}".strip()
    if bound.above:
        return f"above {smallest} and at most {_plain(bound.largest)}"
    return f"between {smallest} and {_plain(bound.largest)}"


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def require(is_allowed: bool, name: str, value: object, wanted: str) -> None:  # noqa: FBT001 - as in an assertion
    """Check what the other functions do not.

    Raises:
        ConfigError: the value is not allowed. The message names it and says what it must be.
    """
    if not is_allowed:
        message = f"{name} is {value!r}; it must be {wanted}"
        raise ConfigError(message)


def require_kind(name: str, value: object, kinds: Any, wanted: str) -> None:  # noqa: ANN401 - a class, or a union
    """Check the type of a value that may be a secret.

    Raises:
        ConfigError: it has another type. The message names the type only.
    """
    if not isinstance(value, kinds):
        message = f"{name} is of type {type(value).__name__}; it must be {wanted}"
        raise ConfigError(message)


def require_choice(name: str, value: object, allowed: tuple[str, ...], *, also: str = "") -> None:
    """Check that `value` is one of `allowed`; `also` describes further values that the caller checked itself.

    Raises:
        ConfigError: it is not.
    """
    choices = ", ".join([*map(repr, allowed), *([also] if also else [])])
    require(value in allowed, name, value, f"one of {choices}")


def require_flag(name: str, value: object) -> None:
    """Check that `value` is a bool.

    Raises:
        ConfigError: it is not.
    """
    require(isinstance(value, bool), name, value, "True or False")


def require_path(name: str, value: object) -> Path:
    """Return a path that was given as a str or a `pathlib.Path`.

    Raises:
        ConfigError: it is neither, or an empty str.
    """
    require(isinstance(value, str | Path) and value != "", name, value, "a path, as a str or a pathlib.Path")
    return Path(value)  # type: ignore[arg-type] # it was checked


def require_order(options: object, smaller: str, larger: str) -> None:
    """Check that the option named `smaller` is not above the option named `larger`.

    Raises:
        ConfigError: it is.
    """
    low, high = getattr(options, smaller), getattr(options, larger)
    if high < low:
        message = f"{larger} is {high:g}, below {smaller}, {low:g}; raise {larger} or lower {smaller}"
        raise ConfigError(message)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to a misspelt one; None if none is near."""
    from difflib import get_close_matches  # noqa: PLC0415 - only an error needs it

    spelt = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), spelt, n=1, cutoff=0.7)
    return spelt[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the known name nearest to a misspelt one; empty if none is near."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found}?"


def names_nearest(cls: type[C]) -> type[C]:
    """Make the constructor of a dataclass name the option that a misspelt keyword meant, as Python 3.13 does.

    Raises:
        TypeError: on construction, an option is unknown.
    """
    construct = cls.__init__

    @wraps(construct)
    def checked(self: C, **options: Any) -> None:  # noqa: ANN401 - as the constructor's own, which `wraps` shows
        for name in options:
            if name not in cls.__dataclass_fields__:  # type: ignore[attr-defined] # of a dataclass
                message = f"{cls.__name__} has no option {name!r}{did_you_mean(name, cls.__dataclass_fields__)}"  # type: ignore[attr-defined]
                raise TypeError(message)
        construct(self, **options)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


def without_passwords(text: str) -> str:
    """Return `text` with "***" in place of the user and password, and of secret parameters, of every URL in it.

    A password with a space is found by `shown_url` only.
    """
    return _SECRET_PARAMETER.sub(r"\1***", _USER_IN_TEXT.sub("***@", text))


def shown_url(url: str) -> str:
    """Return one URL without its user, its password and secret parameters."""
    return _SECRET_PARAMETER.sub(r"\1***", _USER_OF_URL.sub("***@", url))


def require_endpoint_url(name: str, url: str) -> None:
    """Check that requests can be sent to `url`, the value of the option `name`.

    Raises:
        ConfigError: its scheme is neither http nor https; it has no host, an invalid port or a space; it has a user
            or a password, which botocore would send in the header that carries the signature; or it has a query or
            a fragment, which no request would carry. The message shows none of these.
    """
    # A query may hold a token, so it is never shown.
    shown = repr(_QUERY.sub("?***", shown_url(url)))
    parts = _http_parts(url)
    if parts is None:
        message = (
            f"{name} is {shown}; it must be http:// or https://, a host, and optionally a port, "
            f"as in 'http://127.0.0.1:4567'"
        )
        raise ConfigError(message)
    if parts.username is not None or parts.password is not None:
        message = (
            f"{name} is {shown}; it must not have a user or a password, which a signed request cannot carry, "
            f"so remove them"
        )
        raise ConfigError(message)
    if "?" in url or "#" in url:
        message = f"{name} is {shown}; it must not have a query or a fragment, which no request would carry"
        raise ConfigError(message)


def require_region(name: str, region: str) -> None:
    """Check that `region` can be part of a host name and of a signature.

    Raises:
        ConfigError: it is not 1 to 63 letters, digits and hyphens.
    """
    require(_REGION.fullmatch(region) is not None, name, region, "letters, digits and hyphens, such as 'eu-central-1'")


def _http_parts(url: str) -> SplitResult | None:
    """Return the parts of an HTTP URL, or None if requests cannot be sent to it."""
    # `urlsplit` removes line breaks and tabs, and takes a space for a part of the host.
    if _UNPRINTABLE.search(url):
        return None
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if is_valid else None


class FrozenMapping(dict[K, V]):
    """A copy of a mapping that cannot be changed after it was checked.

    It is a dict, so json, pickle, copy and `dataclasses.asdict` accept it; they reject a `MappingProxyType`.
    """

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        message = "a checked option cannot be changed; build a new one"
        raise TypeError(message)

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type["FrozenMapping[K, V]"], tuple[Mapping[K, V]]]:
        return FrozenMapping, (dict(self),)
