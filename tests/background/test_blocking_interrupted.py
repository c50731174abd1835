"""`BlockingProducer` interrupted: signal handlers, hooks that never return, and hooks that read the put's context."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import pytest

from kpl_core import BlockingProducer, BufferFull, Config, ProducerClosed
from kpl_core.background import blocking as blocking_module
from kpl_core.background.blocking_delivery import BlockingDelivery
from kpl_core.hooks import Fact, RequestCompleted
from kpl_core.options.policy import FairnessPolicy
from kpl_core.producer import delivery as delivery_module, inbox, thread_puts
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from tests.background.test_blocking import blocking, in_threads, transport
from tests.background.test_blocking_guarantees import put
from tests.support.waiting import wait_until

needs_signal = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no such signal on this system")
# Where the code of a put is, and of a wait for its result.
FILES = {blocking_module.__file__, thread_puts.__file__, inbox.__file__, delivery_module.__file__}


@pytest.fixture(params=["lone puts", "bursts"])
def as_bursts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels, let each put open a batch, as those of a burst do."""
    if request.param == "bursts":
        monkeypatch.setattr(thread_puts, "BURST", 0)


@contextlib.contextmanager
def interrupted(line: int, handle: Callable[[], object]) -> Iterator[list[int]]:
    """Raise SIGUSR1 before this line of the block's puts and waits for results, for `handle`; yield their numbers."""
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before, traced_before = signal.signal(signal.SIGUSR1, lambda *_: handle()), sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(traced_before)
        signal.signal(signal.SIGUSR1, before)


def at_every_line(test: Callable[[int], list[int]]) -> None:
    """Call `test` with the number of each line that its put runs."""
    line, lines = 0, [0]
    while line < len(lines):
        line += 1
        lines = test(line)
    # The whole way of a put that wakes the loop.
    assert line > 30


@needs_signal
@pytest.mark.usefixtures("as_bursts")
@pytest.mark.parametrize("timeout", [30.0, None])
def test_a_signal_handler_can_close_at_any_line_of_a_put(timeout: float | None) -> None:
    def close_at(line: int) -> list[int]:
        reports = []
        with blocking(transport()) as orders:
            deliveries = [put(orders)]
            assert deliveries[0].result(30).successful
            # Nothing that was refused is in the report.
            with (
                interrupted(line, lambda: reports.append(orders.close(timeout))) as lines,
                contextlib.suppress(ProducerClosed),
            ):
                deliveries.append(put(orders))
            if len(lines) < line:
                # The loop was faster this time, so the put had no such line.
                return lines
            with pytest.raises(ProducerClosed):
                put(orders)
        assert all(delivery.result(30).successful for delivery in deliveries)
        assert [(report.accepted, report.delivered, report.buffered) for report in reports] == [
            (len(deliveries),) * 2 + (0,)
        ]
        return lines

    at_every_line(close_at)


@needs_signal
@pytest.mark.usefixtures("as_bursts")
def test_a_signal_handler_can_put_and_flush_at_any_line_of_a_put() -> None:
    def put_and_flush_at(line: int) -> list[int]:
        deliveries = []

        def put_and_flush() -> None:
            deliveries.append(put(orders))
            assert orders.flush(30).complete

        with blocking(transport()) as orders:
            with interrupted(line, put_and_flush) as lines:
                deliveries.append(put(orders))
            if len(lines) < line:
                # As above.
                return lines
            assert [delivery.result(30).successful for delivery in deliveries] == [True, True]
            limit = orders._producer.buffer_limit  # noqa: SLF001 - what is outstanding is seen nowhere else
            wait_until(lambda: limit.outstanding_records == 0, lambda: f"room for all, not {limit!r}")
        assert orders.close().delivered == 2
        return lines

    at_every_line(put_and_flush_at)


@needs_signal
@pytest.mark.usefixtures("as_bursts")
def test_a_signal_handler_can_put_and_wait_for_the_result_at_any_line_of_a_put_and_its_wait() -> None:
    def put_and_wait_at(line: int) -> list[int]:
        def put_and_wait() -> None:
            called: list[BlockingDelivery] = []
            delivery = put(orders)
            # In the loop this adds a waiter to the same outcome.
            orders.sender.run_soon(lambda: delivery.add_done_callback(called.append))
            assert delivery.result(10).successful
            wait_until(lambda: called, lambda: "the callback")

        with interrupted(line, put_and_wait) as lines:
            assert put(orders).result(10).successful
        return lines

    with blocking(transport()) as orders:
        at_every_line(put_and_wait_at)


class _SoftTimeLimit(Exception):  # noqa: N818 - as Celery's
    pass


