"""Our producer with an emulator, in a new event loop for each call."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kpl_core import Config, Producer, RecordResult, UserRecord
from tests.interop.consumers.user_records import ReadUserRecord
from tests.interop.emulators import Emulator
from tests.interop.ledger import PutUserRecord
from tests.interop.streams import REGION, Stream
from tests.support.processes import CREDENTIALS

PATIENCE_SECONDS = 60.0  # for an emulator on a loaded machine
PACE_SECONDS = 0.004
OUTSTANDING_RECORDS = 400  # a slow emulator slows the producer down, and its stream stays small
LOTS_AFTERWARDS = 20  # until the producer has seen the new shards and refreshed its map


def config(emulator: Emulator, **options: Any) -> Config:
    """Return the producer's options for an emulator on a busy machine."""
    return Config(
        **{
            "region": REGION,
            "endpoint_url": emulator.endpoint_url,
            "aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            "record_ttl_ms": PATIENCE_SECONDS * 1000,
            "request_timeout_ms": PATIENCE_SECONDS * 1000,
            **options,
        }
    )


def produce(
    stream: Stream, records: Sequence[PutUserRecord], *, to: str | None = None, **options: Any
) -> list[RecordResult]:
    """Put all records at once and return their results, in the same order."""

    async def run() -> list[RecordResult]:
        async with Producer(config(stream.emulator, **options)) as producer:
            deliveries = await producer.put_many(to or stream.name, _user_records(records))
            return await deliveries.results()

    results = asyncio.run(run())
    assert len(results) == len(records)
    return results


def produce_during(
    stream: Stream, change: Callable[[], None], lots: Iterable[Sequence[PutUserRecord]], **options: Any
) -> tuple[list[PutUserRecord], list[RecordResult]]:
    """Put one batch after another while `change` runs in a thread; return the records and their results.

    The first batch is delivered before the change begins, so that the producer knows the old shards.
    """

    async def run() -> tuple[list[PutUserRecord], list[RecordResult]]:
        waiting = iter(lots)
        bounded = config(stream.emulator, max_outstanding_records=OUTSTANDING_RECORDS, **options)
        async with Producer(bounded) as producer:
            put = list(next(waiting))
            deliveries = list(await producer.put_many(stream.name, _user_records(put)))
            await producer.flush(timeout=PATIENCE_SECONDS)
            changing = asyncio.create_task(asyncio.to_thread(change))
            lots_afterwards = 0
            while lots_afterwards < LOTS_AFTERWARDS:
                lots_afterwards += changing.done()
                lot = next(waiting)
                put += lot
                deliveries += await producer.put_many(stream.name, _user_records(lot))
                await asyncio.sleep(PACE_SECONDS)
            await changing
            return put, [await delivery for delivery in deliveries]

    return asyncio.run(run())


def assert_all_delivered(put: Sequence[PutUserRecord], results: Sequence[RecordResult]) -> None:
    """Assert that every result is a success."""
    failed = [(record, result) for record, result in zip(put, results, strict=True) if not result.successful]
    reasons = {
        f"{record.partition_key[:20]!r}, {len(record.data)} bytes, {len(result.attempts)} attempts: "
        f"{result.error_code}: {(result.error_message or '')[:200]}"
        for record, result in failed[:3]
    }
    assert not failed, f"{len(failed)} of {len(put)} records failed: {reasons}"


def assert_delivered_where_told(
    put: Sequence[PutUserRecord], results: Sequence[RecordResult], read: Iterable[ReadUserRecord]
) -> None:
    """Assert that each record was read from the shard and with the sequence number its result names."""
    places: dict[tuple[str, bytes], set[tuple[str, str]]] = {}
    for user_record in read:
        places.setdefault((user_record.partition_key, user_record.data), set()).add(
            (user_record.shard_id, user_record.sequence_number)
        )
    for record, result in zip(put, results, strict=True):
        told = (result.shard_id, result.sequence_number)
        found = places[record.identity]
        assert told in found, f"{record.partition_key[:20]!r}, {record.data[:20]!r}: told {told}, found in {found}"


def _user_records(records: Sequence[PutUserRecord]) -> list[UserRecord]:
    return [UserRecord(record.partition_key, record.data, record.explicit_hash_key) for record in records]
