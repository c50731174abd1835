"""The sink's ledger: check every user record that arrived against the workload.

The check runs after the measurement, on stored requests, so it never slows the producer down.
"""

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from hashlib import md5
from typing import Any

from benchmarks.blob_reader import MalformedBlobError, open_blob
from benchmarks.workload import Workload

__all__ = ["Ledger", "ShardRanges", "Verdict"]

_HASH_KEY_SPACE = 2**128


class ShardRanges:
    """Even division of the hash key space, as CreateStream does it."""

    def __init__(self, shard_count: int) -> None:
        starts = [number * _HASH_KEY_SPACE // shard_count for number in range(shard_count)]
        ends = [start - 1 for start in starts[1:]] + [_HASH_KEY_SPACE - 1]
        self.ranges = list(zip(starts, ends, strict=True))
        self._ends = [end.to_bytes(16, "big") for end in ends]

    def shard_of(self, partition_key: str, explicit_hash_key: str | None) -> int:
        """Return the number of the shard that holds this key's hash key."""
        if explicit_hash_key:
            digest = int(explicit_hash_key).to_bytes(16, "big")
        else:
            digest = md5(partition_key.encode(), usedforsecurity=False).digest()
        return bisect_left(self._ends, digest)


@dataclass(slots=True)
class Verdict:
    """The result of the check. Counts are of user records unless the name says otherwise.

    Attributes:
        user_records: Well-formed ones, each index counted once.
        kinesis_records: Entries of PutRecords requests.
        misrouted: In a Kinesis record of a shard that does not hold their own hash key (a KCL drops those).
        wrong_keys: Under another partition key than the one they were put with.
        malformed: Neither a user record of the workload nor an aggregated record.
        duplicated: Arrivals beyond the first of an index.
        lost: Expected records that never arrived.
    """

    user_records: int = 0
    user_bytes: int = 0
    kinesis_records: int = 0
    misrouted: int = 0
    wrong_keys: int = 0
    malformed: int = 0
    duplicated: int = 0
    lost: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every user record arrived once, complete, with its key, in the right shard."""
        return not (self.misrouted or self.wrong_keys or self.malformed or self.duplicated or self.lost)

    def fields(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return asdict(self)


@dataclass(slots=True)
class Ledger:
    """Checks Kinesis records one by one and counts the errors."""

    workload: Workload
    ranges: ShardRanges
    _verdict: Verdict = field(default_factory=Verdict)
    _seen: bytearray = field(default_factory=bytearray)
    _home: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen = bytearray(self.workload.record_count)

    def enter(self, shard: int, partition_key: str, explicit_hash_key: str | None, blob: bytes) -> None:
        """Check one Kinesis record that was stored in `shard`."""
        self._verdict.kinesis_records += 1
        try:
            user_records = open_blob(blob)
        except MalformedBlobError:
            self._verdict.malformed += 1
            return
        if user_records is None:
            user_records = [(partition_key, explicit_hash_key, blob)]
        for key, hash_key, data in user_records:
            self._judge(shard, key, hash_key, data)

    def verdict(self) -> Verdict:
        """Return the counts, once everything has been entered."""
        self._verdict.lost = self._seen.count(0)
        return self._verdict

    def _judge(self, shard: int, partition_key: str, explicit_hash_key: str | None, data: bytes) -> None:
        verdict = self._verdict
        index = self.workload.index_of(data)
        if index is None or index >= self.workload.record_count:
            verdict.malformed += 1
            return
        if self._seen[index]:
            verdict.duplicated += 1
            return
        self._seen[index] = 1
        verdict.user_records += 1
        verdict.user_bytes += len(data)
        if partition_key != self.workload.key_of(index):
            verdict.wrong_keys += 1
        if self._home_of(partition_key, explicit_hash_key) != shard:
            verdict.misrouted += 1

    def _home_of(self, partition_key: str, explicit_hash_key: str | None) -> int:
        if explicit_hash_key:
            return self.ranges.shard_of(partition_key, explicit_hash_key)
        home = self._home.get(partition_key)
        if home is None:
            home = self._home[partition_key] = self.ranges.shard_of(partition_key, None)
        return home
