"""Records leave nothing behind: objects and bytes are counted, in virtual time.

What a process' resident set does in real time is measured by `benchmarks/steady_memory.py`.
"""

import gc
import tracemalloc
from collections.abc import Iterator, Sequence

import anyio
import pytest

from kpl_core import Config, Delivery, Producer
from kpl_core.testing import (
    FakeKinesis,
    PutRecord,
    PutRecordsEntry,
    RecordError,
    ResetAfterCommit,
    ServiceLimits,
    SplitDuringRequest,
    When,
)
from kpl_core.testing.fake_transport import FakeTransport
from tests.faults.books import STREAM, assert_closed
from tests.support.virtual_time import Backend

pytestmark = [pytest.mark.long, pytest.mark.anyio]
ROUNDS = 12
# The allocator rounds up, dictionaries have grown, interned numbers are kept: noise, not a leak.
TOLERATED_OBJECTS = 200
TOLERATED_BYTES = 64 * 1024


class Hollow(FakeKinesis):
    """Stores that a record came, but not what was in it: the memory measured is not the service's."""

    def put_records(self, stream: str, records: Sequence[PutRecord], *, now: float) -> list[PutRecordsEntry]:
        return super().put_records(stream, [(key, hash_key, b"") for key, hash_key, _ in records], now=now)


class Forgetful(FakeTransport):
    """Keeps no request; the fake does, for tests that look at them."""

    def __init__(self, kinesis: FakeKinesis) -> None:
        super().__init__(kinesis, latency_seconds=0.01)
        self.requests = _Nothing()


class _Nothing(list):  # type: ignore[type-arg]
    def append(self, item: object) -> None:
        """Forget it."""


@pytest.fixture(autouse=True)
def tracing() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


async def put_for_a_while(producer: Producer) -> None:
    """Some awaited, most not."""
    for second in range(30):
        delivery: Delivery | None = None
        for number in range(20):
            delivery = producer.put_nowait(STREAM, partition_key=f"{second}-{number}", data=bytes(100))
        if second % 7 == 0 and delivery is not None:
            await delivery
        await anyio.sleep(1.0)
    await producer.flush()


@pytest.mark.parametrize("trouble", [False, True], ids=["health", "trouble"])
async def test_a_producer_holds_after_twice_the_time_what_it_held_after_once(trouble: bool) -> None:
    kinesis = Hollow({STREAM: 4}, limits=ServiceLimits(retention_seconds=1.0))
    if trouble:
        kinesis.faults.add(RecordError(), When(every=11))
        kinesis.faults.add(ResetAfterCommit(), When(operation="PutRecords", every=13))
        kinesis.faults.add(SplitDuringRequest(), When(operation="PutRecords", skip=50, every=50, times=2))
    async with Producer(Config(region="us-east-1"), transport=Forgetful(kinesis)) as producer:
        for _ in range(ROUNDS // 2):
            await put_for_a_while(producer)
        objects, size = _held()
        for _ in range(ROUNDS // 2):
            await put_for_a_while(producer)
        more_objects, more_bytes = (after - before for after, before in zip(_held(), (objects, size), strict=True))
        assert producer.buffer_limit.outstanding_bytes == 0
        assert more_objects < TOLERATED_OBJECTS
        assert more_bytes < TOLERATED_BYTES
    assert_closed(producer)
    assert producer.report().delivered == ROUNDS * 30 * 20


def _held() -> tuple[int, int]:
    """Return the objects the collector knows, and the bytes allocated since the test began."""
    gc.collect()
    return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
