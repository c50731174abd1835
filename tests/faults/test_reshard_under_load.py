"""Shards split and merge under load; a consumer with the KCL's rule reads every record put.

It drops an aggregated record with any user record outside the shard it is read from, so being stored
is not enough.
"""

import asyncio
from collections.abc import Callable

import pytest

from kpl_core import Producer
from kpl_core.testing import FakeKinesis, Latency, When
from kpl_integrations.local_kinesis import LocalKinesis
from tests.faults.books import STREAM, Books
from tests.faults.scene import config
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
WRONG_SHARD = "Wrong Shard"
Reshard = Callable[[FakeKinesis, float], None]


def split_one(fake: FakeKinesis, now: float) -> None:
    shard = fake.open_shards(STREAM, now=now)[0]
    middle = (shard.starting_hash_key + shard.ending_hash_key) // 2
    fake.split_shard(STREAM, shard_id=shard.shard_id, new_starting_hash_key=middle, now=now)


def split_all(fake: FakeKinesis, now: float) -> None:
    fake.update_shard_count(STREAM, target_shard_count=2 * len(fake.open_shards(STREAM, now=now)), now=now)


def merge_two(fake: FakeKinesis, now: float) -> None:
    first, second, *_ = fake.open_shards(STREAM, now=now)
    fake.merge_shards(STREAM, shard_id=first.shard_id, adjacent_shard_id=second.shard_id, now=now)


def merge_all(fake: FakeKinesis, now: float) -> None:
    fake.update_shard_count(STREAM, target_shard_count=len(fake.open_shards(STREAM, now=now)) // 2, now=now)


CHANGES: list[tuple[Reshard, ...]] = [
    (split_one,),
    (split_all,),
    (merge_two,),
    (merge_all,),
    (split_all, split_all, merge_all, split_one, merge_two),
]


@pytest.mark.long
@pytest.mark.parametrize("listing_seconds", [0.0, 0.15], ids=["quick-listing", "slow-listing"])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "+".join(change.__name__ for change in changes))
async def test_a_consumer_loses_nothing_while_shards_change_under_load(
    changes: tuple[Reshard, ...], listing_seconds: float
) -> None:
    async with LocalKinesis({STREAM: 4}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait(100)
            await producer.flush()
            # Before there is a shard map, user records travel alone, and a consumer drops none.
            await until(lambda: producer.internal.predicted_shard(STREAM, "a key"))
            service.faults.add(Latency(listing_seconds), When(operation="ListShards"))
            for change in changes:
                books.put_nowait(200)
                change(service.fake, service.now)
                for _ in range(20):
                    books.put_nowait(40)
                    await asyncio.sleep(0.005)
        count = 100 + len(changes) * 1_000
        assert books.outcomes() == {"": count}
        reading = books.balance(service.fake, now=service.now)
        # Every copy beyond the first is one that a consumer would have dropped, and the result says so.
        misplaced = sum(attempt.error_code == WRONG_SHARD for result in books.results() for attempt in result.attempts)
        assert reading.duplicates + reading.dropped.total() == misplaced
        # Of what the consumer dropped, once or, as shards changed again, twice, all came again.
        assert reading.dropped.keys() <= reading.kept.keys()
        # Of what it kept, only what is stored in a shard that opened and closed between two listings:
        # its range is unknown, so it is unknown whether a consumer keeps it.
        if len(changes) == 1:
            assert reading.duplicates == 0
        if split_all in changes or split_one in changes:
            assert reading.dropped.total() > 0


async def test_records_for_a_consumer_that_never_drops_are_stored_once_during_reshards() -> None:
    async with LocalKinesis({STREAM: 4}) as service:
        async with Producer(config(service.endpoint_url, aggregation_enabled=False)) as producer:
            books = Books(producer)
            for change in (split_all, merge_two, split_one):
                books.put_nowait(100)
                await producer.flush()
                change(service.fake, service.now)
                books.put_nowait(100)
        assert books.outcomes() == {"": 600}
        assert all(len(result.attempts) == 1 for result in books.results())
        assert books.balance(service.fake, now=service.now).duplicates == 0
        assert service.fake.statistics(STREAM).records_stored == 600
