"""An export larger than a Kinesis record, in pieces that each fit: by resource, then by scope, then by record.

Each piece is encoded whole again, with its resource and scope, so that it can be read without the others.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from kpl_integrations.otel.encoding import Encode
from kpl_integrations.otel.metric_leaf import MetricLeaf

__all__ = ["Piece", "items_in", "pieces"]


class Piece(NamedTuple):
    """Some of an export, encoded; `data` is None if the smallest part of it is still too large."""

    data: bytes | None
    items: int


def pieces(leaves: Sequence[Any], encode: Encode, *, max_bytes: int) -> Iterator[Piece]:
    """Yield the leaves encoded, in their order within a resource and scope, `max_bytes` at most each."""
    data = encode(leaves)
    if len(data) <= max_bytes:
        yield Piece(data, items_in(leaves))
        return
    parts = _divided(leaves, -(-len(data) // max_bytes))
    if len(parts) == 1:
        yield Piece(None, items_in(leaves))
        return
    for part in parts:
        yield from pieces(part, encode, max_bytes=max_bytes)


def items_in(leaves: Sequence[Any]) -> int:
    """Return how many spans, log records or data points there are."""
    return sum(leaf.points if isinstance(leaf, MetricLeaf) else 1 for leaf in leaves)


def _divided(leaves: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    for place in (_resource, _scope):
        groups: dict[Hashable, list[Any]] = {}
        for leaf in leaves:
            groups.setdefault(place(leaf), []).append(leaf)
        if len(groups) > 1:
            return list(groups.values())
    if len(leaves) == 1 and isinstance(leaves[0], MetricLeaf):
        return [[part] for part in leaves[0].divided(parts)]
    size = max(1, -(-len(leaves) // parts))
    return [leaves[start : start + size] for start in range(0, len(leaves), size)]


# Told apart by identity: a provider has one resource, and hashing it by its attributes costs more than encoding a span.
_resource: Callable[[Any], int] = lambda leaf: id(leaf.resource)  # noqa: E731
_scope: Callable[[Any], int] = lambda leaf: id(leaf.instrumentation_scope)  # noqa: E731
