"""Converts a user record of the pipeline to what is written to disk, and back."""

from kpl_core.durability.durable_ledger import PendingFallback, note_of
from kpl_core.durability.spool.envelope import SpooledRecord, spooled_record_of
from kpl_core.records.kinesis_record import DetachedUserRecord
from kpl_core.records.record_result import RecordResult
from kpl_core.records.user_record import UserRecord

__all__ = ["as_result", "as_spooled", "as_user_record"]


def as_spooled(stream: str, detached: DetachedUserRecord, *, wall_offset: float) -> SpooledRecord:
    """Return what the spool stores. `wall_offset` is Unix time minus the producer's time."""
    record = detached.user_record
    note = note_of(detached)
    metadata = detached.outcome.metadata
    return spooled_record_of(
        stream,
        record.partition_key,
        record.data,
        accepted_at=detached.arrived_at + wall_offset,
        explicit_hash_key=record.explicit_hash_key,
        flow=None if note is None else note.flow,
        tier=detached.tier,
        metadata=None if metadata is None else metadata.get(detached.index),
    )


def as_result(fallback: PendingFallback) -> RecordResult:
    """Return the failed result for a dead letter."""
    history = fallback.detached.history
    earlier = () if history is None else history.to_tuple()
    return RecordResult(False, fallback.predicted_shard, None, (*earlier, fallback.attempt))  # noqa: FBT003


def as_user_record(record: SpooledRecord) -> UserRecord:
    """Return the user record to put again."""
    return UserRecord(
        record.partition_key, record.data, record.explicit_hash_key, record.flow, record.tier, record.metadata
    )
