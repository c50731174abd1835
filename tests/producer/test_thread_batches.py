"""With the kernels, the puts of a burst of threads wait in batches of the inbox: real threads and a real event loop."""

import asyncio
import itertools
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kpl_core import COMPILED, BlockingProducer, BufferFull, Config, Delivery, Producer, ProducerClosed
from kpl_core.background.blocking_delivery import BlockingDelivery
from kpl_core.producer.inbox import BURST, Inbox
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.consumers import read_everything
from tests.support.producer_scene import STREAM

pytestmark = pytest.mark.skipif(not COMPILED, reason="the kernels are not compiled, or off")
CONFIG = Config(record_max_buffered_time_ms=20, rate_limit_records_per_sec_per_shard=1e6)

# What Python puts, among others that are put in C.
KINDS: list[dict[str, Any]] = [
    {"metadata": {"a": "b"}},
    {"explicit_hash_key": "0"},
    {"padding": bytes(9_000)},
    {"partition_key": "é"},
    {"timeout": 5.0},
]


def blocking(fake: FakeKinesis | None = None, config: Config = CONFIG) -> BlockingProducer:
    fake = FakeKinesis({STREAM: 2}, enforce_limits=False) if fake is None else fake
    return BlockingProducer(config, transport=FakeTransport(fake))


def hold(orders: BlockingProducer) -> threading.Event:
    """Let the loop stand still until the returned event is set."""
    go_on, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go_on.wait(20)

    orders.sender.run_soon(stand)
    assert stands.wait(20)
    return go_on


def inbox_of(orders: BlockingProducer) -> Inbox:
    return orders._threads._inbox  # noqa: SLF001 - what is in the inbox is seen nowhere else


def put(orders: BlockingProducer, text: str) -> BlockingDelivery:
    return orders.put(STREAM, partition_key=text[:1], data=text.encode())


def known(orders: BlockingProducer) -> None:
    """Let the producer know the stream."""
    assert put(orders, "first").result(20).successful


def test_a_burst_opens_batches_and_every_record_has_a_result_of_its_own() -> None:
    fake = FakeKinesis({STREAM: 2}, enforce_limits=False)
    with blocking(fake) as orders:
        known(orders)
        go_on, inbox = hold(orders), inbox_of(orders)
        deliveries = [put(orders, f"{number}") for number in range(1_000)]
        assert len(inbox.queue) < 40
        assert inbox.records == 1_000
        assert inbox.size_bytes == sum(len(f"{number}") + 1 for number in range(1_000))
        # Some are waited for in the inbox, by a thread and by a callback.
        called: list[BlockingDelivery] = []
        deliveries[500].add_done_callback(called.append)
        waiting = threading.Thread(target=deliveries[700].result, args=(20,))
        waiting.start()
        go_on.set()
        results = [delivery.result(20) for delivery in deliveries]
        waiting.join(20)
        assert len({result.sequence_number for result in results}) < len(results)
        assert all(result.successful for result in results)
        report = orders.flush()
        assert (inbox.records, inbox.size_bytes, inbox.batches) == (0, 0, {})
    assert called == [deliveries[500]]
    assert (report.accepted, report.delivered) == (1_001, 1_001)
    stored = [record.data.decode() for record in read_everything(fake, STREAM)]
    assert sorted(stored) == sorted(["first", *(f"{number}" for number in range(1_000))])


def test_a_few_puts_open_none() -> None:
    with blocking() as orders:
        known(orders)
        go_on = hold(orders)
        for number in range(BURST):
            put(orders, f"{number}")
        assert not inbox_of(orders).batches
        go_on.set()


@pytest.mark.parametrize("options", [{"aggregation_enabled": False}, {"aggregation_max_count": 10}])
def test_a_stream_that_has_no_batches_has_none_here(options: dict[str, Any]) -> None:
    config = Config(record_max_buffered_time_ms=20, rate_limit_records_per_sec_per_shard=1e6, **options)
    with blocking(config=config) as orders:
        known(orders)
        go_on = hold(orders)
        deliveries = [put(orders, f"{number}") for number in range(100)]
        assert not inbox_of(orders).batches
        go_on.set()
        assert all(delivery.result(20).successful for delivery in deliveries)


