"""The open aggregated record of a lane: the user records in it, and its exact size.

It is where the time of a put goes, so there are two versions of it: this one, and the same in C (`_open_record.c` and
the C files beside it), which the compiled wheel has. Property tests compare every byte of the two. `append` and
`append_pairs` take only what most user records are: bytes, under a partition key without an explicit hash key, that
fit. A run may have explicit hash keys too. The lane does the rest.
"""

import os
from array import array
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_core.records.aggregated_record import (
    ENVELOPE_BYTES,
    HEADS,
    HEADS_LONG,
    KEY_INDEX,
    MAGIC,
    SHORT_KEY_INDICES,
    UNSEALED,
    explicit_heads,
    record_head,
    with_digest,
)
from kpl_core.records.outcome import Outcome, ResultHandle

F = TypeVar("F", bound=Callable[..., object])

# The size limit of a record whose next user record is the lane's to add: no size is below it.
SHUT: Final = -1

# User records on their way into a lane: partition key, the lane's entry for it, data, bytes of key and data. If all of
# them have explicit hash keys, each of these and its entry follow.
Run = list[Any]
_PLAIN_PARTS: Final = 4
# How many items a pair of partition key and data has; a third one is an explicit hash key.
PAIR: Final = 2


class PythonOpenRecord:
    """The user records of one aggregated record, as parallel lists, and running sizes. `delivery` makes a delivery."""

    def __init__(self, delivery: type[ResultHandle]) -> None:
        self._delivery = delivery
        self.restart(Outcome())

    def restart(self, outcome: Outcome) -> None:
        """Become an empty record with this outcome."""
        self.outcome = outcome
        # The size up to which `append` may fill the record.
        self.limit = SHUT
        self.size = ENVELOPE_BYTES
        self.user_bytes = 0
        # When each user record arrived.
        self.arrivals: list[float] = []
        self._key_indices: dict[str, int] = {}
        self._key_entries: list[bytes] = []
        self._explicit_indices: dict[str, int] = {}
        self._explicit_entries: list[bytes] = []
        self._pieces: list[bytes] = []

    def append(
        self, partition_key: str, key_entry: bytes, data: bytes, user_bytes: int, now: float
    ) -> ResultHandle | None:
        """Append a user record and return its delivery; None if that would not stay below the limit."""
        indices, entries = self._key_indices, self._key_entries
        known = len(entries)
        index = indices.setdefault(partition_key, known)
        try:
            record_bytes, head, length = (HEADS if index < SHORT_KEY_INDICES else HEADS_LONG)[len(data)]
            index_field = KEY_INDEX[index]
        except IndexError:
            head, index_field, length = record_head(index, None, len(data)), b"", b""
            record_bytes = len(head) + len(data)
        size = self.size + record_bytes
        if index == known:
            size += len(key_entry)
        if size >= self.limit:
            if index == known:
                del indices[partition_key]
            return None
        if index == known:
            entries.append(key_entry)
        self._pieces += (head, index_field, length, data)
        self.size = size
        self.user_bytes += user_bytes
        arrivals = self.arrivals
        arrivals.append(now)
        return self._delivery(self.outcome, len(arrivals) - 1)

    def append_run(self, run: Run, start: int, now: float) -> int:
        """Append the user records of a run from `start` on; return the index of the first one it refuses."""
        if start < len(run) and len(run[start]) > _PLAIN_PARTS:
            return self._append_explicit_run(run, start, now)
        indices, entries, pieces = self._key_indices, self._key_entries, self._pieces
        known, size, limit, user_bytes = len(entries), self.size, self.limit, self.user_bytes
        position, end = start, len(run)
        while position < end:
            partition_key, key_entry, data, record_user_bytes = run[position]
            index = indices.setdefault(partition_key, known)
            try:
                record_bytes, head, length = (HEADS if index < SHORT_KEY_INDICES else HEADS_LONG)[len(data)]
                index_field = KEY_INDEX[index]
            except IndexError:
                head, index_field, length = record_head(index, None, len(data)), b"", b""
                record_bytes = len(head) + len(data)
            grown = size + record_bytes
            if index == known:
                grown += len(key_entry)
            if grown >= limit:
                if index == known:
                    del indices[partition_key]
                break
            if index == known:
                entries.append(key_entry)
                known += 1
            pieces += (head, index_field, length, data)
            size = grown
            user_bytes += record_user_bytes
            position += 1
        self.size, self.user_bytes = size, user_bytes
        self.arrivals += [now] * (position - start)
        return position

    def _append_explicit_run(self, run: Run, start: int, now: float) -> int:
        """Do what `append_run` does, for user records with explicit hash keys."""
        indices, explicit_indices, pieces = self._key_indices, self._explicit_indices, self._pieces
        known, known_explicit, size, user_bytes = len(indices), len(explicit_indices), self.size, self.user_bytes
        heads, key_fields = explicit_heads()
        limit, position, end = self.limit, start, len(run)
        while position < end:
            partition_key, key_entry, data, record_user_bytes, explicit_hash_key, explicit_entry = run[position]
            index = indices.setdefault(partition_key, known)
            explicit_index = explicit_indices.setdefault(explicit_hash_key, known_explicit)
            try:
                are_short = index < SHORT_KEY_INDICES > explicit_index
                long_indices = 0 if are_short else (index >= SHORT_KEY_INDICES) + (explicit_index >= SHORT_KEY_INDICES)
                record_bytes, head, length = heads[long_indices][len(data)]
                index_field, explicit_field = key_fields[index], KEY_INDEX[explicit_index]
            except IndexError:
                head, index_field, explicit_field, length = record_head(index, explicit_index, len(data)), b"", b"", b""
                record_bytes = len(head) + len(data)
            grown = size + record_bytes
            if index == known:
                grown += len(key_entry)
            if explicit_index == known_explicit:
                grown += len(explicit_entry)
            if grown >= limit:
                if index == known:
                    del indices[partition_key]
                if explicit_index == known_explicit:
                    del explicit_indices[explicit_hash_key]
                break
            if index == known:
                self._key_entries.append(key_entry)
                known += 1
            if explicit_index == known_explicit:
                self._explicit_entries.append(explicit_entry)
                known_explicit += 1
            pieces += (head, index_field, explicit_field, length, data)
            size = grown
            user_bytes += record_user_bytes
            position += 1
        self.size, self.user_bytes = size, user_bytes
        self.arrivals += [now] * (position - start)
        return position

    def key_index(self, partition_key: str) -> int | None:
        """Return the index of a partition key in the key table, None if it is not there."""
        return self._key_indices.get(partition_key)

    @property
    def key_count(self) -> int:
        """Return how many partition keys the key table has."""
        return len(self._key_entries)

    def explicit_index(self, explicit_hash_key: str) -> int | None:
        """Return the index of an explicit hash key in the table of these, None if it is not there."""
        return self._explicit_indices.get(explicit_hash_key)

    @property
    def explicit_count(self) -> int:
        """Return how many explicit hash keys their table has."""
        return len(self._explicit_entries)

    def add_explicit(self, explicit_hash_key: str, entry: bytes) -> None:
        """Add a new explicit hash key to the table of these."""
        self._explicit_indices[explicit_hash_key] = len(self._explicit_entries)
        self._explicit_entries.append(entry)

    def add(
        self, partition_key: str, key_entry: bytes, head: bytes, data: bytes, user_bytes: int, arrived_at: float
    ) -> ResultHandle:
        """Add a user record whatever the limit. The caller sets `size`; `head` is what precedes the data."""
        if self._key_indices.setdefault(partition_key, len(self._key_entries)) == len(self._key_entries):
            self._key_entries.append(key_entry)
        self._pieces += (head, data)
        self.user_bytes += user_bytes
        self.arrivals.append(arrived_at)
        return self._delivery(self.outcome, len(self.arrivals) - 1)

    def first_key(self) -> str:
        """Return the partition key of the first user record. There must be one."""
        return next(iter(self._key_indices))

    def only_data(self) -> bytes:
        """Return the data of the only user record."""
        return self._pieces[-1]

    def aggregated(self) -> bytes:
        """Return the aggregated record. Its digest is still to be computed, by `sealed`."""
        return b"".join((MAGIC, *self._key_entries, *self._explicit_entries, *self._pieces, UNSEALED))


