"""A replay in virtual time, with the backlog, the streams of a producer and the service in memory."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio

from kpl_core import BreakerPolicy, Config, FairnessPolicy, RecordResult, decode
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.replay.replayer import Replayer
from kpl_core.durability.spool import AsyncSpool, SpooledRecord, SpoolOptions
from kpl_core.durability.spool.claims import Claimed
from kpl_core.event_loop import running_clock
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.durable_store import ReplayPut
from kpl_core.producer.stream_set import StreamSet
from kpl_core.testing.fake_transport import FakeTransport

STREAM = "orders"


class _Mailbox:
    def __init__(self) -> None:
        self.clock = running_clock()

    async def wait_for(self, future: "Future[Any]") -> Any:
        return future.result()


class MemorySpool:
    """The part of a spool that the replayer uses, without a file or a thread, which virtual time cannot control."""

    def __init__(self, records: Iterable[SpooledRecord]) -> None:
        self._backlog = [Claimed(number, record) for number, record in enumerate(records, start=1)]
        self._held: dict[int, Claimed] = {}
        self.mailbox = _Mailbox()
        self.delivered: list[int] = []
        self.left = len(self._backlog)

    def listen(self, listener: Callable[[], object]) -> None:
        """Do nothing: the backlog never grows here."""

    async def claim_backlog(self, limit: int, *, max_bytes: int) -> list[Claimed]:
        taken: list[Claimed] = []
        while self._backlog and len(taken) < limit and max_bytes > 0:
            taken.append(self._backlog.pop(0))
            max_bytes -= taken[-1].record.size_bytes
        self._held.update((each.id, each) for each in taken)
        await anyio.lowlevel.checkpoint()
        return taken

    def confirm(self, ids: Sequence[int]) -> None:
        for number in ids:
            del self._held[number]
            self.delivered.append(number)
            self.left -= 1

    def release(self, ids: Sequence[int]) -> int:
        self._backlog = sorted([*(self._held.pop(number) for number in ids), *self._backlog])
        return len(ids)


@asynccontextmanager
async def replaying(
    spool: MemorySpool,
    transport: FakeTransport,
    *,
    options: dict[str, Any] | None = None,
    apart: bool = False,
    **config: Any,
) -> AsyncIterator[tuple[StreamPipeline, ReplayPut]]:
    """Replay as the gateway does; yield the pipeline, and a put of fresh records.

    `apart`: as if no two records could share a Kinesis record.
    """
    clock = running_clock()
    chosen = Config(**{"breaker": BreakerPolicy(), "fairness": FairnessPolicy(), **config})
    limit = BufferLimit(max_records=chosen.max_outstanding_records, max_bytes=chosen.max_outstanding_bytes)
    streams = StreamSet(chosen, transport, limit, clock=clock, chance=lambda: 0.5, hooks=(), progress=lambda: None)
    async with transport.open(), anyio.create_task_group() as tasks:
        await tasks.start(streams.run)
        pipeline = streams.start(STREAM)
        put, fresh = (ReplayPut(origin, streams, lambda _: pipeline) for origin in ("replay", "redrive"))

        def one_by_one(record: SpooledRecord, finished: Callable[[RecordResult], None]) -> None:
            put(record, finished)

        replayer = Replayer(
            cast("AsyncSpool", spool),
            one_by_one if apart else put,
            SpoolOptions(path=Path("unused"), **(options or {})),
            dead_letters=cast("DeadLetterQueue", None),
            chance=lambda: 0.5,
        )
        tasks.start_soon(replayer.run)
        yield pipeline, fresh
        tasks.cancel_scope.cancel()


async def seconds_until_replayed(spool: MemorySpool, *, deadline: float = 3_600.0) -> float:
    """Return the duration in virtual time."""
    started_at = anyio.current_time()
    with anyio.fail_after(deadline):
        while spool.left:  # noqa: ASYNC110 - the clock is virtual, and the spool has no event
            await anyio.sleep(0.01)
    return anyio.current_time() - started_at


def backlog(count: int, *, keys: int, flow: str | None = "tenant", size: int = 0) -> list[SpooledRecord]:
    """Return records whose data is their number, with the keys in turn."""
    return [
        SpooledRecord(STREAM, f"key-{number % keys}", b"%d" % number + b" " * size, 1_700_000_000.0, flow=flow)
        for number in range(count)
    ]


def consumed(transport: FakeTransport) -> dict[str, list[int]]:
    """Return what a consumer reads for each key, in shard order."""
    numbers: dict[str, list[int]] = {}
    for stored in transport.kinesis.records(STREAM):
        users = decode(stored.data)
        pairs = [(stored.partition_key, stored.data)] if users is None else [(e.partition_key, e.data) for e in users]
        for key, data in pairs:
            numbers.setdefault(key, []).append(int(data))
    return numbers
