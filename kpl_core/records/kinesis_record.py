"""A Kinesis record: one entry of a PutRecords request, with one user record or many.

Its encoded bytes are the only copy of the user records' content. If a user record expires or the shard map changes,
the Kinesis record is taken apart, and its user records are decoded from those bytes.
"""

from collections.abc import Sequence

import msgspec

from kpl_core.records.aggregated_record import DIGEST_BYTES, MAGIC, decode_protobuf
from kpl_core.records.outcome import History, Outcome
from kpl_core.records.record_result import Attempt
from kpl_core.records.user_record import Tier, UserRecord, user_record_digest


class DetachedUserRecord(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A user record that moves from one Kinesis record to another. Nothing it refers to refers back."""

    user_record: UserRecord
    arrived_at: float
    # The flush that waits for it, and the tier, outcome and index that it had in its old Kinesis record.
    generation: int
    tier: Tier
    outcome: Outcome
    index: int
    history: History | None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of key and data, which backpressure reserved."""
        return len(self.user_record.partition_key.encode()) + len(self.user_record.data)

    def after(self, attempt: Attempt) -> "DetachedUserRecord":
        """Return a copy with one more attempt in its history."""
        return msgspec.structs.replace(self, history=History(attempt, self.history))


class KinesisRecord(msgspec.Struct, eq=False, gc=False):
    """The unit of work of the stages after aggregation. It is compared by identity.

    The garbage collector does not track it: nothing it refers to refers back.
    """

    data: bytes
    partition_key: str
    # Decimal. It is always sent, because the partition key of an aggregated record does not determine its shard.
    explicit_hash_key: str
    # Key and data, as the service counts them.
    size_bytes: int
    aggregated: bool
    # When each user record was put.
    arrivals: Sequence[float]
    # Key and data of the user records as the caller counts them, which backpressure reserved.
    user_bytes: int
    outcome: Outcome
    # None if no shard map was known: then only the service knows the shard.
    predicted_shard: str | None = None
    # The caller's explicit hash key of a single user record. An aggregated record contains those of its records.
    user_explicit_hash_key: str | None = None
    tier: Tier = "normal"
    deadline: float = 0.0
    expires_at: float = 0.0
    # The flush that waits for it, and its position in the order of closing.
    generation: int = 0
    sequence: int = 0
    # The number of consecutive failed attempts, which is the exponent of its backoff.
    failures: int = 0
    # False: the digest of an aggregated record is computed when a request takes the record.
    is_sealed: bool = True

    @property
    def user_record_count(self) -> int:
        """Return the number of its user records."""
        return len(self.arrivals)

    def user_records(self) -> Sequence[UserRecord]:
        """Decode and return its user records."""
        if self.aggregated:
            return decode_protobuf(self.data[len(MAGIC) : -DIGEST_BYTES])
        return (UserRecord(self.partition_key, self.data, self.user_explicit_hash_key),)

    def digests(self) -> list[bytes]:
        """Return the hash keys of its user records as 16-byte digests."""
        return [user_record_digest(record.partition_key, record.explicit_hash_key) for record in self.user_records()]

    def take_apart(self) -> list[DetachedUserRecord]:
        """Return all its user records, each with its history. Then settle or move each one, and `detach` the record.

        Call it only once: a second call would return records that have moved already, and they would be sent twice.
        """
        outcome = self.outcome
        return [
            DetachedUserRecord(
                user_record=record,
                arrived_at=self.arrivals[index],
                generation=self.generation,
                tier=self.tier,
                outcome=outcome,
                index=index,
                history=outcome.history_of(index),
            )
            for index, record in enumerate(self.user_records())
        ]

    def __repr__(self) -> str:
        kind = "aggregated" if self.aggregated else "single"
        size = f"{len(self.arrivals)} user records, {self.size_bytes} bytes"
        return f"<KinesisRecord {kind}, {size}, {self.predicted_shard}>"
