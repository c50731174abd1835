"""All streams of a producer: their pipelines, and the tasks that drive them.

`stream_parts` builds the pipeline of a stream: which intake, gate and ledger a configuration asks for.

| place | plain | with |
| --- | --- | --- |
| intake | straight to the aggregator | `Config.spool` in write-ahead mode; `Config.fairness`; both |
| gate | every admitted record passes | `Config.breaker` |
| ledger | failed records are final | `Config.spool`, `Config.dead_letters` |
"""

import logging
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple

import anyio
from anyio.abc import TaskGroup, TaskStatus

from kpl_core.durability.breaker_gate import BreakerGate
from kpl_core.durability.circuit_breaker import CircuitBreaker
from kpl_core.durability.durable_ledger import DurableLedger, durable_rules
from kpl_core.hooks import Fact, Hook, OpeningHook
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.pipeline.intake.write_ahead import SpoolState, WriteAhead
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.stages import Stages
from kpl_core.producer.delivery import Delivery
from kpl_core.producer.in_flight import InFlightRequests
from kpl_core.producer.report import ProducerReport
from kpl_core.producer.shard_map_refresher import ShardMapRefresher, learn_record_limit
from kpl_core.producer.stream_runner import StreamRunner
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.pipeline_statistics import PipelineStatistics
from kpl_core.transport.transport import KinesisTransport, call_seconds

_logger = logging.getLogger("kpl_core")

# Set in the tasks of all producers. Their context is the one in which the producer was entered, not that of a put.
_in_own_task: Final[ContextVar[bool]] = ContextVar("kpl_core_in_own_task", default=False)


class StreamParts(NamedTuple):
    """The pipeline of a stream, and what fills its places."""

    pipeline: StreamPipeline
    fair: FairIntake | None
    gate: BreakerGate | None


def stream_parts(
    stream: str,
    config: Config,
    buffer_limit: BufferLimit,
    *,
    now: float,
    chance: Callable[[], float],
    delivery: type[ResultHandle] = ResultHandle,
    listening: bool = False,
    spool_state: SpoolState | None = None,
) -> StreamParts:
    """Build the pipeline of a stream, with the places filled that its configuration asks for.

    Args:
        stream: the stream's name or ARN.
        config: the stream's options.
        buffer_limit: the producer's room, shared by all streams.
        now: the present time in seconds.
        chance: draws from [0, 1), for the jitter of backoffs.
        delivery: the class of the handles that a put returns.
        listening: whether hooks want facts.
        spool_state: whether the spool can store; by default it can.
    """
    rules = durable_rules(config)
    state = SpoolState() if spool_state is None else spool_state
    if rules.spool or rules.dead_letters:
        ledger: Ledger = DurableLedger(stream, buffer_limit, rules=rules, listening=listening, spool_state=state)
    else:
        ledger = Ledger(stream, buffer_limit, listening=listening)
    in_order = config.ordering == "per_key"
    write_ahead = WriteAhead(stream, ledger, state, in_order=in_order) if rules.write_ahead else None
    stages = Stages(stream, config, buffer_limit, ledger, chance=chance, delivery=delivery)
    fair = None if config.fairness is None else FairIntake(stages, config.fairness)
    gate = (
        None
        if config.breaker is None
        else BreakerGate(stream, config.breaker, config, spool=state if rules.spool else None)
    )
    return StreamParts(StreamPipeline(stages, now=now, write_ahead=write_ahead, fair=fair, gate=gate), fair, gate)


