"""When any task is cancelled at any await, the books balance and nothing stays reserved.

Each scenario runs once to count its checkpoints, and then once for each of them, cancelled there.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator

import anyio
import pytest

from kpl_core import Config, Producer, ProducerClosed
from kpl_core.testing import ErrorAnswer, FakeKinesis, RecordError, SplitDuringRequest, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.faults.books import STREAM, Books, assert_closed
from tests.faults.checkpoints import Checkpoints
from tests.support.virtual_time import BackendName, run_in_virtual_time

BACKENDS: list[BackendName] = ["asyncio", "trio"]
# Puts wait for room, aggregated records close by count, and what is throttled backs off.
CONFIG = Config(
    region="us-east-1",
    max_outstanding_records=8,
    max_in_flight_requests=2,
    aggregation_max_count=3,
    record_max_buffered_time_ms=20,
    retry_backoff_base_ms=5,
    retry_backoff_cap_ms=50,
)


class Scene:
    """A producer over a service that throttles, fails once and splits a shard once."""

    def __init__(self, latency_seconds: float) -> None:
        self.kinesis = FakeKinesis({STREAM: 2})
        self.kinesis.faults.add(RecordError(), When(every=5, once_per_record=True))
        self.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords", skip=2, times=1))
        self.kinesis.faults.add(SplitDuringRequest(), When(operation="PutRecords", skip=4, times=1))
        self.producer = Producer(CONFIG, transport=FakeTransport(self.kinesis, latency_seconds=latency_seconds))
        self.books = Books(self.producer)

    def check(self, *, all_delivered: bool) -> None:
        assert_closed(self.producer)
        assert all(delivery.done for delivery in self.books.deliveries.values())
        self.books.balance(self.kinesis)
        report = self.producer.report()
        known = len(self.books.deliveries)
        assert known <= report.accepted <= known + len(self.books.unclaimed)
        if not self.books.unclaimed:
            assert report.delivered == self.books.outcomes()[""]
        if all_delivered:
            assert report.delivered == report.accepted


async def live(scene: Scene) -> None:
    """Everything a program does with a producer, in one task."""
    producer, books = scene.producer, scene.books
    async with producer:
        await books.put(12)
        (delivery, *_) = await books.put_many(20)
        await producer.flush(timeout=0.01)
        assert (await delivery).successful
        await producer.flush()
        books.put_nowait(5)
        await books.put(5)
        report = await producer.close(timeout=0.05)
        assert report.buffered == 0


async def _owner_in_a_scope(scene: Scene, at: int) -> int:
    with anyio.CancelScope() as scope:
        checkpoints = Checkpoints(at, scope.cancel)
        await checkpoints.through(live(scene))
    scene.check(all_delivered=False)
    assert scope.cancelled_caught or not 0 < at < checkpoints.passed
    return checkpoints.passed


async def _owner_in_a_task(scene: Scene, at: int, *, again: bool = False) -> int:
    """As asyncio itself cancels, without anyio's scopes."""
    checkpoints = Checkpoints(at, lambda: owner.cancel("checkpoint"), again=again)
    owner = asyncio.create_task(checkpoints.through(live(scene)))
    await asyncio.wait([owner])
    assert owner.cancelled() or not 0 < at < checkpoints.passed
    scene.check(all_delivered=False)
    return checkpoints.passed


async def _owner_in_a_task_again_and_again(scene: Scene, at: int) -> int:
    """By a caller that also cancels the tasks that are about to end."""
    return await _owner_in_a_task(scene, at, again=True)


# Answers before, and after, everything else that waits.
LATENCIES = (0.0, 0.003, 0.02, 0.2)
Cancelled = Callable[[Scene, int], Coroutine[None, None, int]]


def cancel_everywhere(scenario: Cancelled, backend: BackendName) -> int:
    """Run the scenario, cancelled at each of its checkpoints in turn; return how many there were."""
    everywhere = 0
    for latency_seconds in LATENCIES:
        total = run_in_virtual_time(scenario, Scene(latency_seconds), 0, backend=backend)
        everywhere += total
        for at in range(1, total + 1):
            run_in_virtual_time(scenario, Scene(latency_seconds), at, backend=backend)
    return everywhere


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_owner_can_be_cancelled_at_any_checkpoint(backend: BackendName) -> None:
    assert cancel_everywhere(_owner_in_a_scope, backend) > 30


@pytest.mark.parametrize("scenario", [_owner_in_a_task, _owner_in_a_task_again_and_again])
def test_the_owner_can_be_cancelled_by_asyncio_itself_at_any_checkpoint(scenario: Cancelled) -> None:
    assert cancel_everywhere(scenario, "asyncio") > 30


async def _putting(books: Books) -> None:
    await books.put(15)


async def _putting_many(books: Books) -> None:
    await books.put_many(15)


async def _waiting(books: Books) -> None:
    for _ in range(5):
        (delivery,) = await books.put()
        _ = await delivery


async def _flushing(books: Books) -> None:
    for timeout in (None, 0.001, None):
        await books.put(3)
        await books.producer.flush(timeout=timeout)


async def _closing(books: Books) -> None:
    await books.put(20)
    await books.producer.close(timeout=0.2)


Client = Callable[[Books], Awaitable[None]]
CLIENTS: list[Client] = [_putting, _putting_many, _waiting, _flushing, _closing]


def _client_cancelled(client: Client) -> Cancelled:
    async def beside_the_others(scene: Scene, at: int) -> int:
        async with scene.producer, anyio.create_task_group() as tasks:
            for other in CLIENTS:
                if other not in (client, _closing):
                    tasks.start_soon(_patiently, other, scene.books)
            with anyio.CancelScope() as scope:
                checkpoints = Checkpoints(at, scope.cancel)
                await checkpoints.through(_patiently(client, scene.books))
        # The others are not concerned; only a close that is cancelled gives up for all.
        scene.check(all_delivered=client is not _closing)
        return checkpoints.passed

    return beside_the_others


async def _patiently(client: Client, books: Books) -> None:
    try:
        await client(books)
    except ProducerClosed:
        # The closing task may be faster.
        assert books.producer.report().accepted >= len(books.deliveries)


ROLES: Iterator[tuple[Client, BackendName]] = itertools.product(CLIENTS, BACKENDS)


@pytest.mark.long
@pytest.mark.parametrize(("client", "backend"), list(ROLES))
def test_a_task_that_shares_a_producer_can_be_cancelled_at_any_checkpoint(client: Client, backend: BackendName) -> None:
    assert cancel_everywhere(_client_cancelled(client), backend) > 3
