"""Leaving and closing, in every way an application can do it."""

import math

import anyio
import anyio.lowlevel
import pytest

from kpl_core import Delivery, ProducerClosed, ProducerReport
from kpl_core.testing import ErrorAnswer, FakeKinesis, Hang, RecordError, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.producer_scene import (
    AT_A_TENTH,
    STREAM,
    EndOfTheDriver,
    assert_books_close,
    know_shards,
    producer,
    put,
    reasons,
    sent_records,
    service,
    stored,
    unmetered,
)

pytestmark = pytest.mark.anyio

# Leaving


async def test_records_put_just_before_leaving_are_delivered():
    transport = service(2)
    async with producer(transport) as orders:
        deliveries = put(orders, 1_000)
    assert reasons(deliveries) == {"": 1_000}
    assert len(stored(transport)) == 1_000


@pytest.mark.parametrize(
    ("effect", "when"),
    [
        (RecordError(), When(every=5, once_per_record=True)),
        (ErrorAnswer("InternalFailure"), When(operation="PutRecords", times=1)),
        (ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords", every=2, times=5)),
    ],
)
async def test_leaving_waits_for_the_retries(effect, when):
    transport = unmetered()
    transport.kinesis.faults.add(effect, when)
    async with producer(transport, aggregation_enabled=False) as orders:
        deliveries = put(orders, 500)
    assert reasons(deliveries) == {"": 500}
    assert sorted(data for _, data in stored(transport)) == sorted({data for _, data in stored(transport)})


async def test_an_exception_leaves_as_it_came_after_everything_was_delivered():
    """It came out wrapped in an ExceptionGroup."""
    transport = service()
    deliveries: list[Delivery] = []

    async def fail() -> None:
        async with producer(transport) as orders:
            deliveries.extend(put(orders, 10))
            message = "mine"
            raise ValueError(message)

    with pytest.raises(ValueError, match="mine"):
        await fail()
    assert reasons(deliveries) == {"": 10}


async def test_a_cancelled_owner_leaves_promptly_and_every_delivery_is_resolved(caplog):
    transport = service(latency_seconds=5.0)
    orders = producer(transport)
    async with anyio.create_task_group() as tasks:

        async def own() -> None:
            async with orders:
                deliveries.extend(put(orders, 100))
                await anyio.sleep_forever()

        deliveries: list[Delivery] = []
        tasks.start_soon(own)
        await anyio.sleep(3.0)
        deliveries += put(orders, 50)
        began = anyio.current_time()
        tasks.cancel_scope.cancel()
    assert anyio.current_time() == began
    report = orders.report()
    assert_books_close(report, deliveries)
    assert not report.complete
    assert set(report.failed) == {"Unknown", "Shutdown"}
    assert "the Kinesis producer is closed: 150 accepted" in caplog.text


async def test_a_timeout_around_the_block_is_a_timeout():
    orders = producer(service(latency_seconds=60.0))
    deliveries: list[Delivery] = []

    async def wait() -> None:
        with anyio.fail_after(1.0):
            async with orders:
                deliveries.extend(put(orders, 1))
                await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await wait()
    assert anyio.current_time() == 1.0
    assert_books_close(orders.report(), deliveries)


async def test_what_ends_the_driver_ends_the_block_and_loses_no_result():
    class Broken(FakeTransport):
        async def put_records(self, request):
            raise EndOfTheDriver

    orders = producer(Broken(FakeKinesis({STREAM: 1})))
    with pytest.RaisesGroup(EndOfTheDriver, flatten_subgroups=True):
        async with orders:
            deliveries = put(orders, 10)
            await anyio.sleep_forever()
    assert_books_close(orders.report(), deliveries)


# Closing


async def test_closing_inside_the_block_does_not_end_the_block():
    """It cancelled the task that had entered the producer."""
    transport = service()
    async with producer(transport) as orders:
        deliveries = put(orders, 10)
        report = await orders.close()
        await anyio.sleep(1.0)
        assert (await deliveries[0]).successful
        went_on = True
    assert went_on
    assert_books_close(report, deliveries)
    assert report.complete
    assert str(report) == "10 accepted: 10 delivered, 0 failed, 0 buffered"


async def test_closing_twice_is_closing_once():
    transport = service(latency_seconds=0.5)
    reports = []
    async with producer(transport) as orders:
        put(orders, 10)

        async def close() -> None:
            reports.append(await orders.close())

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(close)
        reports.append(await orders.close())
        assert orders.report() == reports[0]
    assert [report.delivered for report in reports] == [10] * 4
    assert all(report.complete for report in reports)


async def test_after_a_close_nothing_is_taken_and_everything_can_be_asked():
    async with producer(service()) as orders:
        deliveries = put(orders, 1)
        await orders.close()
        with pytest.raises(ProducerClosed, match=r"is closed .* put inside `async with Producer"):
            put(orders, 1)
        with pytest.raises(ProducerClosed):
            await (await orders.put(STREAM, partition_key="k", data=b""))
        with pytest.raises(ProducerClosed):
            await orders.put_many(STREAM, [("k", b"")])
        with pytest.raises(ProducerClosed):
            await orders.put_many("another", [])
        assert (await orders.flush()).delivered == 1
        assert (await orders.flush(timeout=0.0)).delivered == 1
    assert (await deliveries[0]).successful
    assert orders.report().delivered == 1
    assert "closed" in repr(orders)


async def test_while_it_closes_nothing_is_taken():
    async with producer(service(latency_seconds=1.0)) as orders:
        put(orders, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(orders.close)
            await anyio.sleep(0.5)
            with pytest.raises(ProducerClosed, match="is closing"):
                put(orders, 1)
            assert (await orders.flush(timeout=0.1)).buffered == 1


async def test_a_producer_never_entered_says_so():
    orders = producer(service())
    with pytest.raises(ProducerClosed, match=r"is not entered .* put inside `async with Producer"):
        put(orders, 1)
    with pytest.raises(ProducerClosed, match="not entered"):
        await (await orders.put(STREAM, partition_key="k", data=b""))
    with pytest.raises(ProducerClosed, match="not entered"):
        await orders.put_many(STREAM, [("k", b"")])
    assert (await orders.flush()).accepted == 0
    assert (await orders.close()).accepted == 0
    assert orders.report().accepted == 0
    assert "not entered" in repr(orders)


async def test_a_producer_is_entered_once():
    orders = producer(service())
    async with orders:
        with pytest.raises(ProducerClosed, match="is open; a producer is entered once"):
            await orders.__aenter__()
        put(orders, 1)
    with pytest.raises(ProducerClosed, match="is closed; a producer is entered once"):
        await orders.__aenter__()
    assert orders.report().delivered == 1


@pytest.mark.parametrize("timeout", [0.0, 0.5, 3.0])
async def test_a_close_takes_its_timeout_and_reports_what_was_left(timeout, caplog):
    transport = service()
    transport.kinesis.faults.add(Hang(), When(operation="PutRecords"))
    async with producer(transport, aggregation_enabled=False, max_in_flight_requests=1) as orders:
        await anyio.lowlevel.checkpoint()
        deliveries = put(orders, 700)
        await anyio.sleep(0.2)
        began = anyio.current_time()
        report = await orders.close(timeout=timeout)
        assert anyio.current_time() - began == pytest.approx(timeout)
    assert_books_close(report, deliveries)
    assert not report.complete
    assert set(report.failed) == {"Unknown", "Shutdown"}
    assert report.failed["Unknown"] == 500
    assert "the Kinesis producer is closed" in caplog.text


@pytest.mark.parametrize(("timeout", "warnings"), [(3.0, 1), (10.0, 2), (math.inf, 1)])
async def test_a_slow_close_says_once_what_is_left(timeout, warnings, caplog):
    """A server may kill the process before the close ends, and print nothing (gunicorn)."""
    transport = service()
    ends_at = 20.0 if timeout == math.inf else math.inf
    transport.kinesis.faults.add(
        ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords", ends_at=anyio.current_time() + ends_at)
    )
    async with producer(transport, record_ttl_ms=1_000_000) as orders:
        put(orders, 10)
        report = await orders.close(timeout=timeout)
    assert report.all_delivered == (timeout == math.inf)
    lines = [record.getMessage() for record in caplog.records if "the Kinesis producer is" in record.getMessage()]
    assert len(lines) == warnings
    if timeout != 3.0:
        bound = "" if timeout == math.inf else ", for up to 7 s"
        counts = "10 accepted: 0 delivered, 0 failed, 10 buffered"
        assert lines[0] == f"the Kinesis producer is closing and still sends{bound}: {counts}"
    if timeout != math.inf:
        assert lines[-1].startswith("the Kinesis producer is closed: 10 accepted: 0 delivered, 10 failed")


async def test_records_that_failed_before_the_close_are_in_its_warning(caplog):
    """They were silent: the close itself had nothing to give up."""
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    async with producer(transport, record_ttl_ms=1_000) as orders:
        deliveries = put(orders, 10)
        assert not (await deliveries[0]).successful
    report = orders.report()
    assert report.complete
    assert not report.all_delivered
    assert caplog.records[-1].getMessage() == f"the Kinesis producer is closed: {report}"


async def test_a_close_after_which_all_is_delivered_logs_nothing(caplog):
    async with producer(service()) as orders:
        put(orders, 10)
    assert orders.report().all_delivered
    assert not [record for record in caplog.records if "closed" in record.getMessage()]


@pytest.mark.parametrize(
    ("counts", "is_well"),
    [
        ({}, True),
        ({"spooled": 3, "dead_lettered": 2, "found": 5, "delivered": 5}, True),
        ({"spooled": 3, "dead_lettered": 3, "found": 5, "delivered": 4}, False),
        ({"failed": {"Expired": 1}, "found": 1, "delivered": 9}, False),
        ({"buffered": 1, "found": 1, "delivered": 9}, False),
    ],
)
def test_what_a_file_held_before_is_no_loss_of_this_process(counts, is_well):
    given = {"accepted": 10, "delivered": 10, "failed": {}, "buffered": 0, "buffered_bytes": 0, "complete": True}
    assert ProducerReport(**given | counts).all_delivered is is_well


async def test_a_close_without_an_end_waits_for_everything():
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords", ends_at=100.0))
    async with producer(transport, record_ttl_ms=1_000_000) as orders:
        deliveries = put(orders, 10)
        report = await orders.close(timeout=math.inf)
    assert_books_close(report, deliveries)
    assert report.delivered == 10
    assert 100 <= anyio.current_time() < 110


async def test_near_the_end_of_a_close_what_waits_for_tokens_is_sent_without_them():
    transport = unmetered()
    async with producer(transport, aggregation_enabled=False, burst_seconds=0.1, **AT_A_TENTH) as orders:
        await know_shards(orders)
        deliveries = put(orders, 3_000)
        began = anyio.current_time()
        report = await orders.close(timeout=10.0)
        # 30 s of records; forced after 80 % of the time.
        assert 8.0 <= anyio.current_time() - began < 8.5
    assert report.delivered == 3_001
    assert reasons(deliveries) == {"": 3_000}
    before = [at for at, _, _ in sent_records(transport) if at < began + 8.0]
    assert len(before) <= 1 + 10 + 800 + 10


async def test_a_forced_end_does_not_send_what_is_expired(caplog):
    transport = unmetered()
    async with producer(
        transport, aggregation_enabled=False, record_ttl_ms=1_000, burst_seconds=0.1, **AT_A_TENTH
    ) as orders:
        await know_shards(orders)
        deliveries = put(orders, 3_000)
        report = await orders.close(timeout=10.0)
    assert report.buffered == 0
    assert reasons(deliveries) == {"": report.delivered - 1, "Expired": 3_001 - report.delivered}
    assert report.complete
    assert [line for line in caplog.messages if "the producer closed before" in line] == []


async def test_a_cancelled_close_gives_up_at_once(caplog):
    transport = service()
    transport.kinesis.faults.add(Hang(), When(operation="PutRecords"))
    async with producer(transport) as orders:
        deliveries = put(orders, 10)
        with anyio.move_on_after(1.0):
            await orders.close(timeout=100.0)
        assert anyio.current_time() == pytest.approx(1.0)
        assert reasons(deliveries) == {"Unknown": 10}
        # The block goes on.
        await anyio.sleep(1.0)
    assert_books_close(orders.report(), deliveries)
