"""One shard: a range of hash keys, a capacity, a log, and its place in the family tree."""

from kpl_core.records.hash_key import hash_key_to_digest
from kpl_core.testing.sequence_number import LAST_COUNTER, format_sequence_number, shard_bits
from kpl_core.testing.service_limits import ServiceLimits
from kpl_core.testing.shard_capacity import ShardCapacity
from kpl_core.testing.shard_log import ShardLog

__all__ = ["FakeShard", "shard_id_of"]


def shard_id_of(index: int) -> str:
    """Return the service's name of a stream's shard number `index`."""
    return f"shardId-{index:012d}"


class FakeShard:
    """A shard, open until it is split or merged. Both ends of its hash key range are inclusive.

    Instants are milliseconds since 1970.
    """

    __slots__ = (
        "_bits",
        "adjacent_parent_shard_id",
        "capacity",
        "closed_ms",
        "created_seconds",
        "end_digest",
        "ending_hash_key",
        "index",
        "log",
        "opened_ms",
        "parent_shard_id",
        "shard_id",
        "starting_hash_key",
    )

    def __init__(
        self,
        index: int,
        *,
        starting_hash_key: int,
        ending_hash_key: int,
        opened_ms: int,
        parents: "tuple[FakeShard, ...]" = (),
        limits: ServiceLimits,
    ) -> None:
        self.index = index
        self.shard_id = shard_id_of(index)
        self.starting_hash_key = starting_hash_key
        self.ending_hash_key = ending_hash_key
        self.end_digest = hash_key_to_digest(ending_hash_key)
        self.opened_ms = opened_ms
        self.closed_ms: int | None = None
        self.parent_shard_id = parents[0].shard_id if parents else None
        self.adjacent_parent_shard_id = parents[1].shard_id if len(parents) > 1 else None
        # Strictly after its parents, even within one second: their last number must stay below its first.
        self.created_seconds: int = max([opened_ms // 1000, *(parent.created_seconds + 1 for parent in parents)])
        self.capacity = ShardCapacity(limits)
        self.log = ShardLog()
        self._bits = shard_bits(created_at=self.created_seconds, shard_index=index)

    def __repr__(self) -> str:
        state = "open" if self.closed_ms is None else "closed"
        return f"<FakeShard {self.shard_id} {state} {self.starting_hash_key}..{self.ending_hash_key}>"

    def append(self, partition_key: str, data: bytes, counter: int, arrived_ms: int) -> str:
        """Store one record and return its sequence number."""
        self.log.append(partition_key, data, counter, arrived_ms)
        return format_sequence_number(self._bits, counter, arrived_ms // 1000)

    def sequence_number(self, counter: int, arrived_ms: int) -> str:
        """Return the sequence number given to the record with this counter and arrival."""
        return format_sequence_number(self._bits, counter, arrived_ms // 1000)

    @property
    def starting_sequence_number(self) -> str:
        """Return the number below all numbers of its records."""
        return format_sequence_number(self._bits, 0, self.created_seconds)

    @property
    def ending_sequence_number(self) -> str | None:
        """Return the number above all numbers of its records, None while it is open."""
        if self.closed_ms is None:
            return None
        return format_sequence_number(self._bits, LAST_COUNTER, self.closed_ms // 1000)

    def close(self, now_ms: int) -> None:
        """Take no more records; what is stored stays readable."""
        self.closed_ms = now_ms
