"""A producer with one stream, without an event loop, whose `put_nowait` is the method in C."""

import threading
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from kpl_core.producer.delivery import Delivery
from kpl_core.records.outcome import Outcome
from kpl_core.records.record_result import INTERNAL, Attempt

# The first half of the hash keys, and the second.
OPEN_KEY, OTHER_KEY = "a", "b"
OTHERS = ("explicit_hash_key", "flow", "tier", "metadata")
DEFAULTS = (None, None, "normal", None)


class Text(str):
    """A str that may have any methods."""

    __slots__ = ()


class OneStream(NamedTuple):
    """A producer with one stream of two shards, whose `put_nowait` is the method in C before one in Python."""

    producer: Any
    pipeline: Any
    batch: Any
    batches: dict[str, Any]
    room: Any
    record: Any
    placed: list[Any]
    woken: list[str]
    time: list[float]


def owner_of_batch(place: Any) -> Any:
    """A pipeline that puts what no open record takes, and says why it could not."""

    def fail_put(_key: str, _data: bytes, _explicit: None, _flow: None, now: float, error: BaseException) -> Delivery:
        outcome = Outcome()
        outcome.attempted(Attempt(False, INTERNAL, repr(error), now, now))
        outcome.settle()
        return Delivery(outcome, 0)

    return SimpleNamespace(
        place=place,
        fail_put=fail_put,
        attend=lambda _now: None,
        all_pass=lambda: True,
        new_outcome=Outcome,
        attention=False,
    )


def own_streams_of(clock: Any, batches: dict[str, Any], forks: int, *, has_system_clock: bool = False) -> Any:
    """What the put method looks at, as if a loop of asyncio ran in this thread."""
    return {"_thread_id": threading.get_ident()}, None, clock, batches, forks, has_system_clock


def one_stream_of(in_c: ModuleType) -> OneStream:
    record, room = in_c.OpenRecord(Delivery), in_c.Room()
    record.restart(Outcome())
    record.limit, room.free_records, room.free_bytes = 10_000, 1_000, 100_000
    # Half of the keys belong to a shard without an open record.
    router = SimpleNamespace(table=(b"\x7f" + b"\xff" * 31, [record, None]))
    placed: list[Any] = []
    woken: list[str] = []
    now = [1.5]

    def place(key: str, data: bytes, explicit: str | None, flow: str | None, now: float) -> Delivery:
        placed.append((key, data, explicit, flow, now))
        return Delivery(Outcome(), 7)

    pipeline = owner_of_batch(place)
    batch = in_c.PutBatch(pipeline, router, room, Delivery)
    batch.most, batch.opens_at = 50, 1.0
    batches = {"s": batch}

    def put(_self, stream, *, partition_key, data, explicit_hash_key=None, flow=None, tier="normal", metadata=None):
        """Put in Python."""
        return stream, partition_key, data, (explicit_hash_key, flow, tier, metadata)

    class Producer:
        _own_streams: Any = own_streams_of(lambda: now[0], batches, in_c.count_forks(0))
        _wake = staticmethod(woken.append)
        put_nowait = in_c.put_method(put)

    return OneStream(Producer(), pipeline, batch, batches, room, record, placed, woken, now)


def put(
    one_stream: OneStream,
    key: str = OPEN_KEY,
    data: bytes = b"data",
    explicit: str | None = None,
    flow: str | None = None,
) -> Any:
    return one_stream.producer.put_nowait("s", partition_key=key, data=data, explicit_hash_key=explicit, flow=flow)
