"""`BlockingProducer` gives the guarantees of `Producer` with a spool, dead letters and flows."""

import itertools
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kpl_core import BlockingProducer, BufferFull, Config, NotSpooled, Producer, ProducerClosed, WrongEventLoop
from kpl_core.background.sender import BackgroundSender, SenderEnded
from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.options.policy import FairnessPolicy
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.testing import ErrorAnswer, FakeKinesis, Hang, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.background.test_blocking import blocking, in_threads, transport
from tests.support.durability_scene import set_writable
from tests.support.producer_scene import STREAM, EndOfTheDriver, stored
from tests.support.waiting import wait_until

PUT = "PutRecords"


def hanging() -> FakeTransport:
    kinesis = transport()
    kinesis.kinesis.faults.add(Hang(), When(operation=PUT))
    return kinesis


def put(orders: BlockingProducer, **others: Any) -> Any:
    return orders.put_nowait(STREAM, **{"partition_key": "k", "data": b"x", **others})


def _put_for_ever(put_one: Callable[[], object]) -> None:
    for _ in range(10_000):
        put_one()


def test_a_flow_beyond_its_share_is_rejected_at_once_and_other_flows_do_not_wait_behind_it() -> None:
    slow = {"rate_limit_records_per_sec_per_shard": 1.0, "max_outstanding_records": 1_000}
    with blocking(hanging(), fairness=FairnessPolicy(), **slow) as orders:
        with pytest.raises(BufferFull, match="its share of the room"):
            _put_for_ever(lambda: put(orders, flow="flood"))
        for number in range(10):
            put(orders, flow=f"quiet {number}")
        orders.close(timeout=0.0)


@pytest.mark.long
def test_the_end_by_a_signal_logs_what_is_left_and_leaves_the_producer_open(caplog: pytest.LogCaptureFixture) -> None:
    with blocking(hanging()) as orders:
        put(orders)
        orders.end_by_signal()
        orders.close(timeout=0.0)
    counts = "1 accepted: 0 delivered, 0 failed, 1 buffered"
    lines = [record.getMessage() for record in caplog.records if "Kinesis producer" in record.getMessage()]
    assert lines[0] == f"the Kinesis producer is not closed at the end of the process: {counts}"
    assert lines[1].startswith("the Kinesis producer is closed: 1 accepted: 0 delivered, 1 failed")


def test_the_end_by_a_signal_moves_what_is_left_to_the_spool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with blocking(hanging(), spool=SpoolOptions(path=str(tmp_path / "spool"))) as orders:
        put(orders)
        orders.end_by_signal()
        assert not orders.is_open
    assert orders.close().spooled == 1
    assert "the Kinesis producer is closed: 1 accepted: 0 delivered, 0 failed, 1 spooled" in caplog.text


def test_a_put_into_a_full_buffer_is_spilled_to_the_spool_and_delivered_later(tmp_path: Path) -> None:
    kinesis = transport()
    outage = kinesis.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation=PUT))
    spool = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0)
    with blocking(kinesis, spool=spool, max_outstanding_records=5, retry_backoff_cap_ms=50) as orders:
        deliveries = [put(orders, data=b"%d" % number) for number in range(50)]
        kept = [delivery.result(20) for delivery in deliveries[5:]]
        assert {result.kept for result in kept} == {"spooled"}
        kinesis.kinesis.faults.remove(outage)
        wait_until(lambda: len(stored(kinesis)) >= 50, lambda: f"50 records, not {len(stored(kinesis))}")
    assert sorted({data for _, data in stored(kinesis)}) == sorted(b"%d" % number for number in range(50))


def test_a_put_returns_when_the_write_ahead_spool_has_it(tmp_path: Path) -> None:
    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0)
    with blocking(hanging(), spool=spool) as orders:
        orders.put(STREAM, partition_key="k", data=b"1")
        opened = orders._producer.spool  # noqa: SLF001 - to look into the file while it is open
        assert opened is not None
        assert opened.statistics().appended_records == 1
        orders.put_many(STREAM, [("k", b"2"), ("k", b"3")])
        assert opened.statistics().appended_records == 3
        assert orders.close(timeout=0.0).spooled == 3


def test_a_put_that_the_spool_rejects_is_not_acknowledged(tmp_path: Path) -> None:
    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0, max_bytes=2_000_000)
    with blocking(hanging(), spool=spool) as orders:
        with pytest.raises(NotSpooled):
            _put_for_ever(lambda: orders.put(STREAM, partition_key="k", data=bytes(500_000)))
        with pytest.raises(NotSpooled):
            orders.put_many(STREAM, [("k", bytes(500_000))] * 5)
        orders.close(timeout=0.0)


