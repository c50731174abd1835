"""The background sender: several record sources in one thread."""

import threading
from collections.abc import Callable

import pytest

from kpl_core import BufferFull, Config, Producer
from kpl_core.background.sender import BackgroundSender
from kpl_core.testing import FakeKinesis, FakeTransport
from tests.support.waiting import wait_until


class EndlessSource:
    """A record source that always has one more record."""

    def __init__(self) -> None:
        self.put_count = 0

    def drain(self, producer: Producer) -> None:
        try:
            while True:
                _ = producer.put_nowait("orders", partition_key="1", data=b"x" * 100)
                self.put_count += 1
        except BufferFull:
            return

    def watch_drained(self) -> Callable[[], bool]:
        return lambda: False

    def sender_ended(self) -> None: ...


@pytest.mark.parametrize("drains", [1, 2, 3])
def test_sources_that_always_have_records_get_the_first_room_in_turn(drains: int) -> None:
    """Each of n sources puts in every n-th drain with room. In a fixed order the first source would always take all.

    The number of drains at each progress must not decide which source takes the room.
    """
    sources = [EndlessSource() for _ in range(3)]
    transport = FakeTransport(FakeKinesis({"orders": 1}, enforce_limits=False))
    config = Config(max_outstanding_records=100, record_max_buffered_time_ms=1)
    sender = BackgroundSender(
        lambda: Producer(config, transport=transport), sources[0], name="test-sender", lock=threading.RLock()
    )
    sender.start()
    sender.wait_until_open()

    def add_sources() -> None:
        assert sender.producer is not None
        for _ in range(drains - 1):
            sender.producer.internal.on_progress(sender._drain)  # noqa: SLF001 - as often as progress may call it
        for source in sources[1:]:
            sender.add_source(source)

    sender.begin_call(add_sources)(30.0)
    # The first source put alone before the others were added.
    before = sender.begin_call(lambda: [source.put_count for source in sources])(30.0)

    def put_since() -> list[int]:
        return [source.put_count - earlier for source, earlier in zip(sources, before, strict=True)]

    try:
        wait_until(lambda: min(put_since()) >= 2_000, lambda: f"2,000 records of each source, after {put_since()}")
        counts = sender.begin_call(put_since)(30.0)
    finally:
        sender.stop()
        assert sender.join(30.0)
    assert max(counts) < 2 * min(counts)