@pytest.mark.parametrize("seed", range(4))
def test_puts_of_any_kind_keep_the_order_of_their_thread(seed: int) -> None:
    """Each key is one thread's. Some puts are made in C, and those that only Python makes come between them."""
    fake = FakeKinesis({STREAM: 1, "other": 1}, enforce_limits=False)
    threads, each = 6, 800
    with blocking(fake) as orders:
        known(orders)

        def work(thread: int) -> None:
            chance = random.Random(100 * seed + thread)
            for number in range(each):
                kind = chance.randrange(200)
                if kind == len(KINDS):
                    time.sleep(0.001)
                if kind == len(KINDS) + 1:
                    orders.put("other", partition_key="k", data=b"x")
                options = KINDS[kind] if kind < len(KINDS) else {}
                put_one = {"stream": STREAM, "partition_key": "k", "data": b"%d %d " % (thread, number), **options}
                put_one["data"] += put_one.pop("padding", b"")
                orders.put(**put_one)

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        report = orders.flush()
        assert report.delivered == report.accepted
    seen: dict[bytes, list[int]] = defaultdict(list)
    for record in read_everything(fake, STREAM):
        if record.data != b"first":
            thread, number = record.data.split()[:2]
            seen[thread].append(int(number))
    assert len(seen) == threads
    for numbers in seen.values():
        assert numbers == list(range(each))


def test_the_buffer_is_full_to_the_record() -> None:
    config = Config(record_max_buffered_time_ms=20, max_outstanding_records=1_000)
    with blocking(config=config) as orders:
        known(orders)
        go_on, accepted = hold(orders), list[BlockingDelivery]()
        with pytest.raises(BufferFull, match="1,000 of 1,000 records"):
            accepted.extend(orders.put_nowait(STREAM, partition_key="k", data=b"x") for _ in range(2_000))
        assert len(accepted) == 1_000
        go_on.set()
        assert orders.flush().delivered == 1_001
        limit = orders._producer.buffer_limit  # noqa: SLF001 - what is outstanding is seen nowhere else
        assert (limit.outstanding_records, limit.outstanding_bytes) == (0, 0)


def test_a_record_above_a_limit_that_is_lower_since_its_put_has_failed() -> None:
    with blocking() as orders:
        known(orders)
        go_on, deliveries = hold(orders), list[BlockingDelivery]()
        for number in range(200):
            data = bytes(100 if number == 150 else 10)
            deliveries.append(orders.put(STREAM, partition_key="k", data=data))
        pipeline = orders._producer._open[STREAM]  # noqa: SLF001 - as the stream's description does
        pipeline.max_record_bytes = 50
        go_on.set()
        results = [delivery.result(20) for delivery in deliveries]
        assert [number for number, result in enumerate(results) if not result.successful] == [150]
        assert results[150].error_code == "Internal"
        report = orders.flush()
        assert (report.delivered, report.failed) == (200, {"Internal": 1})
        limit = orders._producer.buffer_limit  # noqa: SLF001 - as above
        assert (limit.outstanding_records, limit.outstanding_bytes) == (0, 0)


def test_a_close_delivers_what_is_in_a_batch_and_later_puts_raise() -> None:
    with blocking() as orders:
        known(orders)
        go_on = hold(orders)
        deliveries = [put(orders, f"{number}") for number in range(300)]
        closing = threading.Thread(target=orders.close)
        closing.start()
        while orders.is_open:
            time.sleep(0.001)
        with pytest.raises(ProducerClosed):
            put(orders, "late")
        go_on.set()
        closing.join(20)
    assert all(delivery.result(0).successful for delivery in deliveries)
    assert orders.close().accepted == 301


def test_threads_that_put_while_it_closes_lose_nothing() -> None:
    for seconds in (0.0, 0.002, 0.01, 0.03):
        accepted: list[list[BlockingDelivery]] = [[] for _ in range(4)]
        with blocking() as orders:
            known(orders)

            def work(mine: list[BlockingDelivery], orders: BlockingProducer = orders) -> None:
                with pytest.raises(ProducerClosed):
                    mine.extend(put(orders, "record") for _ in itertools.count())

            workers = [threading.Thread(target=work, args=(mine,)) for mine in accepted]
            for worker in workers:
                worker.start()
            time.sleep(seconds)
            report = orders.close()
            for worker in workers:
                worker.join(20)
        assert report.accepted == report.delivered == 1 + sum(map(len, accepted))
        assert all(delivery.result(0).successful for mine in accepted for delivery in mine)