def test_a_put_that_the_spool_refuses_raises_in_its_thread_and_the_next_one_is_taken(tmp_path: Path) -> None:
    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", failure="refuse", commit_interval_ms=1.0)
    kinesis = transport()
    with blocking(kinesis, spool=spool) as orders:
        opened = orders._producer.spool  # noqa: SLF001 - to make its file read-only
        assert opened is not None
        set_writable(opened, writable=False).result()
        puts: list[Callable[[], object]] = [
            lambda: orders.put(STREAM, partition_key="k", data=b"finds out"),
            lambda: put(orders),
            lambda: orders.put(STREAM, partition_key="k", data=b"x"),
            lambda: orders.put_many(STREAM, [("k", b"1"), ("k", b"2")]),
        ]
        for each in puts * 2:
            with pytest.raises(NotSpooled, match="read-only"):
                each()
        set_writable(opened, writable=True).result()
        wait_until(lambda: not orders._producer.unready(), "a spool that stores")  # noqa: SLF001 - as above
        orders.put(STREAM, partition_key="k", data=b"stored")
        report = orders.close()
    assert (report.accepted, report.delivered, report.failed) == (2, 1, {"NotSpooled": 1})
    assert [data for _, data in stored(kinesis)] == [b"stored"]


def test_a_put_waits_for_room_no_longer_than_its_timeout(tmp_path: Path) -> None:
    letters = DeadLetterOptions(path=tmp_path / "letters.db")
    with blocking(hanging(), dead_letters=letters, max_outstanding_records=3) as orders:
        for _ in range(3):
            put(orders)
        with pytest.raises(BufferFull, match="of 3 records"):
            put(orders)
        began = time.monotonic()
        with pytest.raises(BufferFull, match="of 3 records"):
            orders.put(STREAM, partition_key="k", data=b"", timeout=0.05)
        assert time.monotonic() - began >= 0.05
        orders.close(timeout=0.0)


def test_puts_that_wait_in_the_loop_fail_when_the_producer_closes(tmp_path: Path) -> None:
    letters = DeadLetterOptions(path=tmp_path / "letters.db")
    outcomes: list[type[BaseException]] = []

    def wait(_: int) -> None:
        try:
            orders.put(STREAM, partition_key="k", data=b"")
        except ProducerClosed as error:
            outcomes.append(type(error))

    with blocking(hanging(), dead_letters=letters, max_outstanding_records=1) as orders:
        put(orders)
        threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        orders.close(timeout=0.05)
        for thread in threads:
            thread.join(timeout=10)
    assert outcomes == [ProducerClosed] * 3


@pytest.mark.parametrize("fair", [False, True])
def test_a_hook_can_put_but_not_wait_for_its_own_thread(fair: bool) -> None:
    errors: list[BaseException] = []
    deliveries: list[Any] = []

    def hook(fact: Fact) -> None:
        if isinstance(fact, RecordsFinished) and not deliveries:
            deliveries.append(put(orders))
            deliveries.append(orders.put(STREAM, partition_key="k", data=b""))
            for call in (orders.flush, orders.close):
                try:
                    call()
                except WrongEventLoop as error:
                    errors.append(error)

    options: dict[str, Any] = {"fairness": FairnessPolicy()} if fair else {}
    config = Config(record_max_buffered_time_ms=5, **options)
    with BlockingProducer(config, transport=transport(), hooks=[hook]) as orders:
        assert put(orders).result(10).successful
        orders.flush()
        assert [delivery.result(10).successful for delivery in deliveries] == [True, True]
        assert orders.close().delivered == 3
    assert len(errors) == 2


class Dying(FakeTransport):
    """Ends the driver: only an `Exception` of a transport is the failure of one request."""

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        raise EndOfTheDriver


def test_a_thread_that_dies_logs_it_and_ends_every_wait(caplog: pytest.LogCaptureFixture) -> None:
    orders = BlockingProducer(Config(record_max_buffered_time_ms=5), transport=Dying(FakeKinesis({STREAM: 1})))
    with caplog.at_level(logging.ERROR, logger="kpl_core"):
        orders.__enter__()
        deliveries = [put(orders) for _ in range(10)]
        assert not any(delivery.result(10).successful for delivery in deliveries)
        orders._sender.join(10)  # noqa: SLF001 - it logs last
    assert "the producer's thread has ended" in caplog.text
    with pytest.raises(ProducerClosed, match=r"thread has ended with .*make a new producer"):
        put(orders)
    for call in (orders.flush, orders.close):
        with pytest.raises(ProducerClosed, match="thread has ended with"):
            call()


