"""`BlockingProducer` in real time, because a thread cannot wait for a virtual clock."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kpl_core import (
    BlockingProducer,
    BufferFull,
    Config,
    ConfigError,
    InvalidUserRecord,
    Producer,
    ProducerClosed,
    ProducerReport,
    UserRecord,
)
from kpl_core.background.blocking_delivery import BlockingDelivery
from kpl_core.testing import ErrorAnswer, FakeKinesis, Hang, Latency, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.producer_scene import STREAM, stored

PUT = "PutRecords"


def transport(*, latency_seconds: float = 0.0) -> FakeTransport:
    return FakeTransport(FakeKinesis({STREAM: 2}, enforce_limits=False), latency_seconds=latency_seconds)


@contextmanager
def blocking(kinesis: FakeTransport, **options) -> Iterator[BlockingProducer]:
    quick = {"record_max_buffered_time_ms": 5, **options}
    with BlockingProducer(Config(**quick), transport=kinesis) as orders:
        yield orders


def put(orders: BlockingProducer, count: int, *, size: int = 1) -> list[BlockingDelivery]:
    return [orders.put_nowait(STREAM, partition_key=str(number), data=bytes(size)) for number in range(count)]


def in_threads(count: int, work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def assert_books_close(report: ProducerReport, deliveries: Sequence[BlockingDelivery]) -> None:
    assert report.accepted == report.delivered + report.failed_total == len(deliveries)
    assert report.buffered == 0
    assert sum(delivery.result(0).successful for delivery in deliveries) == report.delivered


def test_puts_of_a_thread_with_room_for_one_record_do_not_wait_for_its_deadline():
    """Each waited for `record_max_buffered_time_ms`."""
    with blocking(transport(), max_outstanding_records=1, record_max_buffered_time_ms=2_000) as orders:
        began = time.monotonic()
        deliveries = [orders.put(STREAM, partition_key="k", data=b"x") for _ in range(5)]
        assert orders.flush().complete
        assert time.monotonic() - began < 2.0
        assert_books_close(orders.close(), deliveries)


def test_a_thread_puts_and_waits_for_the_result():
    with blocking(transport()) as orders:
        delivery = orders.put(STREAM, partition_key="k", data=b"x", metadata={"a": 1})
        result = delivery.result(timeout=10)
        assert result.successful
        assert delivery.done
        assert delivery.result() == result


def test_records_put_just_before_the_block_ends_are_delivered():
    kinesis = transport()
    with blocking(kinesis) as orders:
        deliveries = put(orders, 500)
    assert all(delivery.result(0).successful for delivery in deliveries)
    assert len(stored(kinesis)) == 500


def test_many_threads_put_at_once_without_loss_or_duplicates():
    kinesis = transport()
    deliveries: list[BlockingDelivery] = []

    def work(number: int) -> None:
        deliveries.extend(
            orders.put(STREAM, partition_key=f"{number}/{position}", data=b"x") for position in range(200)
        )

    with blocking(kinesis) as orders:
        in_threads(8, work)
        report = orders.close()
    assert_books_close(report, deliveries)
    assert report.delivered == 1_600
    assert len({key for key, _ in stored(kinesis)}) == len(stored(kinesis)) == 1_600


def test_a_full_buffer_rejects_a_put_at_once_or_after_the_timeout():
    kinesis = transport()
    kinesis.kinesis.faults.add(Hang(), When(operation=PUT))
    with blocking(kinesis, max_outstanding_records=10) as orders:
        put(orders, 10)
        with pytest.raises(BufferFull, match="of 10 records"):
            put(orders, 1)
        began = time.monotonic()
        with pytest.raises(BufferFull):
            orders.put(STREAM, partition_key="k", data=b"", timeout=0.05)
        assert time.monotonic() - began >= 0.05
        orders.close(timeout=0.0)


def test_a_put_waits_for_room():
    with blocking(transport(latency_seconds=0.01), max_outstanding_records=5) as orders:
        deliveries = [orders.put(STREAM, partition_key="k", data=b"x") for _ in range(50)]
        assert_books_close(orders.flush(), deliveries)


@pytest.mark.parametrize("made", [lambda buffer: ("k", buffer), lambda buffer: UserRecord("k", buffer)])
@pytest.mark.parametrize("kind", [bytearray, lambda data: memoryview(bytearray(data))])
def test_put_many_copies_buffers_that_the_caller_overwrites_later(made, kind):
    kinesis = transport()
    with blocking(kinesis, max_outstanding_records=50) as orders:
        # Far more than there is room for: most wait in the inbox, or for their turn.
        buffers = [kind(b"first") for _ in range(200)]
        orders.put_many(STREAM, [made(buffer) for buffer in buffers])
        for buffer in buffers:
            buffer[:] = b"later"
    assert stored(kinesis) == [("k", b"first")] * 200


def test_put_many_checks_all_records_before_it_puts_the_first():
    with blocking(transport(latency_seconds=0.01), max_outstanding_records=20) as orders:
        with pytest.raises(InvalidUserRecord, match=r"records\[1\]: partition_key"):
            orders.put_many(STREAM, [("k", b""), ("", b"")])
        with pytest.raises(TypeError, match=r"records\[0\]"):
            orders.put_many(STREAM, [("k", "text")])  # type: ignore[list-item]
        deliveries = orders.put_many(STREAM, [("k", b"1"), UserRecord("k", b"2", "7")] * 50)
        assert_books_close(orders.flush(), deliveries)


@pytest.mark.parametrize(
    ("key", "data", "explicit", "error"),
    [
        ("", b"", None, InvalidUserRecord),
        ("k" * 257, b"", None, InvalidUserRecord),
        ("k", b"", "007", InvalidUserRecord),
        ("k", bytes(2_000_000), None, InvalidUserRecord),
        (5, b"", None, TypeError),
        ("k", "text", None, TypeError),
    ],
)
def test_an_invalid_record_raises_in_the_thread_that_puts_it(key, data, explicit, error):
    with blocking(transport()) as orders:
        with pytest.raises(error):
            orders.put_nowait(STREAM, partition_key=key, data=data, explicit_hash_key=explicit)
        with pytest.raises(error):
            orders.put(STREAM, partition_key=key, data=data, explicit_hash_key=explicit)
        assert_books_close(orders.close(), [])


def test_a_failed_put_is_a_value():
    kinesis = transport()
    kinesis.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation=PUT))
    with blocking(kinesis) as orders:
        (delivery,) = put(orders, 1)
        result = delivery.result(timeout=10)
    assert (result.successful, result.error_code) == (False, "AccessDeniedException")


def test_a_result_that_does_not_come_in_time_raises_timeout_error():
    kinesis = transport()
    kinesis.kinesis.faults.add(Latency(0.2), When(operation=PUT))
    with blocking(kinesis) as orders:
        (delivery,) = put(orders, 1)
        with pytest.raises(TimeoutError, match=r"no result after 0\.01 s"):
            delivery.result(timeout=0.01)
        assert not delivery.done
        assert delivery.result(timeout=10).successful


def test_waits_that_end_too_early_leave_nothing_behind():
    kinesis = transport()
    kinesis.kinesis.faults.add(Latency(0.2), When(operation=PUT))
    with blocking(kinesis) as orders:
        delivery = orders.put(STREAM, partition_key="k", data=b"x")
        for _ in range(20):
            with pytest.raises(TimeoutError):
                delivery.result(timeout=0.001)
        assert not delivery.follow().waiters
        assert delivery.result(timeout=10).successful


def test_a_flush_that_times_out_reports_that_it_is_incomplete():
    kinesis = transport()
    kinesis.kinesis.faults.add(Hang(), When(operation=PUT))
    with blocking(kinesis) as orders:
        put(orders, 3)
        report = orders.flush(timeout=0.05)
        assert not report.complete
        assert report.buffered == 3
        report = orders.close(timeout=0.05)
    assert (report.accepted, report.failed_total, report.complete) == (3, 3, False)


def test_a_flush_waits_only_for_what_was_put_before_it() -> None:
    is_over = threading.Event()

    class AnotherThreadPuts(BlockingProducer):
        """Each time the sender drains its sources, another thread puts one more user record."""

        def drain(self, producer: Producer) -> None:
            super().drain(producer)
            if self.is_open and not is_over.is_set():
                in_threads(1, self.put_one)

        def put_one(self, _: int) -> None:
            with contextlib.suppress(ProducerClosed):
                self.put_nowait(STREAM, partition_key="k", data=b"x")

    orders = AnotherThreadPuts(Config(record_max_buffered_time_ms=5), transport=transport())
    reports: list[ProducerReport] = []
    # A daemon, and no `with`: a flush that never ends would hold the whole test run.
    flushing = threading.Thread(target=lambda: reports.append(orders.__enter__().flush()), daemon=True)
    flushing.start()
    flushing.join(timeout=30)
    is_over.set()

    assert [report.complete for report in reports] == [True]
    report = orders.close()
    assert report.delivered == report.accepted > 0


def test_results_and_reports_can_be_read_after_the_end():
    with blocking(transport()) as orders:
        deliveries = put(orders, 3)
        first = orders.close()
        assert orders.close() == orders.flush() == orders.flush(timeout=0.0) == first
    assert all(delivery.result().successful for delivery in deliveries)
    assert orders.flush() == first


def test_puts_after_a_close_raise():
    with blocking(transport()) as orders:
        orders.close()
        for call in (
            lambda: put(orders, 1),
            lambda: orders.put(STREAM, partition_key="k", data=b""),
            lambda: orders.put_many(STREAM, [("k", b"")]),
        ):
            with pytest.raises(ProducerClosed, match="put inside `with BlockingProducer"):
                call()


def test_puts_that_wait_for_room_fail_when_the_producer_closes():
    kinesis = transport()
    kinesis.kinesis.faults.add(Hang(), When(operation=PUT))
    outcomes: list[type[BaseException]] = []

    def wait(_: int) -> None:
        try:
            orders.put(STREAM, partition_key="k", data=b"", timeout=20)
        except (ProducerClosed, BufferFull) as error:
            outcomes.append(type(error))

    with blocking(kinesis, max_outstanding_records=1) as orders:
        put(orders, 1)
        threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        report = orders.close(timeout=0.05)
        for thread in threads:
            thread.join(timeout=10)
    # A thread that came only after the close was refused without waiting, in the same words.
    assert outcomes == [ProducerClosed] * 3
    assert report.accepted == report.failed_total == 1


def test_flush_and_close_from_many_threads_while_others_put():
    kinesis = transport()
    deliveries: list[BlockingDelivery] = []
    reports: list[ProducerReport] = []
    enough = threading.Event()

    def work(number: int) -> None:
        try:
            while True:
                if number < 4:
                    deliveries.append(orders.put(STREAM, partition_key="k", data=b"x"))
                    if len(deliveries) > 500:
                        enough.set()
                elif number < 6:
                    reports.append(orders.flush(timeout=1.0))
                    time.sleep(0)
                    if enough.is_set():
                        return
                else:
                    enough.wait(20)
                    reports.append(orders.close())
                    return
        except ProducerClosed:
            pass

    with blocking(kinesis) as orders:
        in_threads(8, work)
        last = orders.close()
    assert_books_close(last, deliveries)
    assert last.delivered == len(stored(kinesis))


def test_a_producer_that_was_never_entered_raises():
    orders = BlockingProducer(Config(), transport=transport())
    with pytest.raises(ProducerClosed):
        put(orders, 1)
    with pytest.raises(ProducerClosed, match="never entered"):
        orders.close()


def test_a_producer_is_entered_once():
    orders = BlockingProducer(Config(), transport=transport())
    with orders:
        pass
    with pytest.raises(ProducerClosed, match="entered before; make a new one"):
        orders.__enter__()


def test_an_error_while_opening_is_raised_to_the_thread_that_enters():
    class Broken(FakeTransport):
        def open(self):
            message = "region is not set"
            raise ConfigError(message)

    orders = BlockingProducer(Config(), transport=Broken(FakeKinesis({STREAM: 1})))
    with pytest.raises(ConfigError, match="region is not set"):
        orders.__enter__()
    assert not [thread for thread in threading.enumerate() if thread.name == "kpl-producer"]


def test_no_thread_is_left():
    with blocking(transport()) as orders:
        put(orders, 10)
        assert [thread.name for thread in threading.enumerate()].count("kpl-producer") == 1
    assert "kpl-producer" not in [thread.name for thread in threading.enumerate()]
