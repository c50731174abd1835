"""The results of decoding a request, the check of one record, and partition keys for records that have none."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Final

import msgspec

from kpl_core import InvalidUserRecord, UserRecord
from kpl_core.options.kinesis_limits import DEFAULT_MAX_RECORD_BYTES
from kpl_core.records.hash_key import parse_explicit_hash_key
from kpl_core.records.user_record import encode_partition_key, require_size

RECORDS_PER_KEY: Final = 100

# Partition key and data of each record; or of each its explicit hash key too.
Pairs = list[tuple[str, bytes]] | list[tuple[str, bytes, str]]


class DecodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one request.

    `max_record_bytes` bounds the partition key (as UTF-8) and the data of one record together, as Kinesis
    does. `max_depth` bounds how deep JSON objects and arrays are nested. `max_uncut_bytes` bounds the text of one
    record, and of a body that cannot be cut into records, if the body is decoded in steps. `trace_members` is what
    records that can carry it get in addition (`trace_members.py`); empty: nothing.
    """

    max_records: int = 10_000
    max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES
    max_depth: int = 64
    max_uncut_bytes: int = 2 * DEFAULT_MAX_RECORD_BYTES
    trace_members: bytes = b""


class RecordProblem(msgspec.Struct, frozen=True, gc=False):
    """Why one record is rejected: its index in the request (from 0), the field, and one sentence."""

    index: int
    field: str
    detail: str


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The valid user records of a request, in request order, and the problems of the others.

    Each record passes `kpl_core.records.user_record.check_user_record` within the limits. The caller adds flow
    and tier. The records of a large body may be `pairs`; then `records` is empty.

    `counts` is the number of user records in each of `records` if the client is a KPL producer and sent aggregated
    records, else None. Aggregated records must not be aggregated again: consumers de-aggregate only once.
    `inflated_bytes` is the size of a decompressed body.
    """

    records: list[UserRecord]
    problems: list[RecordProblem]
    counts: list[int] | None = None
    inflated_bytes: int = 0
    pairs: Pairs | None = None

    def with_records(self) -> "Decoded":
        """Return the same without pairs."""
        if self.pairs is None:
            return self
        records = [UserRecord(*pair) for pair in self.pairs]
        return msgspec.structs.replace(self, records=records, pairs=None)

    def with_more(self, others: "Decoded", count: int) -> "Decoded":
        """Return this part of a body together with the next one, `others`, which begins after `count` records."""
        counts = None
        if self.counts is not None or others.counts is not None:
            counts = [*(self.counts or _ones(self.records)), *(others.counts or _ones(others.records))]
        self.records.extend(others.records)
        self.problems.extend([RecordProblem(each.index + count, each.field, each.detail) for each in others.problems])
        return msgspec.structs.replace(self, counts=counts)

    def positions(self) -> list[int]:
        """Return the request index of each of `records`."""
        bad = {problem.index for problem in self.problems}
        return [index for index in range(len(self.records) + len(bad)) if index not in bad]


class DecodeRefusal(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The whole request cannot be decoded. Answer with `status` (400, 413 or 415).

    `code` is for programs: malformed, truncated, encoding, too-deep, too-large, too-many-records,
    unsupported-media-type or unsupported-content-encoding. `detail` is a sentence for people. `index` and
    `field` are set where they are known. `inflated_bytes` is how much was decompressed, at most.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        index: int | None = None,
        field: str | None = None,
        inflated_bytes: int = 0,
    ) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.index = index
        self.field = field
        self.inflated_bytes = inflated_bytes


def checked_record(
    record: UserRecord, index: int, limits: DecodeLimits, *, key_field: str = "partition_key"
) -> UserRecord | RecordProblem:
    """Return `record`, or the reason why Kinesis would reject it; `key_field` is the client's name of the key."""
    field = key_field
    try:
        key = encode_partition_key(record.partition_key)
        if record.explicit_hash_key is not None:
            field = "explicit_hash_key"
            parse_explicit_hash_key(record.explicit_hash_key)
        field = "data"
        require_size(len(key), len(record.data), max_record_bytes=limits.max_record_bytes)
    except InvalidUserRecord as error:
        return RecordProblem(index, field, str(error))
    return record


def _ones(records: Sequence[object]) -> Iterable[int]:
    return repeat(1, len(records))


def random_partition_key() -> str:
    """Return 64 random bits as 16 hexadecimal digits."""
    return secrets.token_hex(8)


class NeighbourKeys:
    """Partition keys for the records of one request that have none.

    Up to 100 successive records share a random key. They stay together and in order, and requests still spread
    evenly over the shards. A key for each record would scatter one request over all shards.
    """

    __slots__ = ("_dealt", "_key", "_new_key", "_records_per_key")

    def __init__(self, new_key: Callable[[], str], *, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._new_key = new_key
        self._records_per_key = records_per_key
        self._key = ""
        self._dealt = 0

    def deal(self) -> str:
        """Return the key of the next record without one."""
        if self._dealt % self._records_per_key == 0:
            self._key = self._new_key()
        self._dealt += 1
        return self._key

    def deal_many(self, count: int) -> list[str]:
        """Return the keys of the next `count` records without one."""
        keys: list[str] = []
        while len(keys) < count:
            keys.append(self.deal())
            alike = min(count - len(keys), -self._dealt % self._records_per_key)
            keys += [self._key] * alike
            self._dealt += alike
        return keys
