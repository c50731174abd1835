"""What JSON cannot say, said as well as it can be: a log line is not lost for one of its fields.

The encoder says nearly everything by itself and asks `text_of` about the rest. Only where it gives up, at a lone
surrogate, a cycle, or what nests too deep for it, is the record rebuilt, and then in bounded time.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["sayable", "text_of"]

# What stands for a container inside itself, as in Python's own `repr`, and for all beyond the bounds.
_LEFT_OUT: Final = "..."
_DEEPEST: Final = 32
# References in all directions make more paths than anybody can write.
_MOST_VALUES: Final = 10_000


def text_of(value: object) -> str:
    """Return the `str` of an object, without lone surrogates, which no UTF-8 can carry; raises nothing of its own."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - anybody's code
        text = f"<{type(value).__qualname__} whose str() fails>"
    return text.encode(errors="backslashreplace").decode()


def sayable(value: object) -> Any:  # noqa: ANN401 - JSON of any shape
    """Return what the encoder can say of `value`, whatever that is."""
    return _Rebuilding().of(value)


_encode = msgspec.json.Encoder(enc_hook=text_of).encode


class _Rebuilding:
    """One value taken apart, and where in it we are."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._left = _MOST_VALUES

    def of(self, value: object) -> Any:  # noqa: ANN401
        """Return the same, or what stands for it."""
        self._left -= 1
        if value is None or type(value) in {bool, int, float}:
            return value
        if isinstance(value, str):
            return text_of(value)
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._of_container(value)
        try:
            # The same words as on the short way.
            return msgspec.Raw(_encode(value))
        except Exception:  # noqa: BLE001 - as `text_of`
            return text_of(value)

    def _of_container(self, value: Any) -> Any:  # noqa: ANN401
        if id(value) in self._inside or len(self._inside) >= _DEEPEST or self._left < 0:
            return _LEFT_OUT
        try:
            # A copy: another thread may change it meanwhile.
            members = list(value.items() if isinstance(value, Mapping) else value)
        except Exception:  # noqa: BLE001 - as `text_of`
            return text_of(value)
        self._inside.add(id(value))
        try:
            if isinstance(value, Mapping):
                return {text_of(name): self.of(each) for name, each in members}
            return [self.of(each) for each in members]
        finally:
            self._inside.discard(id(value))