@pytest.mark.parametrize("timeout", [-1.0, math.nan])
def test_every_method_rejects_an_invalid_timeout(timeout: float) -> None:
    with blocking(transport()) as orders:
        delivery = put(orders)
        for call in (
            lambda: orders.put(STREAM, partition_key="k", data=b"", timeout=timeout),
            lambda: orders.flush(timeout=timeout),
            lambda: orders.close(timeout=timeout),
            lambda: delivery.result(timeout=timeout),
        ):
            with pytest.raises(ValueError, match="it must be 0 or more"):
                call()
        assert delivery.result(math.inf).successful
        assert orders.flush(timeout=math.inf).complete
        assert orders.close(timeout=math.inf).delivered == 1


# The loop and its thread


def test_a_call_into_the_loop_returns_its_result_or_raises_its_error() -> None:
    thread, stop = _started()

    async def fail() -> None:
        message = "raised to the caller"
        raise LookupError(message)

    assert thread.begin_call(lambda: 42)(30.0) == 42
    with pytest.raises(LookupError, match="raised to the caller"):
        thread.begin(fail)(10)
    with pytest.raises(WrongEventLoop, match="make it in another thread"):
        thread.begin_call(lambda: thread.begin_call(lambda: 1))(30.0)
    stop()
    thread.join(10)
    with pytest.raises(SenderEnded):
        thread.begin_call(lambda: 42)(30.0)
    thread.run_soon(lambda: pytest.fail("it has ended"))


def test_no_call_hangs_when_the_loop_ends() -> None:
    for _ in range(20):
        thread, stop = _started()
        outcomes: list[bool] = []

        def work(
            number: int, thread: BackgroundSender = thread, outcomes: list[bool] = outcomes, stop: Any = stop
        ) -> None:
            try:
                # The others may be far ahead when the first one gets to run.
                for turn in itertools.count():
                    if number == 0 and turn == 20:
                        stop()
                    thread.begin_call(lambda: None)(30.0)
            except SenderEnded:
                outcomes.append(True)

        in_threads(4, work)
        assert outcomes == [True] * 4


FORKING = """
import os
from kpl_core import BlockingProducer, Config, ProducerClosed
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport

with BlockingProducer(Config(), transport=FakeTransport(FakeKinesis({"orders": 1}))) as producer:
    before = producer.put_nowait("orders", partition_key="k", data=b"parent's")
    child = os.fork()
    if not child:
        with producer._changed:
            pass
        try:
            producer.put_nowait("orders", partition_key="k", data=b"child's")
        except ProducerClosed as closed:
            assert "make one in each process, after the fork" in str(closed), closed
            assert producer.flush().accepted == producer.close().accepted == 0
            with BlockingProducer(Config(), transport=FakeTransport(FakeKinesis({"orders": 1}))) as own:
                assert own.put("orders", partition_key="k", data=b"child's").result(30).successful
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert before.result(30).successful
    assert producer.put("orders", partition_key="k", data=b"parent's").result(30).successful
assert producer.close().delivered == 2
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_gets_an_error_that_says_to_make_its_own_producer() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


class _NoRecords:
    """A record source that is always empty."""

    def drain(self, producer: Producer) -> None: ...

    def watch_drained(self) -> Callable[[], bool]:
        return lambda: True

    def sender_ended(self) -> None: ...


def _started() -> tuple[BackgroundSender, Any]:
    sender = BackgroundSender(
        lambda: Producer(Config(), transport=transport()), _NoRecords(), name="test-sender", lock=threading.RLock()
    )
    sender.start()
    sender.wait_until_open()
    return sender, sender.stop


def test_a_close_beside_another_has_a_time_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with blocking(hanging()) as orders:
        put(orders)
        first = threading.Thread(target=orders.close, args=(3.0,))
        first.start()
        wait_until(lambda: not orders.is_open, lambda: "the first close has begun")
        began = time.monotonic()
        report = orders.close(0.1)
        assert time.monotonic() - began < 2.5
        assert (report.complete, report.buffered) == (False, 1)
        assert "held up" not in caplog.text
        first.join()
    assert orders.close().failed_total == 1
