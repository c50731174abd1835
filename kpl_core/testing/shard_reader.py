"""Read a shard: where an iterator starts, and which records one GetRecords answer has."""

from collections.abc import Iterator
from typing import Final

from kpl_core.options.kinesis_limits import MIB
from kpl_core.testing.fake_shard import FakeShard, parse_sequence_number, shard_id_of
from kpl_core.testing.fake_stream import FakeStream
from kpl_core.testing.kinesis_api import INVALID_ARGUMENT, ChildShard, KinesisError, RecordsPage, StoredRecord
from kpl_core.testing.shard_listing import ShardIterator, encode_token

_BY_NUMBER: Final = frozenset({"AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"})
# API_GetRecords: the largest answer, unless its first record is larger.
_ANSWER_BYTES: Final = 10 * MIB


def starting_position(
    stream: FakeStream,
    shard: FakeShard,
    iterator_type: str,
    *,
    sequence_number: str | None,
    timestamp_ms: int | None,
    now_ms: int,
) -> int:
    """Return the position at which an iterator of this type starts.

    Raises:
        KinesisError: InvalidArgumentException; the argument does not fit the type or the shard.
    """
    _check_arguments(iterator_type, sequence_number, timestamp_ms, now_ms)
    horizon = shard.log.start(stream.horizon_ms(now_ms))
    if sequence_number is not None:
        counter = _counter(stream, shard, sequence_number)
        return max(horizon, shard.log.position_of(counter + (iterator_type == "AFTER_SEQUENCE_NUMBER")))
    if timestamp_ms is not None:
        return max(horizon, shard.log.start(timestamp_ms))
    return shard.log.end if iterator_type == "LATEST" else horizon


def _check_arguments(iterator_type: str, sequence_number: str | None, timestamp_ms: int | None, now_ms: int) -> None:
    if (iterator_type in _BY_NUMBER) != (sequence_number is not None):
        what = "no" if sequence_number is None else "also a"
        message = (
            "Must either specify (1) AT_SEQUENCE_NUMBER or AFTER_SEQUENCE_NUMBER and StartingSequenceNumber or "
            "(2) TRIM_HORIZON or LATEST and no StartingSequenceNumber. "
            f"Request specified {iterator_type} and {what} StartingSequenceNumber."
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    if (iterator_type == "AT_TIMESTAMP") != (timestamp_ms is not None):
        what = "no" if timestamp_ms is None else "also a"
        message = (
            "Must either specify AT_TIMESTAMP and a Timestamp or another type and no Timestamp. "
            f"Request specified {iterator_type} and {what} Timestamp."
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    if timestamp_ms is not None and timestamp_ms > now_ms:
        message = (
            "The timestampInMillis parameter cannot be greater than the currentTimestampInMillis. "
            f"timestampInMillis: {timestamp_ms}, currentTimestampInMillis: {now_ms}"
        )
        raise KinesisError(INVALID_ARGUMENT, message)


def _counter(stream: FakeStream, shard: FakeShard, sequence_number: str) -> int:
    number = parse_sequence_number(sequence_number)
    if number is None or number.shard_created_at > shard.created_seconds:
        message = (
            f"StartingSequenceNumber {sequence_number} used in GetShardIterator on shard {shard.shard_id} "
            f"in {stream} is invalid because it did not come from this stream."
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    if number.shard_index != shard.index:
        message = (
            f"Invalid StartingSequenceNumber. It encodes {shard_id_of(number.shard_index)}, "
            f"while it was used in a call to a shard with {shard.shard_id}"
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    return number.counter


def read(stream: FakeStream, shard: FakeShard, position: int, *, limit: int, now_ms: int) -> RecordsPage:
    """Return at most `limit` records (and 10 MiB) from `position`, and the next iterator.

    `millis_behind_latest` is 0 only if no newer record is stored. At the end of a closed shard the answer has no
    next iterator and names the shard's children.
    """
    log = shard.log
    end = log.end
    position = max(position, log.start(stream.horizon_ms(now_ms)))
    records: list[StoredRecord] = []
    size = 0
    while position < end and len(records) < limit:
        record = _stored(shard, position)
        size += len(record.partition_key.encode()) + len(record.data)
        if size > _ANSWER_BYTES and records:
            break
        records.append(record)
        position += 1
    if position == end and shard.closed_ms is not None:
        return RecordsPage(tuple(records), None, 0, _child_shards(stream, shard))
    # At least 1 if a newer record is stored: 0 means that there is none.
    behind = 0 if position == end else max(1, now_ms - log.arrived_ms(position))
    following = ShardIterator(stream.name, shard.index, position, now_ms)
    return RecordsPage(tuple(records), encode_token(following), behind, ())


def everything(shard: FakeShard) -> Iterator[StoredRecord]:
    """Yield all stored records of a shard, in sequence order."""
    for position in range(shard.log.first, shard.log.end):
        yield _stored(shard, position)


def _stored(shard: FakeShard, position: int) -> StoredRecord:
    partition_key, data, counter, arrived_ms = shard.log.record(position)
    return StoredRecord(shard.shard_id, shard.sequence_number(counter, arrived_ms), partition_key, data, arrived_ms)


def _child_shards(stream: FakeStream, shard: FakeShard) -> tuple[ChildShard, ...]:
    return tuple(
        ChildShard(
            child.shard_id,
            tuple(parent for parent in (child.parent_shard_id, child.adjacent_parent_shard_id) if parent is not None),
            child.starting_hash_key,
            child.ending_hash_key,
        )
        for child in stream.shards.children(shard)
    )
