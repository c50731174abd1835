"""From a user record of the pipeline to what is written of it, and back."""

from kpl_core.durability.keeping_ledger import Leaving, note_of
from kpl_core.durability.spool.envelope import SpooledRecord, spooled_record_of
from kpl_core.records.kinesis_record import MovingUserRecord
from kpl_core.records.record_result import RecordResult
from kpl_core.records.user_record import UserRecord

__all__ = ["as_result", "as_spooled", "as_user_record"]


def as_spooled(stream: str, moving: MovingUserRecord, *, wall_offset: float) -> SpooledRecord:
    """Return what the spool keeps. `wall_offset` is Unix time minus the producer's time."""
    record = moving.user_record
    note = note_of(moving)
    metadata = moving.outcome.metadata
    return spooled_record_of(
        stream,
        record.partition_key,
        record.data,
        accepted_at=moving.arrived_at + wall_offset,
        explicit_hash_key=record.explicit_hash_key,
        flow=None if note is None else note.flow,
        tier=moving.tier,
        metadata=None if metadata is None else metadata.get(moving.index),
    )


def as_result(leaving: Leaving) -> RecordResult:
    """Return the failed result that a dead letter tells of."""
    history = leaving.moving.history
    earlier = () if history is None else history.to_tuple()
    return RecordResult(False, leaving.predicted_shard, None, (*earlier, leaving.attempt))  # noqa: FBT003


def as_user_record(record: SpooledRecord) -> UserRecord:
    """Return what is put again."""
    return UserRecord(
        record.partition_key, record.data, record.explicit_hash_key, record.flow, record.tier, record.metadata
    )
