"""The open aggregated record of a lane: the user records in it, and its exact size.

It is where the time of a put goes, so there are two versions of it: this one, and the same in C (`_open_record.c` and
the C files beside it), the kernels of a compiled installation. Property tests compare every byte of the two. The
environment variable `KPL_KERNELS` chooses: `off` is this version, `require` fails without the one in C. `append` and
`append_pairs` take only what most user records are: bytes, under a partition key without an explicit hash key, that
fit; `append_pairs` also explicit hash keys. The lane does the rest.
"""

import os
from array import array
from collections.abc import Callable
from functools import partial
from importlib import import_module
from operator import add
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from kpl_core.errors import ConfigError
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
from kpl_core.records.hash_key import are_explicit_hash_keys
from kpl_core.records.outcome import Outcome, ResultHandle, ResultHandles

F = TypeVar("F", bound=Callable[..., object])

# The size limit of a record whose next user record is the lane's to add: no size is below it.
SHUT: Final = -1

# Tuples are checked together, unless there are only a few.
_PLAIN_AT_ONCE: Final = 500
_FEW: Final = 12
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
        # Of the outcome in the handles of the last run, perhaps.
        self.number = 0
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

    def append_explicit(
        self,
        explicit_hash_key: str,
        explicit_entry: bytes,
        partition_key: str,
        key_entry: bytes,
        data: bytes,
        user_bytes: int,
        now: float,
    ) -> bool:
        """Append a user record with an explicit hash key. Returns False if that would not stay below the limit."""
        indices, explicit_indices = self._key_indices, self._explicit_indices
        known, known_explicit = len(indices), len(explicit_indices)
        index = indices.setdefault(partition_key, known)
        explicit_index = explicit_indices.setdefault(explicit_hash_key, known_explicit)
        heads, key_fields = explicit_heads()
        try:
            are_short = index < SHORT_KEY_INDICES > explicit_index
            long_indices = 0 if are_short else (index >= SHORT_KEY_INDICES) + (explicit_index >= SHORT_KEY_INDICES)
            record_bytes, head, length = heads[long_indices][len(data)]
            index_field, explicit_field = key_fields[index], KEY_INDEX[explicit_index]
        except IndexError:
            head, index_field, explicit_field, length = record_head(index, explicit_index, len(data)), b"", b"", b""
            record_bytes = len(head) + len(data)
        size = self.size + record_bytes
        if index == known:
            size += len(key_entry)
        if explicit_index == known_explicit:
            size += len(explicit_entry)
        if size >= self.limit:
            if index == known:
                del indices[partition_key]
            if explicit_index == known_explicit:
                del explicit_indices[explicit_hash_key]
            return False
        if index == known:
            self._key_entries.append(key_entry)
        if explicit_index == known_explicit:
            self._explicit_entries.append(explicit_entry)
        self._pieces += (head, index_field, explicit_field, length, data)
        self.size = size
        self.user_bytes += user_bytes
        self.arrivals.append(now)
        return True

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

    def add(
        self,
        partition_key: str,
        key_entry: bytes,
        head: bytes,
        data: bytes,
        user_bytes: int,
        arrived_at: float,
        *explicit: str | bytes,
    ) -> ResultHandle:
        """Add a user record whatever the limit. The caller sets `size`; `head` is what precedes the data.

        `explicit` is an explicit hash key that the table of these has not, and its entry.
        """
        if explicit:
            new_key, new_entry = cast("tuple[str, bytes]", explicit)
            self._explicit_indices[new_key] = len(self._explicit_entries)
            self._explicit_entries.append(new_entry)
        if self._key_indices.setdefault(partition_key, len(self._key_entries)) == len(self._key_entries):
            self._key_entries.append(key_entry)
        self._pieces += (head, data)
        self.user_bytes += user_bytes
        self.arrivals.append(arrived_at)
        return self._delivery(self.outcome, len(self.arrivals) - 1)

    @property
    def first_key(self) -> str:
        """The partition key of the first user record."""
        return next(iter(self._key_indices))

    @property
    def only_data(self) -> bytes:
        """The data of the only user record."""
        return self._pieces[-1]

    def aggregated(self) -> bytes:
        """Return the aggregated record. Its digest is still to be computed, by `sealed`."""
        return b"".join((MAGIC, *self._key_entries, *self._explicit_entries, *self._pieces, UNSEALED))


class Routing(Protocol):
    """What `append_pairs` reads of a router: one version the routes by key, the one in C the shards."""

    @property
    def routes(self) -> dict[str, Any]:
        """Return the lane of each known partition key, its entry and bytes, and the lane's open record."""

    @property
    def explicit_routes(self) -> dict[str, Any]:
        """Return the lane of each known explicit hash key, and its entry."""

    @property
    def table(self) -> tuple[bytes, list["OpenRecord | None"]] | None:
        """Return the shards' last digests, one after another, and the open records of their lanes, where known."""


