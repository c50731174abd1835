"""Which partition key a part of an export gets; parts with different keys travel in different records."""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_integrations.otel.options import KeyChoice

__all__ = ["Keyed", "keyed_parts", "random_key"]

# None: a key by chance for each record.
Keyed = tuple[str | None, list[Any]]

_RESOURCE_KEY_BYTES: Final = 8


def keyed_parts(leaves: Sequence[Any], choice: KeyChoice) -> Iterator[Keyed]:
    """Yield the leaves by partition key, in the order in which the keys first appear."""
    if choice == "random":
        yield None, list(leaves)
        return
    key_of: Callable[[Any], object]
    name: Callable[[object], str]
    if callable(choice):
        key_of, name = choice, _fitting
    elif choice == "resource":
        key_of, name = _resource_key(), str
    else:
        key_of, name = _trace_id, _trace_key
    groups: dict[object, list[Any]] = {}
    for leaf in leaves:
        groups.setdefault(key_of(leaf), []).append(leaf)
    for key, group in groups.items():
        yield name(key) or None, group


def random_key() -> str:
    """Return a key that no other record has."""
    return secrets.token_hex(8)


def _trace_id(span: Any) -> int:  # noqa: ANN401 - a ReadableSpan
    trace_id: int = span.context.trace_id
    return trace_id


def _trace_key(trace_id: Any) -> str:  # noqa: ANN401 - an int, as _trace_id gave it
    return f"{trace_id:032x}"


def _fitting(key: object) -> str:
    return str(key)[:PARTITION_KEY_CHARACTERS]


def _resource_key() -> Callable[[Any], str]:
    """Return what gives each resource the key of its attributes, the same in every process."""
    known: dict[int, str] = {}

    def key(leaf: Any) -> str:  # noqa: ANN401 - a span, log record or metric
        resource = leaf.resource
        found = known.get(id(resource))
        if found is None:
            attributes = msgspec.json.encode(sorted((name, str(value)) for name, value in resource.attributes.items()))
            found = known[id(resource)] = hashlib.blake2b(attributes, digest_size=_RESOURCE_KEY_BYTES).hexdigest()
        return found

    return key
