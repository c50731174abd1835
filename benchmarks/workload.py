"""The workload of every producer: its user records, their keys, and the number of shards.

A user record is a function of its index, so from the workload alone the sink can check for each one whether
it is complete, in the right shard, a duplicate, or missing.
Only the standard library is imported: the peers run this file in their own environments.
"""

from dataclasses import asdict, dataclass
from functools import cache
from random import Random
from typing import Any, Literal, Self

__all__ = ["STREAM_NAME", "Keys", "Workload"]

Keys = Literal["10k", "unique"]

STREAM_NAME = "bench"

_REPEATING_KEY_COUNT = 10_000
# The key of each record, drawn at random once and repeated after so many records. With keys in rotation no key
# would repeat within 10,000 records, so an aggregated record would have too many different keys.
_KEY_NUMBERS = Random(2013).choices(range(_REPEATING_KEY_COUNT), k=1 << 17)
_INDEX_DIGITS = 12
# ASCII, because one of the peers accepts only text; long enough for the largest Kinesis record.
_FILLER = b"the quick brown fox jumps over the lazy dog 0123456789 " * 19_100


@cache
def _filler(size: int) -> bytes:
    return _FILLER[:size]


@dataclass(frozen=True, slots=True)
class Workload:
    """User records to produce.

    Attributes:
        data_bytes: Size of each record's data, at least 12 bytes.
        keys: "10k": one of 10,000 keys of 16 characters, at random; "unique": a new one for every record.
        shard_count: Open shards of the stream, dividing the hash key space evenly.
        record_count: The number of measured user records.
    """

    data_bytes: int = 100
    keys: Keys = "10k"
    shard_count: int = 16
    record_count: int = 100_000

    def __post_init__(self) -> None:
        if not _INDEX_DIGITS <= self.data_bytes <= len(_FILLER):
            bounds = f"{_INDEX_DIGITS} .. {len(_FILLER)}"
            message = f"data_bytes is {self.data_bytes}; it must be {bounds} to hold the record's index"
            raise ValueError(message)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Return the workload that `fields()` described."""
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        """Return the fields as JSON values, to pass them to another process."""
        return asdict(self)

    def key_of(self, index: int) -> str:
        """Return the partition key of user record `index`: 16 characters."""
        if self.keys == "unique":
            return f"{index:016x}"
        return f"key-{_KEY_NUMBERS[index % len(_KEY_NUMBERS)]:012d}"

    def data_of(self, index: int) -> bytes:
        """Return the data of user record `index`."""
        return b"%012d" % index + _filler(self.data_bytes - _INDEX_DIGITS)

    def index_of(self, data: bytes) -> int | None:
        """Return the index of the user record with exactly this data, or None if there is none."""
        if len(data) != self.data_bytes or not data[:_INDEX_DIGITS].isdigit():
            return None
        if not data.endswith(_filler(self.data_bytes - _INDEX_DIGITS)):
            return None
        return int(data[:_INDEX_DIGITS])

    def records(self, start: int, stop: int) -> list[tuple[str, bytes]]:
        """Return user records `start` .. `stop - 1` as (partition key, data).

        Equal keys are the same object, as in a service that looks them up.
        """
        if self.keys == "unique":
            return [(self.key_of(index), self.data_of(index)) for index in range(start, stop)]
        interned: dict[str, str] = {}
        keys = (self.key_of(index) for index in range(start, stop))
        return [(interned.setdefault(key, key), self.data_of(index)) for index, key in enumerate(keys, start)]

    def title(self) -> str:
        """Return its description for a table."""
        size = "1 KiB" if self.data_bytes == 1024 else f"{self.data_bytes} B"
        keys = "10,000 keys" if self.keys == "10k" else "all-unique keys"
        return f"{size}, {keys}, {self.shard_count:,} shard{'s' if self.shard_count != 1 else ''}"
