"""A producer with dead letters in the world, in a spool's file or in one of their own; all by one seed.

It is the story of the spool, with faults that no retry cures. The producer redrives letters by itself, or does not.
After the story an operator redrives what is left, as `kpl dlq redrive` does, in the file and in the copy that the power
cut left.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kpl_core import Config, DeadLetterOptions, Producer, ProducerReport
from kpl_core.durability.dead_letters import DeadLetterQueue, LetterReader, Redriver
from kpl_core.durability.spool import AsyncSpool, LetterFilter, Spool
from kpl_core.durability.spool.tables import StoredLetter
from kpl_core.records.record_result import INCURABLE
from kpl_integrations.cli.spool_file.dead_letters import _pace, _put_into, options_of
from tests.world.disk import Disk
from tests.world.invariants import STALLED_SECONDS, Run
from tests.world.network import WHOLE, Less, World
from tests.world.producer_story import STREAM
from tests.world.service_faults import SERVICE_FAULTS
from tests.world.spool_story import SpoolStory, run_spool_story

EVERY_LETTER = LetterFilter()
OPERATORS_RATE = 1_000.0
FINAL_FAULTS = [name for name, fault in SERVICE_FAULTS.items() if fault.is_final]


class LettersStory(SpoolStory):
    """The story."""

    possible_faults = tuple(SERVICE_FAULTS)

    def __init__(self, world: World, disk: Disk, folder: Path) -> None:
        super().__init__(world, disk, folder)
        chance = world.chance
        # More often than by chance alone, because they are what makes letters.
        self.service_faults = list(dict.fromkeys([*self.service_faults, *world.drawn(FINAL_FAULTS, 0.4)]))
        self.has_spool = chance.random() < 0.7
        if not self.has_spool:
            self.writes_ahead, self.failure = False, "fail"
        self.redrives = chance.random() < 0.7
        self.letters = DeadLetterOptions(
            redrive=self.redrives,
            redrive_base_seconds=chance.choice([0.5, 5.0]),
            redrive_cap_seconds=20.0,
            max_redrives=chance.choice([None, 1, 2]),
        )
        self.fails_if_throttled = chance.random() < 0.3
        # How often the producer has sent each letter.
        self.redriven: Counter[int] = Counter()

    def config(self, path: Path) -> Config:
        config = dataclasses.replace(super().config(path), fail_if_throttled=self.fails_if_throttled)
        if self.has_spool:
            return dataclasses.replace(config, dead_letters=self.letters)
        own = msgspec.structs.replace(self.letters, path=path)
        return dataclasses.replace(config, spool=None, dead_letters=own)

    @contextlib.contextmanager
    def counted_redrives(self) -> Iterator[None]:
        """Count the letters that are sent in this block."""
        put_one = Redriver._put_one  # noqa: SLF001 - the one place that sends

        def counted_put_one(redriver: Redriver, stored: StoredLetter, *arguments: Any) -> None:
            put_one(redriver, stored, *arguments)
            # Otherwise the producer took no more records.
            self.redriven[stored.number] += stored.number in redriver._in_flight  # noqa: SLF001

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Redriver, "_put_one", counted_put_one)
            yield

    async def tell(self) -> None:
        with self.counted_redrives():
            await super().tell()

    async def settled(self, producer: Producer) -> list[str]:
        """Wait until the letters are delivered that a retry can cure."""
        false = await super().settled(producer)
        if not self.redrives or self.letters.max_redrives is not None:
            return false
        queue, until = producer.dead_letters, self.world.now() + self.letters.redrive_cap_seconds + STALLED_SECONDS
        assert queue is not None
        while left := await self._curable(queue):
            if self.world.now() > until:
                return [*false, f"{left} letters are not redriven after the last fault: {producer.report()}"]
            await asyncio.sleep(1.0)
        return false

    @staticmethod
    async def _curable(queue: DeadLetterQueue) -> int:
        counts = await asyncio.wrap_future(queue.count_nowait(EVERY_LETTER))
        return sum(count for reason, count in counts.items() if reason not in INCURABLE)

    def after_close(self, report: ProducerReport) -> None:
        super().after_close(report)
        with LetterReader(self.path) as letters:
            there = sum(letters.count(EVERY_LETTER).values())
        if there != report.dead_lettered:
            self.false.append(f"{there} letters in the file, and {report}")
        most = self.letters.max_redrives
        # Otherwise the disk may not have taken that one was sent.
        if most is not None and not self.disk_faults and max(self.redriven.values(), default=0) > most:
            self.false.append(f"max_redrives is {most}, and letters were sent so often: {self.redriven.most_common(3)}")
        if (failed := report.failed_total) and not self.disk_faults:
            self.false.append(f"{failed} failed and are no letters, and the disk had no fault: {dict(report.failed)}")

    async def replayed(self, path: Path) -> None:
        """Replay what is in the file, then redrive as an operator does: nothing is left."""
        self.letters = DeadLetterOptions(redrive=False)
        self.fails_if_throttled = False
        await super().replayed(path)
        async with AsyncSpool(Spool(options_of(path))) as spool:
            queue = DeadLetterQueue(spool.spool)
            async with Producer(Config(region="us-east-1"), transport=self.transport) as producer:
                redriver = Redriver(queue, _put_into(producer, lambda _: None), _pace(OPERATORS_RATE))
                done = await redriver.redrive(EVERY_LETTER)
        if done.delivered != done.total or queue.depth:
            self.false.append(f"an operator has redriven {done}, and {queue.depth} letters are left")
        letters = [put for put, result in self.ledger.with_results() if result.kept == "dead_lettered"]
        if path == self.path:
            self.arrived(f"dead letters of {STREAM}", letters)


def run_letters_story(seed: int, less: Less = WHOLE) -> Run:
    """Run the story of a seed."""
    return run_spool_story(seed, less, LettersStory)
