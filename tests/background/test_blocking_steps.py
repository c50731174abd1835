"""The loop of a `BlockingProducer` takes what threads have put in small steps."""

import itertools
import time

from kpl_core import BlockingProducer, Config
from kpl_core.testing import FakeKinesis, FakeTransport

STREAM = "orders"
MOST = 250


def test_a_full_inbox_is_taken_in_steps_of_at_most_250_records() -> None:
    """All 27,798 were taken in one step of the loop, under the lock that every put needs."""
    config = Config(region="us-east-1", record_max_buffered_time_ms=20, rate_limit_records_per_sec_per_shard=1e6)
    transport = FakeTransport(FakeKinesis({STREAM: 4}, enforce_limits=False))
    taken: list[int] = []
    with BlockingProducer(config, transport=transport) as producer:

        def look() -> None:
            taken.append(producer._threads._inbox.taken)  # noqa: SLF001 - what a step took is seen nowhere else
            if taken[-1] < 5_000:
                producer.sender.run_soon(look)

        producer.sender.run_soon(lambda: time.sleep(0.3))
        producer.sender.run_soon(look)
        deliveries = [producer.put(STREAM, partition_key=str(number), data=b"x") for number in range(5_000)]
        assert all(delivery.result(timeout=30).successful for delivery in deliveries)
    steps = [later - before for before, later in itertools.pairwise(taken)]
    assert max(steps) > 1
    assert max(steps) <= MOST


def test_a_flush_and_put_many_come_after_what_is_in_the_inbox() -> None:
    config = Config(region="us-east-1", record_max_buffered_time_ms=1_000, max_outstanding_records=1_000)
    transport = FakeTransport(FakeKinesis({STREAM: 1}, enforce_limits=False), latency_seconds=0.01)
    with BlockingProducer(config, transport=transport) as producer:
        producer.sender.run_soon(lambda: time.sleep(0.2))
        first = [producer.put(STREAM, partition_key="k", data=b"%d" % number) for number in range(900)]
        began = time.monotonic()
        many = producer.put_many(STREAM, [("k", b"%d" % number) for number in range(900, 2_500)])
        assert producer.flush().complete
        assert all(delivery.result(timeout=0).successful for delivery in first)
        assert many.all_successful()
        assert time.monotonic() - began < 5.0
