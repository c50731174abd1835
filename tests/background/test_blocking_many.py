"""`BlockingProducer.put_many`: one wait for many records, in the order of the thread's puts, with results in bulk."""

import threading
from contextvars import ContextVar
from typing import Any

import pytest

from kpl_core import BlockingProducer, BufferFull, Config, ProducerClosed, SpoolOptions, UserRecord, WrongEventLoop
from kpl_core.background.blocking_delivery import BlockingDelivery
from kpl_core.testing import ErrorAnswer, Hang, SplitDuringRequest, When
from tests.background.test_blocking import blocking, in_threads, transport
from tests.support.producer_scene import STREAM, stored
from tests.support.waiting import wait_until

PAIRS = [("k", str(number).encode()) for number in range(600)]


def test_the_deliveries_are_a_sequence_and_give_all_results_at_once():
    with blocking(transport()) as orders:
        deliveries = orders.put_many(STREAM, PAIRS)
        assert len(deliveries) == len(PAIRS)
        assert repr(deliveries) == "<BlockingDeliveries of 600 user records>"
        results = deliveries.results(20.0)
        assert all(result.successful for result in results)
        assert [each.result(20.0) for each in deliveries] == results
        assert [each.result(20.0) for each in deliveries[10:12]] == results[10:12]
        assert deliveries[-1].result(20.0) == results[-1]
        assert deliveries.failures() == {}
        assert deliveries.all_successful()
        assert orders.put_many(STREAM, []).results(0.0) == []


def test_failures_are_given_by_position():
    kinesis = transport()
    kinesis.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords", times=1))
    with blocking(kinesis, record_max_buffered_time_ms=1) as orders:
        deliveries = orders.put_many(STREAM, PAIRS[:3])
        assert {*deliveries.failures(20.0)} == {0, 1, 2}
        assert not deliveries.all_successful(20.0)
        assert deliveries.results()[0].error_code == "AccessDeniedException"
        later = orders.put_many(STREAM, PAIRS)
        assert later.all_successful(20.0)


def test_user_records_that_move_to_other_kinesis_records_are_waited_for():
    """Those that a reshard has moved to another shard are aggregated again."""
    kinesis = transport()
    kinesis.kinesis.faults.add(SplitDuringRequest(), When(operation="PutRecords", times=1))
    with blocking(kinesis) as orders:
        deliveries = orders.put_many(STREAM, [(str(number), b"x") for number in range(600)])
        results = deliveries.results(20.0)
        assert deliveries.all_successful()
    assert any(len(result.attempts) > 1 for result in results)


def test_a_wait_for_results_ends_in_time():
    kinesis = transport()
    kinesis.kinesis.faults.add(Hang(), When(operation="PutRecords"))
    with blocking(kinesis) as orders:
        deliveries = orders.put_many(STREAM, PAIRS)
        for wait in (deliveries.results, deliveries.failures, deliveries.all_successful):
            with pytest.raises(TimeoutError, match=r"not all user records have a result after 0\.01 s"):
                wait(0.01)
            with pytest.raises(ValueError, match="timeout"):
                wait(-1.0)
        orders.close(timeout=0.0)
        assert {result.error_code for result in deliveries.results()} <= {"Unknown", "Shutdown"}


def test_records_keep_the_order_of_the_puts_of_their_thread():
    kinesis = transport()
    with blocking(kinesis, ordering="per_key", max_outstanding_records=50) as orders:

        def work(worker: int) -> None:
            for turn in range(10):
                for number in range(5):
                    orders.put(STREAM, partition_key=str(worker), data=f"{turn * 100 + number}".encode())
                orders.put_many(STREAM, [(str(worker), f"{turn * 100 + 5 + number}".encode()) for number in range(30)])

        in_threads(4, work)
    for worker in range(4):
        numbers = [int(data) for key, data in stored(kinesis) if key == str(worker)]
        assert len(numbers) == 350
        assert numbers == sorted(numbers)


def test_put_many_waits_for_room_and_takes_more_than_fits():
    with blocking(transport(latency_seconds=0.001), max_outstanding_records=20) as orders:
        in_threads(3, lambda _: orders.put_many(STREAM, PAIRS))
        report = orders.flush()
    assert (report.accepted, report.delivered) == (1_800, 1_800)


def test_a_callback_may_put_many_without_waiting():
    found: list[Any] = []
    done = threading.Event()

    def again(_: BlockingDelivery) -> None:
        found.append(orders.put_many(STREAM, [("k", b"1"), UserRecord("k", b"2", "7")]))
        try:
            orders.put_many(STREAM, [("k", bytes(1_000))] * 100)
        except BufferFull as full:
            found.append(full)
        done.set()

    # So late that the callback is added before the result: else it would be called in this thread, which may wait.
    with blocking(transport(latency_seconds=0.5), max_outstanding_records=50) as orders:
        orders.put(STREAM, partition_key="k", data=b"0").add_done_callback(again)
        assert done.wait(20)
        deliveries, full = found
        assert deliveries.all_successful(20.0)
        assert isinstance(full, BufferFull)


def test_a_callback_cannot_wait_for_the_spool(tmp_path):
    found: list[BaseException] = []
    done = threading.Event()

    def again(_: BlockingDelivery) -> None:
        try:
            orders.put_many(STREAM, PAIRS)
        except WrongEventLoop as error:
            found.append(error)
        done.set()

    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0)
    # As late as above.
    with blocking(transport(latency_seconds=0.5), spool=spool) as orders:
        orders.put(STREAM, partition_key="k", data=b"0").add_done_callback(again)
        assert done.wait(20)
    assert len(found) == 1


def test_a_hook_sees_the_context_of_the_thread():
    span: ContextVar[str] = ContextVar("span", default="")
    seen: list[str] = []

    class Spans:
        def __call__(self, fact: object) -> None:
            pass

        def opening_context(self) -> object:
            seen.append(span.get())
            return None

    def work(worker: int) -> None:
        span.set(f"span of {worker}")
        assert orders.put_many(STREAM, PAIRS).all_successful(20.0)

    with BlockingProducer(Config(), transport=transport(), hooks=[Spans()]) as orders:
        in_threads(1, work)
    assert {*seen} == {"span of 0"}


def test_put_many_that_waits_ends_when_the_producer_closes():
    kinesis = transport()
    kinesis.kinesis.faults.add(Hang(), When(operation="PutRecords"))
    ended: list[BaseException] = []

    def work() -> None:
        try:
            orders.put_many(STREAM, PAIRS)
        except ProducerClosed as error:
            ended.append(error)

    with blocking(kinesis, max_outstanding_records=10) as orders:
        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: orders.flush(0.0).buffered >= 10, "a full buffer")
        orders.close(timeout=0.1)
        thread.join(20)
    assert len(ended) == 1


def test_a_large_put_many_and_single_puts_beside_it_both_get_room():
    """Neither gets all that becomes free, so that the other one would wait until it ends."""
    puts = 0
    stopped = threading.Event()

    def put_one_by_one() -> None:
        nonlocal puts
        while not stopped.is_set():
            orders.put(STREAM, partition_key=str(puts), data=b"x", timeout=20.0)
            puts += 1

    with blocking(transport(latency_seconds=0.002), max_outstanding_records=100) as orders:
        thread = threading.Thread(target=put_one_by_one)
        thread.start()
        try:
            orders.put_many(STREAM, [(str(number), b"x") for number in range(5_000)])
            beside = puts
        finally:
            stopped.set()
            thread.join(20)
    assert 5 <= beside <= 10_000