def test_a_put_waits_while_a_signal_ends_the_process() -> None:
    with blocking() as orders:
        known(orders)
        go_on = hold(orders)
        before = [put(orders, f"{number}") for number in range(100)]
        orders.intake.stop()
        late = threading.Thread(target=put, args=(orders, "late"))
        late.start()
        late.join(0.05)
        assert late.is_alive()
        assert inbox_of(orders).records == len(before)
        orders.intake.go_on()
        late.join(20)
        assert not late.is_alive()
        go_on.set()
        assert orders.flush().delivered == 102


def test_a_put_that_needs_room_waits_behind_those_that_do() -> None:
    with blocking() as orders:
        known(orders)
        go_on = hold(orders)
        for number in range(100):
            put(orders, f"{number}")
        lines = orders._threads.lines  # noqa: SLF001 - no put of this scene waits for room
        before = inbox_of(orders).records
        lines[("normal", None)] = ()  # type: ignore[index] # as if one waits
        put(orders, "behind it")
        del lines[("normal", None)]  # type: ignore[attr-defined]
        assert inbox_of(orders).records == before + 1
        # It was made in Python, so what comes now is not before it.
        assert not inbox_of(orders).batches or inbox_of(orders).batches[STREAM].count == 0
        go_on.set()
        assert orders.flush().delivered == 102


class RemovedMeanwhile(dict[str, Any]):
    """A table from which another thread removes what the loop has just found there."""

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        _ = self.pop(key, None)
        return found


def test_a_batch_that_a_put_removes_while_the_loop_takes_it_is_taken_with_all_before_it() -> None:
    """The loop raised KeyError, and what it had taken in that step had no results."""
    with blocking() as orders:
        known(orders)
        go_on = hold(orders)
        puts = [put(orders, f"{number}") for number in range(50)]
        inbox = inbox_of(orders)
        inbox.batches = RemovedMeanwhile(inbox.batches)
        go_on.set()
        assert all(delivery.result(20).successful for delivery in puts)
        assert orders.flush().delivered == 51


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_put_in_a_forked_child_raises_although_a_batch_is_open() -> None:
    with blocking() as orders:
        known(orders)
        for number in range(100):
            put(orders, f"{number}")
        child = os.fork()
        if not child:
            try:
                put(orders, "lost")
            except ProducerClosed:
                os._exit(7)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert orders.flush().delivered == 101


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)


def test_puts_of_a_sync_route_wait_in_batches_too_and_those_of_the_loop_do_not() -> None:
    async def run() -> None:
        fake = FakeKinesis({STREAM: 2}, enforce_limits=False)
        async with Producer(CONFIG, transport=FakeTransport(fake)) as orders:
            inbox: Inbox = orders.internal.threads._inbox  # noqa: SLF001 - as above
            assert (await orders.put_nowait(STREAM, partition_key="k", data=b"first")).successful
            deliveries: list[Delivery] = []

            def put_some() -> None:
                deliveries.extend(orders.put_nowait(STREAM, partition_key="k", data=b"x") for _ in range(300))

            in_a_thread(put_some)
            assert (inbox.records, len(inbox.queue) < 30) == (300, True)
            deliveries.append(orders.put_nowait(STREAM, partition_key="k", data=b"of the loop"))
            assert inbox.records == 300
            assert [(await delivery).successful for delivery in deliveries] == [True] * 301
            report = await orders.flush()
            assert (report.accepted, report.delivered) == (302, 302)
        with pytest.raises(ProducerClosed):
            _ = await asyncio.to_thread(orders.put_nowait, STREAM, partition_key="k", data=b"late")

    asyncio.run(run())


def test_a_thread_with_another_event_loop_may_not_put() -> None:
    async def run() -> None:
        async with Producer(CONFIG, transport=FakeTransport(FakeKinesis({STREAM: 1}))) as orders:
            assert (await orders.put_nowait(STREAM, partition_key="k", data=b"first")).successful
            raised: list[str] = []

            async def put_from_another_loop() -> None:
                try:
                    _ = orders.put_nowait(STREAM, partition_key="k", data=b"x")
                except Exception as error:  # noqa: BLE001 - its name is compared
                    raised.append(type(error).__name__)

            puts: list[Delivery] = []
            put_one = partial(orders.put_nowait, STREAM, partition_key="k", data=b"x")
            in_a_thread(lambda: puts.extend([put_one() for _ in range(100)]))
            in_a_thread(lambda: asyncio.run(put_from_another_loop()))
            assert raised == ["WrongEventLoop"]
            report = await orders.flush()
            assert report.delivered == 101

    asyncio.run(run())
