"""Moves user records between the pipelines and the durable stores: the spool and the dead letters.

The pipelines say which records to write and which have failed. This file has the files, the futures and the tasks that
replay stored records. All records of one turn of the loop go to the disk in one append, and none is called stored
before the disk has it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Self

import anyio

from kpl_core.durability.dead_letters import (
    DeadLetterQueue,
    DeadLetterSink,
    DepthAlarm,
    Redriver,
)
from kpl_core.durability.dead_letters.dead_letter_queue import new_letter
from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.durable_ledger import DurableLedger, PendingFallback, note_of
from kpl_core.durability.replay.replayer import Replayer
from kpl_core.durability.spool import AsyncSpool, DeadLetter, Spool, SpoolError
from kpl_core.durability.spool.async_spool import shielded
from kpl_core.durability.spool.envelope import SpooledRecord, spooled_record_of
from kpl_core.errors import ConfigError, InvalidUserRecord, ProducerClosed
from kpl_core.hooks import DeadLetterAlarm, RecordsFinished, RecordsWrittenAhead
from kpl_core.options.config import Config
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.pipeline.intake.write_ahead import SpoolState, WriteAhead
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.dead_letter_sender import DeadLetterSender
from kpl_core.producer.delivery import call_when_finished
from kpl_core.producer.spool_watch import SpoolWatch
from kpl_core.producer.stream_set import StreamSet
from kpl_core.records.kinesis_record import DetachedUserRecord
from kpl_core.records.outcome import Origin, ResultHandle
from kpl_core.records.record_result import Place, RecordResult
from kpl_core.records.user_record import UserRecord

_log: Final = logging.getLogger(__name__)
# How long a close waits for the disk and the sink after the last request.
FINISH_SECONDS: Final = 5.0
_REDRIVE_BYTES_PER_SECOND: Final = 1e9

Finished = Callable[[RecordResult], None]


class DurableStore:
    """The spool and the dead letters of one producer, in its loop; an async context manager."""

    def __init__(
        self,
        config: Config,
        *,
        sink: DeadLetterSink | None,
        chance: Callable[[], float],
    ) -> None:
        self._letter_options = DeadLetterOptions() if config.dead_letters is None else config.dead_letters
        self._options = _file_options(config, has_sink=sink is not None)
        self._replays = config.spool is not None
        spool = config.spool
        self.state = SpoolState(
            "fail" if spool is None else spool.failure, writes_ahead=spool is not None and spool.mode == "write_ahead"
        )
        self._watch = SpoolWatch(self.state, in_order=config.ordering == "per_key")
        self._sender = None if sink is None else DeadLetterSender(sink)
        self._chance = chance
        self.spool: AsyncSpool | None = None
        self.queue: DeadLetterQueue | None = None
        # How many records and letters were in the files when they were opened.
        self.found_records = self.found_letters = 0
        # Records of the spool that are dead letters now.
        self.moved = 0
        # By future of the disk: what to do when it completes, and what to do if it never does.
        self._pending: dict[Future[Any], tuple[Callable[[], None], Callable[[], None]]] = {}
        self._confirmed: list[int] = []
        self._closing = False
        self._settled = anyio.Event()
        self._scopes: list[anyio.CancelScope] = []

    async def __aenter__(self) -> Self:
        """Open the file; raises what `Spool.open` does."""
        if self._options is not None:
            self.spool = await AsyncSpool(Spool(self._options)).__aenter__()
            statistics = self.spool.statistics()
            self.found_records, self.found_letters = statistics.records, statistics.letters
            options = self._letter_options
            self.queue = DeadLetterQueue(
                self.spool.spool,
                options=options,
                alarm=None if options.alarm_depth is None else DepthAlarm(options.alarm_depth),
                on_escalation=self._escalated,
                chance=self._chance,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the file; what was handed to it is committed."""
        if self.spool is not None:
            await self.spool.__aexit__()

    def start(
        self, streams: StreamSet, *, pipeline: Callable[[str], StreamPipeline], progress: Callable[[], None]
    ) -> list[Callable[[], Any]]:
        """Begin to serve the pipelines; return the tasks that must run beside them.

        `pipeline` makes the pipeline of a stream when it is first needed.
        """
        self._streams = streams
        self._pipeline = pipeline
        self._progress = progress
        if self.queue is not None:
            # Only now: an alarm needs the hooks.
            self.queue.watch_depth()
        tasks: list[Callable[[], Any]] = []
        if self._sender is not None:
            tasks.append(self._sender.run)
        if self.spool is not None and self.queue is not None and self._options is not None:
            if self._replays:
                tasks.append(partial(self._watch.run, self.spool, clock=streams.clock))
                tasks.append(partial(self._replay, self.spool, self.queue, self._options))
            if self._letter_options.redrive:
                tasks.append(partial(self._redrive, self.queue))
        return tasks

    # To the disk

    def collect(self) -> None:
        """Take the records from the pipelines that must go to the disk; called after every change."""
        for pipeline in self._streams.take_progressed():
            if pipeline.write_ahead is not None and pipeline.write_ahead.records:
                self._write(pipeline, pipeline.write_ahead)
            if pipeline.ledger.has_pending:
                self._send(pipeline, _ledger(pipeline).take_pending_fallbacks(), 0)
        if self._confirmed and self.spool is not None:
            confirmed, self._confirmed = self._confirmed, []
            # A spool that is closed or broken delivers them once more after the restart.
            with contextlib.suppress(SpoolError):
                self.spool.confirm(confirmed)

    def _write(self, pipeline: StreamPipeline, write_ahead: WriteAhead) -> None:
        assert self.spool is not None  # noqa: S101 - write-ahead is a mode of the spool
        writes = write_ahead.take()

        def refused(why: BaseException | str) -> None:
            now = self._streams.clock()
            self._watch.refused(why, now)
            for detached, durable in writes:
                # They were accepted, perhaps acknowledged as queued: neither order nor "refuse" concerns them any more.
                if self.state.failure != "fail" and not durable and not self._closing:
                    self.state.bypassed += 1
                    pipeline.start_written(detached, now, is_stored=False)
                else:
                    write_ahead.not_written(detached, str(why), now)
            self._tell_facts(pipeline)
            self._streams.wake(pipeline.stream)

        wall_offset = self._wall_offset()
        records = [as_spooled(pipeline.stream, detached, wall_offset=wall_offset) for detached, _ in writes]
        try:
            stored = self.spool.spool.append_nowait(records, claim=True)
        except SpoolError as error:
            refused(error)
            return

        def written() -> None:
            error = stored.exception()
            if error is not None:
                refused(error)
                return
            started = 0
            self._watch.stored(self._streams.clock())
            for (detached, _), number in zip(writes, stored.result(), strict=True):
                if self._closing:
                    write_ahead.left_in_spool(detached, self._streams.clock())
                    self._release(number)
                else:
                    started += 1
                    call_when_finished(
                        pipeline.start_written(detached, self._streams.clock()), partial(self._ended, number)
                    )
            if started:
                self._streams.tell(RecordsWrittenAhead(pipeline.stream, started))
            self._tell_facts(pipeline)
            self._streams.wake(pipeline.stream)

        self._when(stored, written, partial(refused, "the disk did not answer"))

    def _settle(self, pipeline: StreamPipeline, fallbacks: Sequence[PendingFallback], place: Place | None) -> None:
        _ledger(pipeline).settle_fallbacks(fallbacks, place)
        self._tell_facts(pipeline)

    def _tell_facts(self, pipeline: StreamPipeline) -> None:
        """Give the hooks the facts that the disk decided: the stream may have nothing more to do, and so no turn."""
        for fact in pipeline.ledger.take_facts():
            self._streams.tell(fact)

    def _ended(self, number: int, result: RecordResult) -> None:
        """Confirm or release a written record in the spool, by its result."""
        if result.successful:
            self._confirmed.append(number)
        else:
            self._release(number)

    def _release(self, number: int) -> None:
        assert self.spool is not None  # noqa: S101 - the number is its
        with contextlib.suppress(SpoolError):
            self.spool.release([number])

    def _send(self, pipeline: StreamPipeline, fallbacks: Sequence[PendingFallback], choice: int) -> None:
        """Store failed records in their first, second ... destination; those that no store took have failed."""
        by_place: dict[Place | None, list[PendingFallback]] = {}
        for each in fallbacks:
            by_place.setdefault(each.destinations[choice] if choice < len(each.destinations) else None, []).append(each)
        for place, group in by_place.items():
            if place is None:
                self._settle(pipeline, group, None)
            else:
                self._store(pipeline, group, choice, place)

    def _store(self, pipeline: StreamPipeline, group: list[PendingFallback], choice: int, place: Place) -> None:
        try:
            stored = (
                self._spool_nowait(pipeline, group) if place == "spooled" else self._add_letters_nowait(pipeline, group)
            )
        except SpoolError as error:
            _log.warning("%d user records could not be %s: %s", len(group), place.replace("_", "-"), error)
            if place == "spooled":
                self._watch.refused(error, self._streams.clock())
            self._send(pipeline, group, choice + 1)
            return

        def answered() -> None:
            if place == "spooled":
                error = stored.exception()
                now = self._streams.clock()
                self._watch.stored(now) if error is None else self._watch.refused(error, now)
            refused = set() if place == "spooled" or self._sender is None else self._sender.refused(stored)
            failed = stored.exception() is not None
            taken = [each for index, each in enumerate(group) if not failed and index not in refused]
            self._send(pipeline, [each for index, each in enumerate(group) if failed or index in refused], choice + 1)
            self._settle(pipeline, taken, place)

        self._when(stored, answered, lambda: self._settle(pipeline, group, None))

    def _spool_nowait(self, pipeline: StreamPipeline, group: list[PendingFallback]) -> "Future[Any]":
        assert self.spool is not None  # noqa: S101 - the rules name no place that is not there
        wall_offset = self._wall_offset()
        records = [as_spooled(pipeline.stream, each.detached, wall_offset=wall_offset) for each in group]
        return self.spool.spool.append_nowait(records, claim=False)

    def _add_letters_nowait(self, pipeline: StreamPipeline, group: list[PendingFallback]) -> "Future[Any]":
        letters = [self._letter(pipeline.stream, each) for each in group]
        if self._sender is not None:
            return self._sender.send_nowait(letters)
        assert self.queue is not None  # noqa: S101 - as above
        return self.queue.add_nowait(letters)

    def _letter(self, stream: str, fallback: PendingFallback) -> DeadLetter:
        wall_offset = self._wall_offset()
        record = as_spooled(stream, fallback.detached, wall_offset=wall_offset)
        return new_letter(record, fallback.reason, time.time(), result=as_result(fallback), wall_offset=wall_offset)

    def _wall_offset(self) -> float:
        """Return Unix time minus the loop's time, now: in weeks the system's clock may be set."""
        return time.time() - self._streams.clock()

    def _when(self, future: "Future[Any]", answered: Callable[[], None], silent: Callable[[], None]) -> None:
        self._pending[future] = (answered, silent)
        mailbox = self.spool.mailbox if self.spool is not None else None
        if mailbox is None:
            # A task of this loop completes it.
            future.add_done_callback(self._handle)
        else:
            future.add_done_callback(lambda done: mailbox.post(partial(self._handle, done)))

    def _handle(self, future: "Future[Any]") -> None:
        entry = self._pending.pop(future, None)
        if entry is None:
            return
        entry[0]()
        if not self._pending:
            self._settled.set()
        self._progress()

    # Back from the disk

    async def _replay(self, spool: AsyncSpool, queue: DeadLetterQueue, options: SpoolOptions) -> None:
        put = ReplayPut("replay", self._streams, self._pipeline)
        # All of them now: in an outage the replay may not come to those behind many records of another stream.
        put.open_streams(spool.spool.found_streams)
        replayer = Replayer(
            spool, put, options, dead_letters=queue, on_dead_letter=self._count_dead_letter, chance=self._chance
        )
        await self._until_closing("replay", replayer.run)

    def _count_dead_letter(self, letter: DeadLetter, committed: "Future[None]") -> None:
        """Count a record of the spool as a dead letter once its letter is committed, also if the replay ends before."""

        def answered() -> None:
            if committed.exception() is not None:
                return
            self.moved += 1
            self._streams.tell(
                RecordsFinished(
                    stream=letter.stream,
                    shard_id=letter.shard_id,
                    tier=letter.tier,
                    outcome="dead_lettered",
                    reason=letter.error_code or InvalidUserRecord.__name__,
                    user_records=1,
                    user_bytes=letter.as_record().size_bytes,
                    attempts=letter.attempts,
                    age=max(0.0, time.time() - letter.first_seen),
                    kept_before=1,
                )
            )

        self._when(committed, answered, lambda: None)

    async def _redrive(self, queue: DeadLetterQueue) -> None:
        options = self._letter_options
        pace = DeliveryPace(
            records_per_second=options.redrive_records_per_second,
            bytes_per_second=_REDRIVE_BYTES_PER_SECOND,
            in_flight_records=options.redrive_in_flight_records,
            in_flight_bytes=1 << 30,
            chance=self._chance,
        )
        put = ReplayPut("redrive", self._streams, self._pipeline)
        await self._until_closing("redrive", Redriver(queue, put, pace).run)

    async def _until_closing(self, what: str, run: Callable[[], Any]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            try:
                await run()
            except ProducerClosed:
                return
            except SpoolError:
                # New records still travel. Each that must be stored will fail with its own error.
                _log.exception("the %s has stopped; make a new producer to start it again", what)

    # The end

    def stop_replays(self) -> None:
        """Replay and redrive nothing more, because the producer closes."""
        for scope in self._scopes:
            scope.cancel()

    async def finish(self) -> None:
        """Wait until all records that were given up are stored; for 5 s at most, even if cancelled."""
        # First: a record that comes back from the disk must not start its journey any more.
        self._closing = True
        self.stop_replays()
        await shielded(self._finish)

    async def _finish(self) -> None:
        with anyio.move_on_after(FINISH_SECONDS):
            self.collect()
            while self._pending:
                self._settled = anyio.Event()
                await self._settled.wait()
                self.collect()
        while self._pending:
            future = next(iter(self._pending))
            answered, silent = self._pending.pop(future)
            (answered if future.done() else silent)()
        self.collect()

    def _escalated(self, alarm: DeadLetterAlarm) -> None:
        """Give the hooks a fact, on the loop; called on the spool's thread."""
        if self.spool is not None:
            self.spool.mailbox.post(partial(self._streams.tell, alarm))


def _ledger(pipeline: StreamPipeline) -> DurableLedger:
    ledger = pipeline.ledger
    assert isinstance(ledger, DurableLedger)  # noqa: S101 - every stream of a producer with a durable store has one
    return ledger


def _file_options(config: Config, *, has_sink: bool) -> SpoolOptions | None:
    """Return the file to open, None if a sink takes everything."""
    if config.spool is not None:
        return config.spool
    letters = config.dead_letters
    if letters is None or letters.path is None:
        if has_sink:
            return None
        message = (
            "dead_letters has no place: give it a path, configure a spool, or give the producer a dead_letter_sink"
        )
        raise ConfigError(message)
    return SpoolOptions(path=letters.path, max_dead_letter_bytes=letters.max_bytes)


def as_spooled(stream: str, detached: DetachedUserRecord, *, wall_offset: float) -> SpooledRecord:
    """Return what the spool stores. `wall_offset` is Unix time minus the producer's time."""
    record = detached.user_record
    note = note_of(detached)
    metadata = detached.outcome.metadata
    return spooled_record_of(
        stream,
        record.partition_key,
        record.data,
        accepted_at=detached.arrived_at + wall_offset,
        explicit_hash_key=record.explicit_hash_key,
        flow=None if note is None else note.flow,
        tier=detached.tier,
        metadata=None if metadata is None else metadata.get(detached.index),
    )


def as_result(fallback: PendingFallback) -> RecordResult:
    """Return the failed result for a dead letter."""
    history = fallback.detached.history
    earlier = () if history is None else history.to_tuple()
    return RecordResult(False, fallback.predicted_shard, None, (*earlier, fallback.attempt))  # noqa: FBT003


class ReplayPut:
    """Puts stored user records into their pipelines again: a `SharedPut`, whose tickets are deliveries."""

    def __init__(self, origin: Origin, streams: StreamSet, pipeline: Callable[[str], StreamPipeline]) -> None:
        self._origin: Origin = origin
        self._streams = streams
        self._pipeline = pipeline
        self._put_to: set[str] = set()

    def __call__(
        self, record: SpooledRecord, finished: Finished, ticket: ResultHandle | None = None, /
    ) -> ResultHandle:
        """Put `record`; raises as `SharedPut` documents."""
        pipeline, user_record = self._pipeline(record.stream), _user_record_of(record)
        try:
            arrived_at = None if ticket is None else pipeline.reaggregator.arrival_with(user_record, ticket)
            now = self._streams.clock() if arrived_at is None else arrived_at
            delivery = pipeline.put_record(user_record, now, self._origin)
        finally:
            if pipeline.attention:
                # Also if there is no room for it: those in the batch were put.
                self._streams.wake(record.stream)
        self._put_to.add(record.stream)
        call_when_finished(delivery, finished)
        return delivery

    def open_streams(self, streams: Iterable[str]) -> None:
        """Make the pipelines of these streams, so that the producer knows them before their records are put."""
        for stream in sorted(streams):
            # A record that no stream takes becomes a dead letter when it is put.
            with contextlib.suppress(InvalidUserRecord, ProducerClosed):
                _ = self._pipeline(stream)

    def joins(self, record: SpooledRecord, ticket: ResultHandle, /) -> bool:
        """Return True if `record`, put now, would share the result of the one with this ticket."""
        pipeline = self._pipeline(record.stream)
        arrived_at = pipeline.reaggregator.arrival_with(_user_record_of(record), ticket)
        if pipeline.attention:
            self._streams.wake(record.stream)
        return arrived_at is not None

    def send_now(self) -> None:
        """Let the records that were put wait for no further records."""
        streams, self._put_to = self._put_to, set()
        for stream in streams:
            self._pipeline(stream).reaggregator.release_returned(self._streams.clock())
            self._streams.wake(stream)


def _user_record_of(record: SpooledRecord) -> UserRecord:
    """Return the user record to put again."""
    return UserRecord(
        record.partition_key, record.data, record.explicit_hash_key, record.flow, record.tier, record.metadata
    )
