"""One record that cannot go, among many that can: it fails alone, and no other record waits for it."""

import asyncio

import pytest

from kpl_core import InvalidUserRecord, Producer, UserRecord
from kpl_core.testing import RecordError, ServiceLimits, When
from kpl_integrations.local_kinesis import LocalKinesis
from tests.faults.books import STREAM, Books
from tests.faults.scene import config
from tests.support.consumers import hash_key_of

pytestmark = pytest.mark.anyio
MIB = 1_048_576


@pytest.mark.parametrize(
    ("key", "explicit_hash_key", "named"),
    [
        ("k" * 300, None, "partition_key has 300 characters"),
        ("", None, "partition_key has 0 characters"),
        ("k", "007", "explicit_hash_key is '007'"),
        ("k", str(2**128), "explicit_hash_key"),
        ("k", "abc", "explicit_hash_key"),
    ],
)
async def test_a_bad_key_is_refused_alone_and_at_put(key: str, explicit_hash_key: str | None, named: str) -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            for _ in range(10):
                books.put_nowait(10)
                with pytest.raises(InvalidUserRecord, match=named):
                    _ = producer.put_nowait(STREAM, partition_key=key, data=b"x", explicit_hash_key=explicit_hash_key)
                with pytest.raises(InvalidUserRecord, match=named):
                    _ = await producer.put(STREAM, partition_key=key, data=b"x", explicit_hash_key=explicit_hash_key)
        assert books.outcomes() == {"": 100}
        assert producer.report().accepted == 100
        assert books.balance(service.fake).duplicates == 0


async def test_a_bad_record_among_many_is_named_by_its_index_and_none_of_them_is_put() -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            with pytest.raises(InvalidUserRecord, match=r"records\[7\]"):
                await producer.put_many(STREAM, [("k" * (300 if n == 7 else 3), b"x") for n in range(10)])
        assert producer.report().accepted == 0
        assert not service.fake.records(STREAM)


async def test_a_record_over_the_streams_limit_is_refused_at_put_and_delays_no_neighbour() -> None:
    async with LocalKinesis({STREAM: 1}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait(10, key="k")
            with pytest.raises(InvalidUserRecord, match="1,048,577"):
                _ = producer.put_nowait(STREAM, partition_key="k", data=bytes(MIB))
            books.put_nowait(10, key="k")
            assert producer.buffer_limit.outstanding_records == 20
            # One that just fits is no trouble either.
            books.put_nowait(1, key="k", size=MIB - 1)
            books.put_nowait(10, key="k")
        assert books.outcomes() == {"": 31}
        assert all(len(result.attempts) == 1 for result in books.results())
        assert books.balance(service.fake).duplicates == 0


@pytest.mark.parametrize("data", ["text", None, 7, ["x"]])
async def test_data_of_a_wrong_type_is_an_error_of_the_caller_and_the_producer_lives_on(data: object) -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait(10)
            with pytest.raises(TypeError, match="bytes"):
                _ = producer.put_nowait(STREAM, partition_key="k", data=data)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="bytes"):
                _ = await producer.put(STREAM, partition_key="k", data=data)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"records\[1\]"):
                await producer.put_many(STREAM, [("k", b"x"), ("k", data)])  # type: ignore[list-item]
            books.put_nowait(10)
        assert books.outcomes() == {"": 20}
        assert books.balance(service.fake).duplicates == 0


async def test_exactly_the_failed_records_of_a_response_are_retried_while_more_are_queued() -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        fault = service.faults.add(RecordError("InternalFailure"), When(every=7, once_per_record=True))
        async with Producer(config(service.endpoint_url, aggregation_enabled=False)) as producer:
            books = Books(producer)
            for _ in range(20):
                books.put_nowait(100)
                await asyncio.sleep(0.002)
        assert books.outcomes() == {"": 2_000}
        statistics = service.fake.statistics(STREAM)
        assert fault.fired > 200
        assert statistics.records_faulted == fault.fired
        assert statistics.records_offered == 2_000 + fault.fired
        retried = [result for result in books.results() if len(result.attempts) > 1]
        assert len(retried) == fault.fired
        assert books.balance(service.fake).duplicates == 0


RECORD_CODES = [("InternalFailure", ""), ("KMSThrottlingException", ""), ("KMSAccessDeniedException", None)]


@pytest.mark.parametrize(("code", "outcome"), RECORD_CODES)
async def test_a_code_that_is_not_throttling_is_retried_or_reported_and_the_rest_go_on(
    code: str, outcome: str | None
) -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        unlucky = When(record=lambda key, _: key.endswith("-7"), times=2)
        fault = service.faults.add(RecordError(code), unlucky)
        async with Producer(config(service.endpoint_url, aggregation_enabled=False)) as producer:
            books = Books(producer)
            books.put_nowait(100)
        last = code if outcome is None else outcome
        assert books.outcomes() == {"": 99, last: 1} if last else {"": 100}
        assert fault.fired == (2 if outcome == "" else 1)
        (met,) = [result for result in books.results() if result.attempts[0].error_code]
        assert len(met.attempts) == (3 if outcome == "" else 1)
        assert books.balance(service.fake).duplicates == 0


async def test_one_hot_key_on_a_limited_stream_does_not_slow_the_other_shards() -> None:
    # A tenth of a shard's rates: what is put for the hot one takes it a while.
    async with LocalKinesis({STREAM: 4}, limits=ServiceLimits().scaled(0.1)) as service:
        options = {"rate_limit_records_per_sec_per_shard": 100, "aggregation_enabled": False}
        async with Producer(config(service.endpoint_url, **options)) as producer:
            hot, cold = Books(producer, name="hot"), Books(producer, name="cold")
            hot.put_nowait(1, key="hot")
            await producer.flush()
            hot.put_nowait(250, key="hot")
            for number in range(200):
                key = f"cold-{number}"
                if shard_of(key) != shard_of("hot"):
                    cold.put_nowait(1, key=key)
            for delivery in list(cold.deliveries.values()):
                assert (await delivery).successful
            still_waiting = hot.pending
            # What the shard takes at once is gone, the others are not held up by what it does not.
            assert still_waiting > 50
        assert hot.outcomes() == {"": 251}
        assert all(len(result.attempts) == 1 for result in cold.results())
        hot.balance(service.fake)
        assert cold.balance(service.fake).duplicates == 0


def shard_of(key: str) -> int:
    return hash_key_of(UserRecord(key, b"")) >> 126
