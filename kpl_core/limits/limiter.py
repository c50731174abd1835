"""The limiter alone, for those who bring their own aggregation and sending.

A thin async shell around `kpl_core.pipeline.limiter`: one task sleeps until the next
shard has tokens. Runs on asyncio and trio.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

import anyio

from kpl_core.errors import ProducerClosed
from kpl_core.event_loop import running_clock
from kpl_core.options.config import Config
from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.limiter import StreamLimiter as ShardLimiters
from kpl_core.pipeline.shard_limiter import Drained
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.record_result import EXPIRED

__all__ = ["Limiter"]


class Limiter:
    """Admits Kinesis records as their shards' tokens allow, by deadline; an async context manager.

    `on_admit(record)` gets what may be sent now, `on_expired(record, "Expired")` what waited past
    its expiration; both are awaited, one record after the other. The limits are `Config`'s.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        on_admit: Callable[[KinesisRecord], Awaitable[object]],
        on_expired: Callable[[KinesisRecord, str], Awaitable[object]],
    ) -> None:
        config = Config() if config is None else config
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
        # Out of the queues and not handed on yet; whether each is expired. Survives a cancellation.
        self._leaving: deque[tuple[KinesisRecord, bool]] = deque()

    async def __aenter__(self) -> Self:
        """Start the one task that waits for tokens."""
        self._clock = running_clock()
        self._tasks = anyio.create_task_group()
        # Not the group's own scope, in which the caller's block runs too.
        self._waiting = anyio.CancelScope()
        await self._tasks.__aenter__()
        self._is_open = True
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Stop; what still waits stays where it is, see `flush`."""
        await self.aclose()
        cancelled = kind is not None and issubclass(kind, anyio.get_cancelled_exc_class())
        # The block's own exception stays as it is: a task group that sees it wraps it.
        suppressed = await self._tasks.__aexit__(*((kind, error, traceback) if cancelled else (None, None, None)))
        return cancelled and suppressed

    async def put(self, record: KinesisRecord) -> None:
        """Let a record wait for its tokens, and drain its own shard at once.

        Raises:
            ProducerClosed: the limiter is closed, or was not entered.
        """
        if not self._is_open:
            message = "this limiter is closed; put inside `async with Limiter(...)`"
            raise ProducerClosed(message)
        drained = self._limiter.put(record, self._clock())
        if self._limiter.next_wakeup() < self._armed_at:
            self._woken.set()
        await self._hand_on([Drained([], [record]) if drained is None else drained])

    async def flush(self) -> None:
        """Admit everything that is not expired, tokens or not; for a graceful end. Nothing is limited afterwards."""
        await self._hand_on(self._limiter.drain_force(self._clock()))

    async def aclose(self) -> None:
        """Stop the task; closing twice is closing once."""
        if self._is_open:
            self._is_open = False
            self._waiting.cancel()

    async def _run(self) -> None:
        with self._waiting:
            await self._admit_in_time()

    async def _admit_in_time(self) -> None:
        now = self._clock()
        while True:
            self._woken = anyio.Event()
            await self._hand_on(self._limiter.drain_due(now))
            self._armed_at = self._limiter.next_wakeup()
            with anyio.move_on_after(self._armed_at - self._clock()) as sleep:
                await self._woken.wait()
            # A timer may fire a hair early; then nothing would be due, again and again.
            now = max(self._clock(), self._armed_at) if sleep.cancelled_caught else self._clock()

    async def _hand_on(self, drains: Iterable[Drained]) -> None:
        for drained in drains:
            self._leaving += [(record, True) for record in drained.expired]
            self._leaving += [(record, False) for record in drained.admitted]
        while self._leaving:
            record, is_expired = self._leaving.popleft()
            await (self._on_expired(record, EXPIRED) if is_expired else self._on_admit(record))
