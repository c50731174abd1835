"""The shard limiter alone, for programs with their own aggregation and sending (seed 000).

A thin async shell around `kpl_core.pipeline.limiter`. One task sleeps until the next shard has tokens. Runs on
asyncio and trio.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

import anyio

from kpl_core.errors import ProducerClosed
from kpl_core.event_loop import running_clock
from kpl_core.options.config import Config, config_or_default
from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.limiter import StreamLimiter as ShardLimiters
from kpl_core.pipeline.shard_limiter import Drained
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.record_result import EXPIRED


class Limiter:
    """Admits Kinesis records when their shards have tokens, earliest deadline first. An async context manager.

    It awaits `on_admit(record)` for a record that may be sent now, and `on_expired(record, "Expired")` for a record
    that waited past its expiration, one record at a time. The limits are those of `config`.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        on_admit: Callable[[KinesisRecord], Awaitable[object]],
        on_expired: Callable[[KinesisRecord, str], Awaitable[object]],
    ) -> None:
        config = config_or_default(config)
        self._limiter = ShardLimiters(
            ShardRules(
                records_per_second=config.rate_limit_records_per_sec_per_shard,
                bytes_per_second=config.rate_limit_bytes_per_sec_per_shard,
                burst_seconds=config.burst_seconds,
            )
        )
        self._on_admit = on_admit
        self._on_expired = on_expired
        self._woken = anyio.Event()
        self._armed_at = math.inf
        self._is_open = False
        # Records that left the queues and were not handed on yet, and whether each expired. A cancelled call leaves
        # them here for the next one.
        self._leaving: deque[tuple[KinesisRecord, bool]] = deque()

    async def __aenter__(self) -> Self:
        """Start the one task that waits for tokens."""
        self._clock = running_clock()
        self._tasks = anyio.create_task_group()
        # A scope of its own, because the caller's block runs in the scope of the group.
        self._waiting = anyio.CancelScope()
        await self._tasks.__aenter__()
        self._is_open = True
        self._tasks.start_soon(self._admit_in_time)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Stop. Records that still wait are not admitted; call `flush` before."""
        await self.aclose()
        cancelled = kind is not None and issubclass(kind, anyio.get_cancelled_exc_class())
        # A task group would wrap the exception of the block in a group, so it does not get it.
        suppressed = await self._tasks.__aexit__(*((kind, error, traceback) if cancelled else (None, None, None)))
        return cancelled and suppressed

    async def put(self, record: KinesisRecord) -> None:
        """Enqueue a record for its shard, and admit at once what has tokens.

        Raises:
            ProducerClosed: the limiter is closed or was not entered.
        """
        if not self._is_open:
            message = "this limiter is closed; put inside `async with Limiter(...)`"
            raise ProducerClosed(message)
        drained = self._limiter.put(record, self._clock())
        if self._limiter.next_wakeup() < self._armed_at:
            self._woken.set()
        await self._hand_on([Drained([], [record]) if drained is None else drained])

    async def flush(self) -> None:
        """Admit all records that are not expired, without tokens, for a graceful end. No limit holds afterwards."""
        await self._hand_on(self._limiter.drain_force(self._clock()))

    async def aclose(self) -> None:
        """Stop the task. A second call has no effect."""
        if self._is_open:
            self._is_open = False
            self._waiting.cancel()

    async def _admit_in_time(self) -> None:
        now = self._clock()
        with self._waiting:
            while True:
                self._woken = anyio.Event()
                await self._hand_on(self._limiter.drain_due(now))
                self._armed_at = self._limiter.next_wakeup()
                with anyio.move_on_after(self._armed_at - self._clock()) as sleep:
                    await self._woken.wait()
                # A timer may fire slightly early. Nothing would be due then, and the loop would spin.
                now = max(self._clock(), self._armed_at) if sleep.cancelled_caught else self._clock()

    async def _hand_on(self, drains: Iterable[Drained]) -> None:
        for drained in drains:
            self._leaving += [(record, True) for record in drained.expired]
            self._leaving += [(record, False) for record in drained.admitted]
        while self._leaving:
            record, is_expired = self._leaving.popleft()
            await (self._on_expired(record, EXPIRED) if is_expired else self._on_admit(record))