@needs_signal
@pytest.mark.usefixtures("as_bursts")
def test_a_signal_handler_that_raises_in_a_put_keeps_no_later_put_waiting() -> None:
    def stop() -> None:
        raise _SoftTimeLimit

    def is_stopped_at(line: int) -> bool:
        try:
            with interrupted(line, stop):
                put(orders)
        except _SoftTimeLimit:
            return True
        return False

    with blocking(transport()) as orders:
        line = 1
        while is_stopped_at(line):
            assert put(orders).result(10).successful
            line += 1
        assert line > 30
        limit = orders._producer.buffer_limit  # noqa: SLF001 - as above
        wait_until(lambda: limit.outstanding_records == 0, lambda: f"room for all, not {limit!r}")
    assert orders.close().all_delivered


def test_a_record_that_is_taken_back_holds_up_no_flush() -> None:
    """A signal that ends the process refuses the puts that it has met in the middle."""
    go_on, appended, taken_back = threading.Event(), threading.Event(), list[BaseException]()
    with blocking(transport()) as orders:
        threads = orders._threads  # noqa: SLF001 - what is in the inbox is seen nowhere else

        def refuse() -> None:
            appended.set()
            assert go_on.wait(20)
            message = "refused"
            raise BufferFull(message, outstanding_records=1, outstanding_bytes=1)

        class StopsAfterTheAppend:
            is_stopped = property(lambda _: len(threads) > 0)

        def put_one() -> None:
            try:
                put(orders)
            except BufferFull as full:
                taken_back.append(full)

        # The loop stands still meanwhile.
        taken = threading.Event()
        orders.sender.run_soon(lambda: taken.wait(20))
        threads.serve(BlockingDelivery, StopsAfterTheAppend(), refuse)
        thread = threading.Thread(target=put_one)
        thread.start()
        assert appended.wait(20)
        is_drained = threads.watch_drained()
        assert not is_drained()
        go_on.set()
        thread.join(20)
        assert is_drained()
        taken.set()
        assert orders.flush(20).complete
        assert orders.close().accepted == 0
    assert len(taken_back) == 1


def test_a_signal_handler_can_flush_in_the_middle_of_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []

    with blocking(transport()) as orders:
        loop = orders._sender._loop  # noqa: SLF001 - the signal has to come right after the post
        assert loop is not None
        posted = loop.call_soon_threadsafe

        def interrupting(*arguments: Any) -> object:
            handle = posted(*arguments)
            if threading.current_thread() is threading.main_thread():
                monkeypatch.setattr(loop, "call_soon_threadsafe", posted)
                signal.raise_signal(signal.SIGUSR1)
            return handle

        before = signal.signal(signal.SIGUSR1, lambda *_: reports.append(orders.flush(30)))
        try:
            put(orders)
            monkeypatch.setattr(loop, "call_soon_threadsafe", interrupting)
            reports.append(orders.flush(5))
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert [report.complete for report in reports] == [True, True]


def test_flush_and_close_return_in_time_although_a_hook_never_returns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kpl_core.background.blocking._STUCK_SECONDS", 0.1)
    reached, go_on = threading.Event(), threading.Event()

    def hook(_: Fact) -> None:
        reached.set()
        assert go_on.wait(60)

    orders = BlockingProducer(Config(), transport=transport(), hooks=[hook])
    try:
        with orders:
            delivery = put(orders)
            assert reached.wait(30)
            for ask in (orders.flush, orders.close):
                report = ask(0.05)
                assert (report.complete, report.accepted) == (False, 1)
            assert caplog.text.count("is held up") == 2
            go_on.set()
    finally:
        go_on.set()
    assert delivery.result(30).successful
    assert orders.close().delivered == 1


WHO: ContextVar[str] = ContextVar("who", default="nobody")


class _Asking(list[RequestCompleted]):
    """A hook that records the context in which each Kinesis record opened."""

    def __call__(self, fact: Fact) -> None:
        if isinstance(fact, RequestCompleted):
            self.append(fact)

    def opening_context(self) -> object:
        return WHO.get()


@pytest.mark.parametrize("fairness", [None, FairnessPolicy()])
def test_an_opening_hook_runs_in_the_context_of_the_put(
    fairness: FairnessPolicy | None,
) -> None:
    asking = _Asking()
    names = [f"stream-{number}" for number in range(40)]
    kinesis = FakeTransport(FakeKinesis(dict.fromkeys(names, 1), enforce_limits=False))
    config = Config(fairness=fairness, record_max_buffered_time_ms=5)
    with BlockingProducer(config, transport=kinesis, hooks=[asking]) as orders:
        for name in names:
            assert orders.put_nowait(name, partition_key="k", data=b"x").result(30).successful
        asking.clear()

        def work(number: int) -> None:
            for name in names[number::4]:
                _ = WHO.set(name)
                orders.put_nowait(name, partition_key="k", data=b"x")

        in_threads(4, work)
    assert {fact.stream: fact.opened_in for fact in asking} == {name: (name,) for name in names}
