"""Moves user records between the pipelines and where they are kept: the spool, the dead letters.

The pipelines say what is to be written and what is leaving; here are the files, the futures and the
tasks that give back what is kept. Records go to the disk in one append for all that a turn of the
loop brought, and nothing is called kept before the disk has it.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import anyio

from kpl_core.durability.dead_letters import (
    AlarmChange,
    DeadLetterQueue,
    DeadLetterSink,
    DepthAlarm,
    Escalation,
    RedrivePolicy,
    Redriver,
)
from kpl_core.durability.dead_letters.dead_letter_queue import producer_version
from kpl_core.durability.keeping_ledger import Leaving
from kpl_core.durability.reliable_pipeline import ReliableStreamPipeline
from kpl_core.durability.replay import DeliveryPace, Replayer
from kpl_core.durability.spool import AsyncSpool, DeadLetter, Spool, SpoolError
from kpl_core.durability.spool.async_spool import shielded
from kpl_core.durability.spool.envelope import dead_letter_of, letter_id
from kpl_core.errors import ConfigError, ProducerClosed
from kpl_core.hooks import DeadLetterAlarm, Fact
from kpl_core.options.config import Config
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.producer.kept_record import as_result, as_spooled
from kpl_core.producer.letter_box import LetterBox
from kpl_core.producer.put_back import PutBack
from kpl_core.producer.result_callback import ResultCallback
from kpl_core.records.kinesis_record import MovingUserRecord
from kpl_core.records.outcome import Origin
from kpl_core.records.record_result import Place, RecordResult

__all__ = ["Keeping"]

_log: Final = logging.getLogger(__name__)
# How long a close waits for disk and sink after the last request.
FINISH_SECONDS: Final = 5.0
_REDRIVE_BYTES_PER_SECOND: Final = 1e9


class Keeping:
    """Everything a producer keeps; an async context manager. One for each producer, in its loop."""

    def __init__(
        self,
        config: Config,
        *,
        sink: DeadLetterSink | None,
        chance: Callable[[], float],
        tell: Callable[[Fact], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._letter_options = DeadLetterOptions() if config.dead_letters is None else config.dead_letters
        self._options = _file_options(config, has_sink=sink is not None)
        self._gives_back = config.spool is not None
        self._takes_letters = config.dead_letters is not None
        self._box = None if sink is None else LetterBox(sink)
        self._chance = chance
        self._tell = tell
        self._wall_clock = wall_clock
        self._version = producer_version()
        self.spool: AsyncSpool | None = None
        self.queue: DeadLetterQueue | None = None
        # What the files held when they were opened.
        self.found_records = self.found_letters = 0
        self._replayed: PutBack | None = None
        # What waits for the disk: what to do when it answered, and what if it never does.
        self._pending: dict[Future[Any], tuple[Callable[[], None], Callable[[], None]]] = {}
        self._confirmed: list[int] = []
        self._closing = False
        self._settled = anyio.Event()
        self._scopes: list[anyio.CancelScope] = []

    @property
    def moved(self) -> int:
        """Return how many replayed records went to the dead letters without entering a pipeline."""
        return 0 if self._replayed is None else self._replayed.refused

    async def __aenter__(self) -> Self:
        """Open the file; raises what `Spool.open` does."""
        if self._options is not None:
            self.spool = await AsyncSpool(Spool(self._options)).__aenter__()
            statistics = self.spool.statistics()
            self.found_records, self.found_letters = statistics.records, statistics.letters
            options = self._letter_options
            self.queue = DeadLetterQueue(
                self.spool.spool,
                policy=RedrivePolicy(
                    base_seconds=options.redrive_base_seconds,
                    cap_seconds=options.redrive_cap_seconds,
                    max_redrives=options.max_redrives,
                ),
                alarm=None if options.alarm_depth is None else DepthAlarm(options.alarm_depth),
                on_escalation=self._escalated,
                wall_clock=self._wall_clock,
                chance=self._chance,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file; what was handed to it is committed."""
        if self.spool is not None:
            await self.spool.__aexit__(kind, error, traceback)

    def start(
        self,
        *,
        progressed: Callable[[], Sequence[ReliableStreamPipeline]],
        pipeline: Callable[[str], ReliableStreamPipeline],
        wake: Callable[[str], None],
        clock: Callable[[], float],
        progress: Callable[[], None],
    ) -> list[Callable[[], Any]]:
        """Begin to serve the pipelines; return the tasks that must run beside them.

        `progressed` returns those in which something happened since it was last called.
        """
        self._progressed = progressed
        self._pipeline = pipeline
        self._wake = wake
        self._clock = clock
        self._progress = progress
        if self.queue is not None:
            # Not before there is somebody to tell.
            self.queue.watch_depth()
        tasks: list[Callable[[], Any]] = []
        if self._box is not None:
            tasks.append(self._box.run)
        if self.spool is not None and self._gives_back:
            tasks.append(self._replay)
        if self.queue is not None and self._letter_options.redrive:
            tasks.append(self._redrive)
        return tasks

    # To the disk

    def collect(self) -> None:
        """Take from the pipelines what the disk must know; called after every change."""
        for pipeline in self._progressed():
            if pipeline.has_work_for_the_disk:
                if writes := pipeline.take_writes():
                    self._write_ahead(pipeline, writes)
                if leaving := pipeline.take_leaving():
                    self._send(pipeline, leaving, 0)
        if self._confirmed and self.spool is not None:
            confirmed, self._confirmed = self._confirmed, []
            # A spool that is closed or broken delivers them once more after the restart.
            with contextlib.suppress(SpoolError):
                self.spool.confirm(confirmed)

    def _write_ahead(self, pipeline: ReliableStreamPipeline, writes: list[MovingUserRecord]) -> None:
        assert self.spool is not None  # noqa: S101 - the mode of a spool

        def refused(why: str) -> None:
            self._not_written(pipeline, writes, why)

        wall_offset = self._wall_offset()
        records = [as_spooled(pipeline.stream, moving, wall_offset=wall_offset) for moving in writes]
        try:
            stored = self.spool.spool.append_nowait(records, claim=True)
        except SpoolError as error:
            refused(str(error))
            return
        self._when(stored, lambda: self._written(pipeline, writes, stored), partial(refused, "the disk did not answer"))

    def _written(
        self, pipeline: ReliableStreamPipeline, writes: list[MovingUserRecord], stored: "Future[range]"
    ) -> None:
        error = stored.exception()
        if error is not None:
            self._not_written(pipeline, writes, str(error))
            return
        assert self.spool is not None  # noqa: S101 - it stored them
        for moving, number in zip(writes, stored.result(), strict=True):
            if self._closing:
                pipeline.wait_in_spool(moving, self._clock())
                self._release(number)
            else:
                ResultCallback(pipeline.written(moving, self._clock()), partial(self._ended, number))
        self._wake(pipeline.stream)

    def _not_written(self, pipeline: ReliableStreamPipeline, writes: Sequence[MovingUserRecord], why: str) -> None:
        for moving in writes:
            pipeline.not_written(moving, why, self._clock())
        self._tell_facts(pipeline)

    def _left(self, pipeline: ReliableStreamPipeline, leaving: Sequence[Leaving], place: Place | None) -> None:
        pipeline.left(leaving, place)
        self._tell_facts(pipeline)

    def _tell_facts(self, pipeline: ReliableStreamPipeline) -> None:
        """Tell the hooks what the disk decided: the stream itself may have nothing more to do, and so no turn."""
        for fact in pipeline.take_facts():
            self._tell(fact)

    def _ended(self, number: int, result: RecordResult) -> None:
        """Hear of the result of a record that was written ahead."""
        if result.successful:
            self._confirmed.append(number)
        else:
            self._release(number)

    def _release(self, number: int) -> None:
        assert self.spool is not None  # noqa: S101 - the number is its
        with contextlib.suppress(SpoolError):
            self.spool.release([number])

    def _send(self, pipeline: ReliableStreamPipeline, leaving: Sequence[Leaving], choice: int) -> None:
        """Store what is leaving in its first, second ... place; what no place took has failed."""
        by_place: dict[Place | None, list[Leaving]] = {}
        for each in leaving:
            by_place.setdefault(each.places[choice] if choice < len(each.places) else None, []).append(each)
        for place, group in by_place.items():
            if place is None:
                self._left(pipeline, group, None)
            else:
                self._store(pipeline, group, choice, place)

    def _store(self, pipeline: ReliableStreamPipeline, group: list[Leaving], choice: int, place: Place) -> None:
        try:
            stored = self._spool_nowait(pipeline, group) if place == "spooled" else self._bury_nowait(pipeline, group)
        except SpoolError as error:
            _log.warning("%d user records could not be %s: %s", len(group), place.replace("_", "-"), error)
            self._send(pipeline, group, choice + 1)
            return

        def answered() -> None:
            refused = set() if place == "spooled" or self._box is None else self._box.refused(stored)
            failed = stored.exception() is not None
            taken = [each for index, each in enumerate(group) if not failed and index not in refused]
            self._send(pipeline, [each for index, each in enumerate(group) if failed or index in refused], choice + 1)
            self._left(pipeline, taken, place)

        self._when(stored, answered, lambda: self._left(pipeline, group, None))

    def _spool_nowait(self, pipeline: ReliableStreamPipeline, group: list[Leaving]) -> "Future[Any]":
        assert self.spool is not None  # noqa: S101 - the rules name no place that is not there
        wall_offset = self._wall_offset()
        records = [as_spooled(pipeline.stream, each.moving, wall_offset=wall_offset) for each in group]
        return self.spool.spool.append_nowait(records, claim=False)

    def _bury_nowait(self, pipeline: ReliableStreamPipeline, group: list[Leaving]) -> "Future[Any]":
        letters = [self._letter(pipeline.stream, each) for each in group]
        if self._box is not None:
            return self._box.send_nowait(letters)
        assert self.queue is not None  # noqa: S101 - as above
        return self.queue.bury_nowait(letters)

    def _letter(self, stream: str, leaving: Leaving) -> DeadLetter:
        wall_offset = self._wall_offset()
        return dead_letter_of(
            as_spooled(stream, leaving.moving, wall_offset=wall_offset),
            id=letter_id(self._wall_clock(), os.urandom(8)),
            reason=leaving.reason,
            producer_version=self._version,
            result=as_result(leaving),
            wall_offset=wall_offset,
        )

    def _wall_offset(self) -> float:
        """Return Unix time minus the loop's, as of now: the clock of a process that runs for weeks is set meanwhile."""
        return self._wall_clock() - self._clock()

    def _when(self, future: "Future[Any]", answered: Callable[[], None], silent: Callable[[], None]) -> None:
        self._pending[future] = (answered, silent)
        mailbox = self.spool.mailbox if self.spool is not None else None
        if mailbox is None:
            # Completed by a task of this loop.
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

    def _put_back(self, origin: Origin) -> PutBack:
        return PutBack(origin, pipeline=self._pipeline, wake=self._wake, clock=self._clock)

    async def _replay(self) -> None:
        assert self.spool is not None  # noqa: S101 - started only with both
        assert self.queue is not None  # noqa: S101
        assert self._options is not None  # noqa: S101
        put = self._replayed = self._put_back("replay")
        replayer = Replayer(self.spool, put, self._options, dead_letters=self.queue, chance=self._chance)
        await self._until_closing("replay", replayer.run)

    async def _redrive(self) -> None:
        assert self.queue is not None  # noqa: S101 - started only with it
        options = self._letter_options
        pace = DeliveryPace(
            records_per_second=options.redrive_records_per_second,
            bytes_per_second=_REDRIVE_BYTES_PER_SECOND,
            in_flight_records=options.redrive_in_flight_records,
            in_flight_bytes=1 << 30,
            chance=self._chance,
        )
        await self._until_closing("redrive", Redriver(self.queue, self._put_back("redrive"), pace).run)

    async def _until_closing(self, what: str, run: Callable[[], Any]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            try:
                await run()
            except ProducerClosed:
                return
            except SpoolError:
                # Fresh records still go their way; each that must be kept will say that it cannot.
                _log.exception("the %s has stopped until this producer is made anew", what)

    # The end

    def stop_giving_back(self) -> None:
        """Replay and redrive nothing more, because the producer closes."""
        for scope in self._scopes:
            scope.cancel()

    async def finish(self) -> None:
        """Wait until all that was given up is where it will be kept; for 5 s at most, even if cancelled."""
        # At once: what comes back from the disk must not begin a journey that was ended.
        self._closing = True
        self.stop_giving_back()
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

    def _escalated(self, escalation: Escalation) -> None:
        """Tell the hooks, on the loop; called on the spool's thread."""
        fact = DeadLetterAlarm(escalation.change is AlarmChange.RAISED, escalation.depth, escalation.threshold)
        if self.spool is not None:
            self.spool.mailbox.post(partial(self._tell, fact))


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