def python_append_pairs(
    pairs: list[Any],
    part: tuple[int, int],
    router: Routing,
    room: tuple[int, int],
    now: float,
    handles: ResultHandles | None,
) -> tuple[int, int]:
    """Append the pairs of partition key and data in this part of the list to the open records of their routes.

    A pair may have an explicit hash key as a third item. Writes the outcome of each, and its index in it, to `handles`.
    Stops at the first that is not a tuple of str and bytes, has no known route, has no room (records, bytes) or does
    not fit into its open record. Returns its position, and the bytes of keys and data of those before it.
    """
    most, free_bytes = room
    position, end = part
    taken, routes = 0, router.routes
    outcomes: list[Outcome] = [] if handles is None else handles.outcomes
    places: list[int] = []
    for pair in pairs[position : min(end, position + max(0, most))]:
        if type(pair) is not tuple:
            break
        partition_key, data = pair[0], pair[1]
        route = routes.get(partition_key)
        if route is None or type(data) is not bytes:
            break
        _, key_entry, key_bytes, record = route
        size = len(data) + key_bytes
        if record is None or taken + size > free_bytes:
            break
        if len(pair) == PAIR:
            handle = record.append(partition_key, key_entry, data, size, now)
            if handle is None:
                break
            index = handle.index
        else:
            explicit_hash_key = pair[PAIR]
            explicit_route = router.explicit_routes.get(explicit_hash_key)
            if (
                explicit_route is None
                or (record := explicit_route[0].open_record) is None
                or not record.append_explicit(
                    explicit_hash_key, explicit_route[1], partition_key, key_entry, data, size, now
                )
            ):
                break
            index = len(record.arrivals) - 1
        number = record.number
        if number >= len(outcomes) or outcomes[number] is not record.outcome:
            number = record.number = len(outcomes)
            outcomes.append(record.outcome)
        places.append(number)
        places.append(index)
        taken += size
        position += 1
    if handles is not None and places:
        handles.places[2 * position - len(places) : 2 * position] = array("I", places)
    return position, taken


def python_plain_until(records: list[Any], start: int, parts: int, max_record_bytes: int) -> tuple[int, int]:
    """Look for the first record from `start` on that is not a valid tuple of `parts` items.

    These are an ASCII key, bytes, and an explicit hash key as the third. Returns its position, and the bytes of keys
    and data of those before it.
    """
    if len(records) == 1 and not start:
        only_bytes = _plain_size(records[0], parts, max_record_bytes)
        return (0, 0) if only_bytes is None else (1, only_bytes)
    position, taken, has_failed = start, 0, False
    # After a record that is not plain, the next one often is not either.
    count = _PLAIN_AT_ONCE if start == 0 and len(records) >= _FEW else 1
    while position < len(records):
        size_bytes = (
            _plain_size(records[position], parts, max_record_bytes)
            if count == 1
            else _plain_bytes(records[position : position + count], parts, max_record_bytes)
        )
        if size_bytes is not None:
            position += count
            taken += size_bytes
            count = count if has_failed else min(8 * count, _PLAIN_AT_ONCE)
        elif count == 1:
            return position, taken
        else:
            # One of these is not plain: it is looked for by halves.
            has_failed = True
            count //= 2
    return max(start, min(position, len(records))), taken


def _plain_size(record: Any, parts: int, max_record_bytes: int) -> int | None:  # noqa: ANN401 - checked here
    """Return the bytes of key and data of a valid tuple; None if it is not valid."""
    if type(record) is not tuple or len(record) != parts:
        return None
    key, data = record[0], record[1]
    if type(key) is not str or type(data) is not bytes or not key.isascii() or not key:
        return None
    if len(key) > PARTITION_KEY_CHARACTERS or len(key) + len(data) > max_record_bytes:
        return None
    if parts > PAIR and not (type(record[PAIR]) is str and are_explicit_hash_keys(record[PAIR:])):
        return None
    return len(key) + len(data)


def _plain_bytes(records: list[Any], parts: int, max_record_bytes: int) -> int | None:
    """Return the bytes of keys and data of valid tuples; None if one is not valid."""
    try:
        keys, data, *explicit = zip(*records, strict=True)
        text = "".join(keys)
    except (TypeError, ValueError):
        return None
    if len(records[0]) != parts or {*map(type, records)} != {tuple} or {*map(type, data)} != {bytes}:
        return None
    if not (text.isascii() and all(keys)) or max(map(len, keys)) > PARTITION_KEY_CHARACTERS:
        return None
    if explicit and not ({*map(type, explicit[0])} == {str} and are_explicit_hash_keys(explicit[0])):
        return None
    size_bytes = len(text) + sum(map(len, data))
    if size_bytes > max_record_bytes and max(map(add, map(len, keys), map(len, data))) > max_record_bytes:
        return None
    return size_bytes