class Routing(Protocol):
    """What `append_pairs` reads of a router: one version the routes by partition key, the one in C the shards."""

    @property
    def routes(self) -> dict[str, Any]:
        """Return the lane of each known partition key, its entry and bytes, and the lane's open record."""

    @property
    def table(self) -> tuple[bytes, list["OpenRecord | None"]] | None:
        """Return the shards' last digests, one after another, and the open records of their lanes, where known."""


def python_append_pairs(
    pairs: list[Any],
    part: tuple[int, int],
    router: Routing,
    room: tuple[int, int],
    now: float,
    outcomes: list[Any],
    indices: "array[int]",
) -> tuple[int, int]:
    """Append the pairs of partition key and data in this part of the list to the open records of their routes.

    Writes the outcome of each, and its index in it, at its position. Stops at the first that is no pair of str and
    bytes, has no known route, has no room (records, bytes) or that `append` refuses. Returns its position, and the
    bytes of keys and data of those before it.
    """
    most, free_bytes = room
    position, end = part
    end, taken, routes = min(len(pairs), end, position + most), 0, router.routes
    while position < end:
        pair = pairs[position]
        if type(pair) is not tuple:
            break
        partition_key, data = pair
        route = routes.get(partition_key)
        if route is None or type(data) is not bytes:
            break
        _, key_entry, key_bytes, record = route
        size = len(data) + key_bytes
        if record is None or taken + size > free_bytes:
            break
        delivery = record.append(partition_key, key_entry, data, size, now)
        if delivery is None:
            break
        outcomes[position] = delivery.outcome
        indices[position] = delivery.index
        taken += size
        position += 1
    return position, taken


