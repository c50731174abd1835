"""Leaving the producer, in every way a program leaves: calmly, in trouble, cancelled, from a thread."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from kpl_core import BlockingProducer, Producer, ProducerClosed
from kpl_core.testing import Effect, ErrorAnswer, Hang, Latency, RecordError, When
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.faults.books import STREAM, Books, assert_closed
from tests.faults.scene import config
from tests.support.consumers import read_stream
from tests.support.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio
PUT_RECORDS = "PutRecords"


async def test_records_put_just_before_leaving_are_delivered_without_anything_awaited() -> None:
    async with LocalKinesis({STREAM: 4}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            books.put_nowait(1_000)
        assert books.outcomes() == {"": 1_000}
        assert books.balance(service.fake).duplicates == 0


TROUBLE: list[tuple[Effect, When]] = [
    (RecordError(), When(every=5, once_per_record=True)),
    (ErrorAnswer("InternalFailure"), When(operation=PUT_RECORDS, times=1)),
]


@pytest.mark.parametrize(("effect", "when"), TROUBLE, ids=["one-in-five-throttled-once", "one-request-answered-500"])
async def test_leaving_in_the_middle_of_trouble_retries_to_the_end(effect: Effect, when: When) -> None:
    async with LocalKinesis({STREAM: 4}) as service:
        fault = service.faults.add(effect, when)
        async with Producer(config(service.endpoint_url, aggregation_max_count=3)) as producer:
            books = Books(producer)
            books.put_nowait(1_000)
        assert fault.fired
        assert books.outcomes() == {"": 1_000}
        assert books.balance(service.fake).duplicates == 0


async def test_a_cancelled_put_harms_no_other_record() -> None:
    async with LocalKinesis({STREAM: 1}) as service:
        # Room for five, and the sixth of an aggregated record closes it: every sixth put waits in line.
        options = {"aggregation_max_count": 6, "max_outstanding_records": 5, "record_max_buffered_time_ms": 50}
        async with Producer(config(service.endpoint_url, **options)) as producer:
            books = Books(producer)
            await books.put(1)
            await producer.flush()
            for _ in range(10):
                books.put_nowait(5)
                waiting = asyncio.create_task(producer.put(STREAM, partition_key="cancelled", data=b"cancelled"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    _ = await waiting
                await producer.flush()
        assert books.outcomes() == {"": 51}
        reading = books.balance(service.fake)
        assert ("cancelled", b"cancelled") not in reading.kept
        assert reading.duplicates == 0


async def test_the_owner_is_cancelled_with_records_in_flight_and_leaves_promptly() -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        inside = asyncio.Event()
        books: list[Books] = []

        async def own() -> None:
            # A request may take an hour here; leaving takes what it takes to hand out results.
            options = {"request_timeout_ms": 600_000, "max_in_flight_requests": 2, "aggregation_enabled": False}
            async with Producer(config(service.endpoint_url, **options)) as producer:
                books.append(Books(producer))
                books[0].put_nowait(100)
                await producer.flush()
                service.faults.add(Hang(), When(operation=PUT_RECORDS))
                books[0].put_nowait(700)
                await until(lambda: producer.statistics()[STREAM].in_flight)
                books[0].put_nowait(700)
                inside.set()
                await asyncio.sleep(PATIENCE_SECONDS)

        owner = asyncio.create_task(own())
        await inside.wait()
        owner.cancel()
        done, _ = await asyncio.wait([owner], timeout=PATIENCE_SECONDS / 2)
        assert done
        assert owner.cancelled()
        outcomes = books[0].outcomes()
        assert outcomes[""] == 100
        assert outcomes["Unknown"] > 0
        assert outcomes["Shutdown"] + outcomes["Unknown"] == 1_400
        report = books[0].producer.report()
        assert not report.complete
        assert report.failed == {code: count for code, count in outcomes.items() if code}
        books[0].balance(service.fake)


async def test_a_close_that_runs_out_of_time_accounts_for_all() -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            service.faults.add(Latency(600.0), When(operation=PUT_RECORDS))
            books.put_nowait(1_000)
            report = await producer.close(timeout=0.2)
        assert report.failed_total == 1_000
        assert not report.complete
        books.balance(service.fake)


def test_results_can_be_read_after_a_blocking_producer_closed() -> None:
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 2})) as service:
        with BlockingProducer(config(service.endpoint_url)) as producer:
            deliveries = [producer.put_nowait(STREAM, partition_key=f"k{n}", data=b"%d" % n) for n in range(100)]
        assert all(delivery.done for delivery in deliveries)
        assert all(delivery.result(timeout=0.0).successful for delivery in deliveries)
        assert producer.flush(timeout=0.0).complete
        assert producer.close().delivered == 100
        reading = service.call(lambda fake, now: read_stream(fake, STREAM, now=now))
        assert (len(reading.kept), reading.duplicates) == (100, 0)


def _flush(producer: BlockingProducer) -> object:
    return producer.flush(timeout=PATIENCE_SECONDS)


def _close(producer: BlockingProducer) -> object:
    return producer.close(timeout=PATIENCE_SECONDS)


def _put_and_wait(producer: BlockingProducer) -> object:
    return producer.put(STREAM, partition_key="late", data=b"late").result(timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("ask", [_flush, _close, _put_and_wait])
def test_calls_of_threads_while_a_blocking_producer_closes_work_or_fail_in_one_clear_way(
    ask: Callable[[BlockingProducer], object],
) -> None:
    answers: list[object] = []

    def keep_asking() -> None:
        try:
            answers.extend(ask(producer) for _ in range(10_000))
        except ProducerClosed as error:
            answers.append(error)

    with ThreadedLocalKinesis(LocalKinesis({STREAM: 2})) as service:
        with BlockingProducer(config(service.endpoint_url)) as producer:
            deliveries = [producer.put_nowait(STREAM, partition_key=f"k{n}", data=b"%d" % n) for n in range(100)]
            threads = [threading.Thread(target=keep_asking, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            threads[0].join(0.02)
            report = producer.close(timeout=PATIENCE_SECONDS)
            for thread in threads:
                thread.join(PATIENCE_SECONDS)
            assert not any(thread.is_alive() for thread in threads)
        assert answers
        assert all(delivery.result(timeout=0.0).successful for delivery in deliveries)
        assert report.accepted == report.delivered + report.failed_total


async def test_leaving_without_ever_having_put_is_nothing() -> None:
    async with LocalKinesis({STREAM: 1}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            pass
        assert producer.report().accepted == 0
        assert service.fake.calls.total() == 0
        assert_closed(producer)