def python_sealed(unsealed: list[bytes]) -> list[bytes]:
    """Return aggregated records with their digests. The version in C computes several at a time."""
    return [with_digest(data) for data in unsealed]


class PythonRoom:
    """How many user records, and how many of their bytes, there is room for."""

    free_records: int
    free_bytes: int


# So many records at most wait in a batch, of fewer bytes of key and data.
BATCH: Final = 128
BATCH_BYTES: Final = 65_536


class BatchOwner(Protocol):
    """What a batch asks of its pipeline. Room for its records was taken when they were put."""

    # Makes the outcome of a batch.
    new_outcome: Callable[[], Outcome]

    def place(self, key: str, data: bytes, explicit: str | None, flow: str | None, now: float) -> ResultHandle:
        """Put a record that opens or closes an aggregated record, or must wait for the turn of its flow."""

    def fail_put(
        self, key: str, data: bytes, explicit: str | None, flow: str | None, now: float, error: BaseException
    ) -> ResultHandle:
        """Fail a record that `place` could not put."""

    def all_pass(self) -> bool:
        """Return True if no record waits for the turn of its flow."""

    def attend(self, now: float) -> None:
        """Hand on what `place` closed."""


class PythonPutBatch:
    """User records of one stream that wait to be put together. In Python each is put at once, so none waits here."""

    # How many may wait; the most bytes of key and data of one; and from when on one may wait here, because the pipeline
    # will be polled in time. With `takes_flows`, nothing needs to know whose a record is that may enter its lane.
    limit: int
    most: int
    opens_at: float
    takes_flows: bool

    def __init__(
        self,
        _pipeline: BatchOwner,
        _router: "Routing",
        _room: PythonRoom,
        _delivery: type[ResultHandle],
        _outcome: Outcome | None = None,
        _inbox: PythonRoom | None = None,
    ) -> None:
        # How many wait, and the bytes of their keys and data.
        self.count = self.bytes = 0

    def drain(self, now: float | None = None) -> None:
        """Put the records that wait. They arrive at `now`, if it is given."""


def python_put_method(method: F) -> F:
    """Return the method. In C: one that does what it does for most user records, and calls it for the others."""
    return method


def python_await_method(method: F) -> F:
    """Return the `__await__` of a delivery. In C: one that calls it only where the result is not known and shared."""
    return method


def python_fork_count() -> int:
    """Return a number that differs in a forked child, for the put method in C."""
    return 0


def chosen_kernels(wanted: str) -> ModuleType | None:
    """Return the module in C; None if it was not compiled, or is not wanted.

    Raises:
        ConfigError: `KPL_KERNELS` has a value that does not exist.
        ImportError: it requires the module, which was not compiled.
    """
    if wanted not in {"", "off", "require"}:
        message = f"KPL_KERNELS is {wanted!r}; set it to off or require, or unset it"
        raise ConfigError(message)
    if wanted == "off":
        return None
    try:
        return import_module("kpl_core.pipeline._open_record")
    except ImportError as error:
        if wanted == "require":
            message = (
                "KPL_KERNELS is 'require', but this installation has no kernels in C; install it with a C compiler"
            )
            raise ImportError(message) from error
        return None


_in_c: Any = chosen_kernels(os.environ.get("KPL_KERNELS", "").strip())
# True if the kernels in C run.
COMPILED: Final = _in_c is not None

OpenRecord = PythonOpenRecord
Room = PythonRoom
PutBatch = PythonPutBatch
append_pairs, plain_until = python_append_pairs, python_plain_until
sealed, fork_count = python_sealed, python_fork_count
put_method, await_method = python_put_method, python_await_method
if not TYPE_CHECKING and COMPILED:
    OpenRecord, Room, PutBatch = _in_c.OpenRecord, _in_c.Room, _in_c.PutBatch
    append_pairs, plain_until = _in_c.append_pairs, _in_c.plain_until
    fork_count = partial(_in_c.count_forks, 0)
    put_method, await_method = _in_c.put_method, _in_c.await_method
    _in_c.use_outcomes(Outcome)

    def sealed(unsealed: list[bytes]) -> list[bytes]:
        """Return aggregated records with their digests. One alone would leave all lanes but one idle."""
        return _in_c.sealed(unsealed) if len(unsealed) > 1 else python_sealed(unsealed)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(_in_c.count_forks, 1))