class StreamSet:
    """The streams put to so far; each is made when first needed and lives as long as the producer."""

    def __init__(
        self,
        config: Config,
        transport: KinesisTransport,
        buffer_limit: BufferLimit,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        hooks: Sequence[Hook],
        progress: Callable[[], None],
        spool_state: SpoolState | None = None,
    ) -> None:
        self._config = config
        self._spool_state = spool_state
        self._transport = transport
        self._buffer_limit = buffer_limit
        self.clock = clock
        self._chance = chance
        self._hooks = tuple(hooks)
        self._progress = progress
        # Called after a poll that leaves records waiting for tokens; set by the coordination.
        self.on_waiting: Callable[[], None] | None = None
        self._in_flight = InFlightRequests[StreamRunner](config.max_in_flight_requests)
        self._runners: dict[str, StreamRunner] = {}
        self._parts: dict[str, StreamParts] = {}
        # Streams that changed since the hooks got their facts, and since the disk got its records.
        self._with_facts: set[StreamPipeline] = set()
        self._with_work: set[StreamPipeline] = set()
        self._starting: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._added = anyio.Event()
        self._tasks: TaskGroup

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Start the tasks of new streams; the one task that lives as long as the producer.

        Its task group is not the block's: the host of that is the caller's task, and a stop must cancel only ours.
        """
        _ = _in_own_task.set(True)
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            while True:
                await self._added.wait()
                self._added = anyio.Event()
                starting, self._starting = self._starting, []
                for run in starting:
                    self._tasks.start_soon(run)

    def start(self, stream: str) -> StreamPipeline:
        """Make the pipeline of a new stream, and the tasks that drive it."""
        config = self._config.for_stream(stream)
        parts = stream_parts(
            stream,
            config,
            self._buffer_limit,
            now=self.clock(),
            chance=self._chance,
            delivery=Delivery,
            listening=bool(self._hooks),
            spool_state=self._spool_state,
        )
        pipeline = parts.pipeline
        pipeline.on_opening(self._opening_context())
        refresher = ShardMapRefresher(
            pipeline,
            self._transport,
            call_seconds=call_seconds(config),
            clock=self.clock,
            chance=self._chance,
        )
        runner = StreamRunner(
            pipeline,
            self._transport,
            self._in_flight,
            refresher,
            request_seconds=call_seconds(config),
            clock=self.clock,
            tasks=self._tasks,
            progress=partial(self._progressed, pipeline),
        )
        self._runners[stream] = runner
        self._parts[stream] = parts
        # A put may come from a plain callback of the loop, where no task can be started.
        self._starting += (runner.run, lambda: refresher.run(runner.wake))
        if config.max_record_size is None:
            learn = partial(learn_record_limit, call_seconds=call_seconds(config))
            self._starting.append(partial(learn, pipeline, self._transport, self._chance))
        self._added.set()
        return pipeline

    def spawn(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that lives as long as the streams."""
        self._starting.append(run)
        self._added.set()

    def pipelines(self) -> dict[str, StreamPipeline]:
        """Return each stream's pipeline."""
        return {stream: runner.pipeline for stream, runner in self._runners.items()}

    def breakers(self) -> dict[tuple[str, str], CircuitBreaker]:
        """Return the circuit breakers by stream and shard; shard "" is the stream as a whole."""
        return {
            (stream, shard_id): breaker
            for stream, parts in self._parts.items()
            if parts.gate is not None
            for shard_id, breaker in parts.gate.breakers.items()
        }

    def take_progressed(self) -> set[StreamPipeline]:
        """Return the pipelines that changed since the last call: of a thousand streams, few are looked at."""
        pipelines, self._with_work = self._with_work, set()
        return pipelines

    def waiting_by_flow(self) -> dict[str | None, tuple[int, int]]:
        """Return the user records and bytes that each flow has waiting, over all streams."""
        total: dict[str | None, tuple[int, int]] = {}
        for _, fair, _ in self._parts.values():
            if fair is not None:
                for flow, (records, size_bytes) in fair.waiting.queued_by_flow.items():
                    before = total.get(flow, (0, 0))
                    total[flow] = (before[0] + records, before[1] + size_bytes)
        return total

    def waits_by_flow(self) -> dict[str | None, float]:
        """Return how many seconds the oldest user record of each flow has waited, over all streams."""
        now = self.clock()
        longest: dict[str | None, float] = {}
        for _, fair, _ in self._parts.values():
            if fair is not None:
                for flow, arrived_at in fair.waiting.oldest_by_flow().items():
                    longest[flow] = max(now - arrived_at, longest.get(flow, 0.0))
        return longest

    def wake(self, stream: str) -> None:
        """Let a stream's runner poll its pipeline now."""
        self._runners[stream].wake()

    def flush(self, now: float) -> Callable[[], bool]:
        """Close everything open; return a function that returns True once all records put before are final."""
        generations = [(runner.pipeline, runner.pipeline.flush(now)) for runner in self._runners.values()]
        for runner in self._runners.values():
            runner.wake()
        return lambda: all(pipeline.is_flushed(generation) for pipeline, generation in generations)

    def make_room(self) -> None:
        """Send batches that are not full now if all outstanding records are in them: a put waits for their room.

        Records in flight, waiting for tokens or for their next attempt free room by themselves, and meanwhile the
        batches may fill up.
        """
        if self._in_flight.total:
            return
        batching = {runner: runner.pipeline.stages.batching_count for runner in self._runners.values()}
        if sum(batching.values()) == self._buffer_limit.outstanding_records:
            now = self.clock()
            for runner, count in batching.items():
                if count:
                    runner.pipeline.flush(now)
                    runner.wake()

    def drain_force(self, now: float) -> None:
        """Let everything leave that has not expired, without tokens."""
        for runner in self._runners.values():
            runner.pipeline.drain_force(now)
            runner.wake()

    def abandon(self, now: float) -> None:
        """Give every user record that is left its result, or offer it to the durable store."""
        pipelines = self.pipelines().values()
        self._with_facts.update(pipelines)
        self._with_work.update(pipelines)
        for runner in self._runners.values():
            # The producer itself logs the records that it gives up.
            runner.trouble.end(runner.pipeline.ledger.failed)
            runner.pipeline.abandon(now)

    def stop(self) -> None:
        """Stop all tasks."""
        self._tasks.cancel_scope.cancel()

    def _progressed(self, pipeline: StreamPipeline) -> None:
        if self._hooks:
            self._with_facts.add(pipeline)
        self._with_work.add(pipeline)
        if self.on_waiting is not None and pipeline.limiter.wakeups:
            self.on_waiting()
        self._progress()

    def tell_hooks(self) -> None:
        """Give the hooks the new facts of the streams that may have some."""
        # Swapped first: a hook may put to a new stream.
        pipelines, self._with_facts = self._with_facts, set()
        for pipeline in pipelines:
            self._tell(pipeline.ledger.take_facts())

    def tell(self, fact: Fact) -> None:
        """Give the hooks a fact that belongs to no stream."""
        self._tell((fact,))

    # A failing hook must not cost records. It is logged once and never called again. A CancelledError here comes from a
    # cancelled future inside the hook, not from a cancellation of this task.

    def _tell(self, facts: Sequence[Fact]) -> None:
        hooks = self._hooks
        for hook in hooks:
            try:
                for fact in facts:
                    # A put from inside a hook can dismiss this one: its `opening_context` failed.
                    if self._hooks is not hooks and all(each is not hook for each in self._hooks):
                        break
                    hook(fact)
            except (Exception, CancelledError) as error:  # noqa: BLE001 - as said above
                self._dismiss(hook, error)

    def _opening_context(self) -> Callable[[], object] | None:
        """Return a function that asks the hook for the context of an opening Kinesis record, None without a hook."""
        hook = next((each for each in self._hooks if isinstance(each, OpeningHook)), None)
        if hook is None:
            return None

        def opening_context() -> object:
            try:
                return None if _in_own_task.get() else hook.opening_context()
            except (Exception, CancelledError) as error:  # noqa: BLE001 - as said above
                self._dismiss(hook, error)
                return None

        return opening_context

    def _dismiss(self, hook: Hook, error: BaseException) -> None:
        self._hooks = tuple(other for other in self._hooks if other is not hook)
        for runner in self._runners.values():
            runner.pipeline.on_opening(self._opening_context())
        _logger.error("hook %r failed and gets no more facts", hook, exc_info=error)

    def last_failure(self, stream: str) -> str | None:
        """Return code and message of the latest request to a stream, if it failed, else None."""
        runner = self._runners.get(stream)
        failure = None if runner is None else runner.trouble.failure
        return None if failure is None else f"{failure.code}: {failure.message}"

    def statistics(self) -> dict[str, PipelineStatistics]:
        """Return each stream's counts."""
        return {stream: runner.pipeline.statistics() for stream, runner in self._runners.items()}

    def report(self, *, complete: bool) -> ProducerReport:
        """Return where every accepted user record is now."""
        statistics = self.statistics().values()
        failed: Counter[str] = Counter()
        for each in statistics:
            failed.update(each.failed)
        buffered = sum(each.buffered for each in statistics)
        return ProducerReport(
            accepted=sum(each.accepted for each in statistics),
            delivered=sum(each.delivered for each in statistics),
            failed=failed,
            spooled=sum(each.spooled - each.replayed for each in statistics),
            dead_lettered=sum(each.dead_lettered - each.redriven for each in statistics),
            buffered=buffered,
            buffered_bytes=self._buffer_limit.outstanding_bytes,
            complete=complete and buffered == 0,
        )
