"""When a record expires: the one rule, for every place in which records wait. Pure.

A user record expires `record_ttl_ms` after its put. A Kinesis record expires with its oldest user record
(`KinesisRecord.expires_at`, from `pipeline/lane.py`). At that instant the record has expired. Each place takes out its
expired records. `pipeline/retrier.py:Retrier.expire` then fails the user records that are too old, and returns the
others, which travel on.

    pipeline/intake/fair_shards.py  user records in the fair queue of a shard
    pipeline/shard_limiter.py       Kinesis records that wait for tokens; also those due after a backoff
    pipeline/collector.py           admitted records, if no request can leave for so long (`extension_seconds`)
    pipeline/send_queue.py          records of an invalid request that is bisected (`PATIENCE_SECONDS`)
    pipeline/retrier.py             records whose attempt failed

What has tokens was admitted in time, so it may wait longer than its time to live.
"""

from collections.abc import Iterable
from typing import Final

from kpl_core.records.kinesis_record import KinesisRecord

# User records expired by one call. More may expire at one instant, and other tasks of the loop must get their turn.
EXPIRED_AT_ONCE: Final = 500


def has_expired(expires_at: float, now: float) -> bool:
    """Return True if what expires at `expires_at` has expired. Both are seconds of the producer's clock."""
    return expires_at <= now


def split_expired(
    records: Iterable[KinesisRecord], now: float, *, extension_seconds: float
) -> tuple[list[KinesisRecord], list[KinesisRecord]]:
    """Return the records that expired at least `extension_seconds` ago, and the others, both in order."""
    expired: list[KinesisRecord] = []
    left: list[KinesisRecord] = []
    for record in records:
        (expired if has_expired(record.expires_at + extension_seconds, now) else left).append(record)
    return expired, left