def python_plain_until(records: list[Any], start: int, max_record_bytes: int) -> int:
    """Return the position of the first record from `start` on that is no valid pair of an ASCII key and bytes."""
    for position in range(start, len(records)):
        record = records[position]
        if type(record) is not tuple or len(record) != PAIR:
            return position
        key, data = record
        if (
            type(key) is not str
            or type(data) is not bytes
            or not key.isascii()
            or not 0 < len(key) <= PARTITION_KEY_CHARACTERS
            or len(key) + len(data) > max_record_bytes
        ):
            return position
    return max(start, len(records))


def python_sealed(unsealed: list[bytes]) -> list[bytes]:
    """Return aggregated records with their digests. The version in C computes several at a time."""
    return [with_digest(data) for data in unsealed]


def require_alike(pairs: list[Any]) -> None:
    """Raise TypeError if not all tuples have two items, or not all of them three."""
    parts = len(pairs[0]) if pairs else PAIR
    for index, pair in enumerate(pairs):
        if len(pair) != parts or parts not in (PAIR, PAIR + 1):
            message = (
                f"records[{index}] has {len(pair)} items and records[0] has {parts}; give partition key and data, "
                "and an explicit hash key with all of them or with none"
            )
            raise TypeError(message)


def python_place_pairs(
    pairs: list[Any],
    start: int,
    routes: dict[str, Any],
    explicit_routes: dict[str, Any],
    most: int,
    runs: dict[Any, Run],
) -> tuple[int, int]:
    """Add pairs of partition key and data from `start` on to the runs of their lanes.

    Or all of them have an explicit hash key as a third item. Stops at the first that has not as many items as the first
    of the list, whose data is not bytes, that has no route there, or more than `most` bytes, or whose explicit hash key
    leads to another kind of lane than its partition key may. Returns its index, and the bytes of keys and data of those
    before it.
    """
    if pairs and len(pairs[0]) > PAIR:
        return _place_explicit(pairs, start, routes, explicit_routes, most, runs)
    position, end, taken = start, len(pairs), 0
    while position < end:
        pair = pairs[position]
        if len(pair) != PAIR:
            break
        partition_key, data = pair
        route = routes.get(partition_key)
        if route is None or data.__class__ is not bytes:
            break
        lane, key_entry, key_bytes, _ = route
        size = len(data) + key_bytes
        if size > most:
            break
        run = runs.get(lane)
        if run is None:
            runs[lane] = run = []
        run.append((partition_key, key_entry, data, size))
        taken += size
        position += 1
    return position, taken


def _place_explicit(
    pairs: list[Any],
    start: int,
    routes: dict[str, Any],
    explicit_routes: dict[str, Any],
    most: int,
    runs: dict[Any, Run],
) -> tuple[int, int]:
    position, end, taken = start, len(pairs), 0
    while position < end:
        pair = pairs[position]
        if len(pair) != PAIR + 1:
            break
        partition_key, data, explicit_hash_key = pair
        route, explicit_route = routes.get(partition_key), explicit_routes.get(explicit_hash_key)
        if route is None or explicit_route is None or data.__class__ is not bytes:
            break
        _, key_entry, key_bytes, record = route
        size = len(data) + key_bytes
        if size > most or record is None:
            break
        lane, entry = explicit_route
        run = runs.get(lane)
        if run is None:
            runs[lane] = run = []
        run.append((partition_key, key_entry, data, size, explicit_hash_key, entry))
        taken += size
        position += 1
    return position, taken


class PythonRoom:
    """How many user records, and how many of their bytes, there is room for."""

    free_records: int
    free_bytes: int


def python_put_method(method: F) -> F:
    """Return the method. In C: one that does what it does for most user records, and calls it for the others."""
    return method


def python_fork_count() -> int:
    """Return a number that differs in a forked child, for the put method in C."""
    return 0


if TYPE_CHECKING:
    OpenRecord = PythonOpenRecord
    Room = PythonRoom
    append_pairs, place_pairs, plain_until = python_append_pairs, python_place_pairs, python_plain_until
    sealed, put_method, fork_count = python_sealed, python_put_method, python_fork_count
else:
    try:
        _in_c = import_module("kpl_core.pipeline._open_record")
    except ImportError:
        OpenRecord, Room = PythonOpenRecord, PythonRoom
        append_pairs, place_pairs, plain_until = python_append_pairs, python_place_pairs, python_plain_until
        sealed, put_method, fork_count = python_sealed, python_put_method, python_fork_count
    else:
        OpenRecord, Room = _in_c.OpenRecord, _in_c.Room
        append_pairs, place_pairs, plain_until = _in_c.append_pairs, _in_c.place_pairs, _in_c.plain_until
        sealed, put_method, fork_count = _in_c.sealed, _in_c.PutMethod, _in_c.fork_count
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_in_c.forked)

# The version of `append_pairs` in C hashes each partition key, which costs less than a look-up among many routes.
NEEDS_NO_ROUTES: Final = append_pairs is not python_append_pairs
