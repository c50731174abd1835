"""A service in trouble: it denies, throttles, fails, resets, hangs, or is not there at all."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from kpl_core import Producer
from kpl_core.hooks import Fact, ShardMapRefreshed
from kpl_core.testing import (
    BadBody,
    Effect,
    ErrorAnswer,
    Hang,
    Latency,
    ResetAfterCommit,
    ResetBeforeCommit,
    ServiceLimits,
    ShardDescription,
    SplitDuringRequest,
    When,
    WrongCount,
)
from kpl_integrations.local_kinesis import LocalKinesis
from tests.faults.books import STREAM, Books
from tests.faults.scene import config
from tests.support.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio
OTHER = "other"
PUT_RECORDS = "PutRecords"

UNLISTABLE: list[Effect] = [ErrorAnswer("AccessDeniedException"), Hang(), Latency(600.0), ResetBeforeCommit()]


@pytest.mark.long
@pytest.mark.parametrize("effect", UNLISTABLE, ids=lambda effect: type(effect).__name__)
async def test_a_stream_whose_shards_cannot_be_listed_degrades_alone_and_says_so_once(
    effect: Effect, caplog: pytest.LogCaptureFixture
) -> None:
    async with LocalKinesis({STREAM: 2, OTHER: 2}) as service:
        service.faults.add(effect, When(operation="ListShards", stream=STREAM))
        facts: list[Fact] = []
        # Long enough for the other stream's answers on the busiest machine.
        options = config(service.endpoint_url, request_timeout_ms=2_500, connect_timeout_ms=2_500)
        async with Producer(options, hooks=[facts.append]) as producer:
            degraded, whole = Books(producer), Books(producer, OTHER)
            whole.put_nowait()
            await producer.flush()
            await until(lambda: [fact for fact in facts if isinstance(fact, ShardMapRefreshed)])
            degraded.put_nowait(300)
            whole.put_nowait(300)
            with caplog.at_level(logging.WARNING, "kpl_core"):
                await producer.flush()
                await until(lambda: caplog.records)
        assert degraded.outcomes() == {"": 300}
        assert whole.outcomes() == {"": 301}
        # Without a map it is unknown which records may travel together; the others are not concerned.
        assert not degraded.balance(service.fake).aggregates
        assert whole.balance(service.fake).aggregates
        assert all(len(result.attempts) == 1 for result in whole.results())
        warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(warnings) == 1, warnings
        assert f"shards of stream {STREAM!r} cannot be listed" in warnings[0]


@pytest.mark.long
async def test_two_producers_offered_twice_what_they_can_get_share_a_stream_and_fail_honestly() -> None:
    limits = ServiceLimits().scaled(0.1)
    async with LocalKinesis({STREAM: 2}, limits=limits) as service:
        options = {
            "aggregation_enabled": False,
            "rate_limit_records_per_sec_per_shard": 100,
            "record_ttl_ms": 1_000,
            "max_outstanding_records": 1_000,
            "retry_backoff_base_ms": 50,
        }

        async def offer(name: str) -> Books:
            async with Producer(config(service.endpoint_url, **options)) as producer:
                books = Books(producer, name=name)
                # More than the time to live lets through, however slow this machine is to offer the rest.
                await books.put(600)
                ends_at = service.now + 3.0
                while service.now < ends_at:
                    await books.put(40)
                    assert producer.buffer_limit.outstanding_records <= 1_000
                    await asyncio.sleep(0.05)
            return books

        everybody = await asyncio.gather(offer("mine"), offer("theirs"))
        for books in everybody:
            assert set(books.outcomes()) == {"", "Expired"}
            assert books.outcomes()[""] > 20
            assert books.balance(service.fake).duplicates == 0
        statistics = service.fake.statistics(STREAM)
        assert statistics.records_throttled < statistics.records_stored


async def test_an_outage_that_first_answers_500_and_then_refuses_costs_nothing_but_time() -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            failing = service.faults.add(ErrorAnswer("InternalFailure"))
            books.put_nowait(500)
            await asyncio.sleep(0.4)
            service.refuse_connections()
            books.put_nowait(500)
            await asyncio.sleep(0.4)
            assert books.pending == 1_000
            requests_in_trouble = failing.seen
            service.faults.clear()
            await service.accept_connections()
            assert (await producer.flush(timeout=PATIENCE_SECONDS)).complete
        assert books.outcomes() == {"": 1_001}
        # Backoff: some dozens of requests in 400 ms, not thousands.
        assert requests_in_trouble < 100
        assert service.fake.statistics(STREAM).list_shards_requests == 1
        assert books.balance(service.fake).duplicates == 0


@pytest.mark.parametrize("is_listening", [True, False], ids=["every-answer-500", "connections-refused"])
async def test_a_close_is_bounded_while_the_service_is_down(is_listening: bool) -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            if is_listening:
                service.faults.add(ErrorAnswer("InternalFailure"))
            else:
                service.refuse_connections()
            books.put_nowait(500)
            await asyncio.sleep(0.05)
            began_at = service.now
            report = await producer.close(timeout=0.3)
            # Ten times what was granted, for machines with something else to do.
            assert service.now - began_at < 3.0
        assert report.failed_total == 500
        assert not report.complete
        books.balance(service.fake)


RESETS = [(ResetBeforeCommit(), False), (ResetAfterCommit(), True)]


@pytest.mark.parametrize(("effect", "stores"), RESETS, ids=["before-commit", "after-commit"])
async def test_a_connection_reset_loses_nothing_and_duplicates_only_what_was_stored(
    effect: Effect, stores: bool
) -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        fault = service.faults.add(effect, When(operation=PUT_RECORDS, every=3))
        async with Producer(config(service.endpoint_url, aggregation_max_count=10)) as producer:
            books = Books(producer)
            for _ in range(10):
                books.put_nowait(100)
                await producer.flush()
        assert fault.fired
        assert books.outcomes() == {"": 1_000}
        duplicates = books.balance(service.fake).duplicates
        again = sum(len(result.attempts) - 1 for result in books.results())
        # Each answer that never came stands for one more copy of all the request carried, if it stored them.
        assert duplicates == (again if stores else 0)
        assert again > 0


UNREADABLE: list[Effect] = [WrongCount(-1), WrongCount(+1), BadBody(), BadBody(b"<html>"), BadBody(b"")]


@pytest.mark.parametrize("effect", UNREADABLE, ids=repr)
async def test_an_unreadable_answer_is_a_failure_of_the_whole_request(effect: Effect) -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        fault = service.faults.add(effect, When(operation=PUT_RECORDS, times=2))
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait(100)
        assert fault.fired == 2
        assert books.outcomes() == {"": 100}
        again = sum(len(result.attempts) - 1 for result in books.results())
        assert books.balance(service.fake).duplicates == again > 0


async def test_one_request_never_answered_is_resolved_near_its_timeout_and_the_others_flow() -> None:
    async with LocalKinesis({STREAM: 4}) as service:
        async with Producer(config(service.endpoint_url, request_timeout_ms=500, connect_timeout_ms=100)) as producer:
            books, hung = Books(producer), Books(producer, name="hung")
            books.put_nowait(10)
            await producer.flush()
            fault = service.faults.add(Hang(), When(operation=PUT_RECORDS, times=1))
            hung.put_nowait(10, key="hung")
            await until(lambda: fault.fired)
            for _ in range(10):
                for delivery in books.put_nowait(10):
                    assert (await delivery).successful
            assert hung.pending == 10
        (attempts,) = {result.attempts for result in hung.results()}
        assert [attempt.error_code for attempt in attempts] == ["Internal", None]
        assert 0.5 <= attempts[0].ended_at - attempts[0].started_at < 5.0
        assert hung.outcomes() == {"": 10}
        assert hung.balance(service.fake).duplicates == 0
        assert books.balance(service.fake).duplicates == 0


async def test_while_the_shard_map_is_refreshed_no_aggregate_mixes_shards() -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        before = service.fake.open_shards(STREAM, now=service.now)
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait(100)
            await producer.flush()
            service.faults.add(SplitDuringRequest(), When(operation=PUT_RECORDS, times=2))
            # Meanwhile the old map is all there is.
            service.faults.add(Latency(0.2), When(operation="ListShards"))
            for _ in range(60):
                books.put_nowait(50)
                await asyncio.sleep(0.005)
        after = service.fake.open_shards(STREAM, now=service.now)
        assert (len(before), len(after)) == (2, 4)
        assert books.outcomes() == {"": 3_100}
        reading = books.balance(service.fake)
        assert len(reading.aggregates) > 50
        mixed = [
            hash_keys
            for hash_keys in reading.aggregates
            if len({_holder(before, hash_key) for hash_key in hash_keys}) > 1
        ]
        assert not mixed


def _holder(shards: Sequence[ShardDescription], hash_key: int) -> str:
    (found,) = (shard.shard_id for shard in shards if shard.starting_hash_key <= hash_key <= shard.ending_hash_key)
    return found
