"""The background sender: several record sources in one thread."""

import threading
from collections.abc import Callable

from kpl_core import BufferFull, Config, Producer
from kpl_core.background.sender import BackgroundSender
from kpl_core.testing import FakeKinesis, FakeTransport
from tests.programs.running_program import wait_until


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


def test_sources_that_always_have_records_get_the_first_room_in_turn() -> None:
    """Each of n sources puts in every n-th drain. In a fixed order the first source would always take all room."""
    sources = [EndlessSource() for _ in range(3)]
    transport = FakeTransport(FakeKinesis({"orders": 1}, enforce_limits=False))
    config = Config(max_outstanding_records=100, record_max_buffered_time_ms=1)
    sender = BackgroundSender(
        lambda: Producer(config, transport=transport), sources[0], name="test-sender", lock=threading.RLock()
    )
    sender.start()
    sender.wait_until_open()
    for source in sources[1:]:
        sender.call(lambda source=source: sender.add_source(source))  # type: ignore[misc]
    # Each source put without the later ones before those were added.
    before = sender.call(lambda: [source.put_count for source in sources])

    def put_since() -> list[int]:
        return [source.put_count - earlier for source, earlier in zip(sources, before, strict=True)]

    try:
        wait_until(lambda: min(put_since()) >= 2_000, lambda: f"2,000 records of each source, after {put_since()}")
        counts = sender.call(put_since)
    finally:
        sender.stop()
        assert sender.join(30.0)
    assert max(counts) < 2 * min(counts)
