"""A Kinesis record: one entry of a PutRecords request, carrying one user record or many.

Its encoded bytes are the only copy of the user records' content. The few Kinesis
records that must be taken apart (a user record expired, the shard map changed) are
decoded from these bytes.
"""

from collections.abc import Sequence

import msgspec

from kpl_core.records.aggregated_record import decode
from kpl_core.records.outcome import History, Outcome
from kpl_core.records.record_result import Attempt
from kpl_core.records.user_record import Tier, UserRecord, user_record_digest

__all__ = ["DetachedUserRecord", "KinesisRecord"]


class DetachedUserRecord(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A user record on its way from one Kinesis record to another. Nothing it refers to refers back."""

    user_record: UserRecord
    arrived_at: float
    # Which flush waits for it.
    generation: int
    tier: Tier
    outcome: Outcome
    index: int
    history: History | None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of key and data, as they were reserved."""
        return len(self.user_record.partition_key.encode()) + len(self.user_record.data)

    def after(self, attempt: Attempt) -> "DetachedUserRecord":
        """Return a copy with one more attempt."""
        return msgspec.structs.replace(self, history=History(attempt, self.history))


class KinesisRecord(msgspec.Struct, eq=False, gc=False):
    """The record that the stages after aggregation pass on. Compared by identity.

    Not tracked by the garbage collector: nothing it refers to refers back.
    """

    data: bytes
    partition_key: str
    # Decimal, always sent: the shard of an aggregated record does not follow from its partition key.
    explicit_hash_key: str
    # Key and data, as the service counts them.
    size_bytes: int
    aggregated: bool
    # When each user record was put.
    arrivals: Sequence[float]
    # Key and data of the user records as the caller counts them: what backpressure reserved.
    user_bytes: int
    outcome: Outcome
    # None: the service routes it, because no shard map was known.
    predicted_shard: str | None = None
    # The caller's hash key of a single user record; an aggregated record has them inside its data.
    user_explicit_hash_key: str | None = None
    tier: Tier = "normal"
    deadline: float = 0.0
    expires_at: float = 0.0
    # Which flush waits for it, and its place in the order of closing.
    generation: int = 0
    sequence: int = 0
    # Consecutive failed attempts: the exponent of its backoff.
    failures: int = 0

    @property
    def user_record_count(self) -> int:
        """Return how many user records it contains."""
        return len(self.arrivals)

    def user_records(self) -> Sequence[UserRecord]:
        """Return the user records in it, decoded."""
        decoded = decode(self.data) if self.aggregated else None
        if decoded is not None:
            return decoded
        return (UserRecord(self.partition_key, self.data, self.user_explicit_hash_key),)

    def digests(self) -> list[bytes]:
        """Return the hash keys of its user records as 16-byte digests."""
        return [user_record_digest(record.partition_key, record.explicit_hash_key) for record in self.user_records()]

    def take_apart(self) -> list[DetachedUserRecord]:
        """Return all its user records, each with its attempts.

        Call it once, then settle or move each of them and detach this record from the ledger. After a second call the
        user records would be sent twice.
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
        content = f"{len(self.arrivals)} user records, {self.size_bytes} bytes"
        return f"<KinesisRecord {kind}, {content}, {self.predicted_shard}>"
