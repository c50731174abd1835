"""The inbox between the threads that put and the loop: what is in it, and how much room that takes.

With the kernels, the puts of a burst wait in batches of their stream (`_put_batch.c`), as those of the loop do. Up to
128 puts are made in C, and the loop puts their records side by side. Each is checked and appended in one step:
meanwhile no other thread runs, and no signal is handled.

Only a batch in `batches` is filled. It stands there before it stands in the queue, and takes records once the loop is
certain to look at the queue again. A put that is made in Python appends to the queue, and then removes the batch of its
stream from `batches`: so the puts of one thread keep their order. The loop removes a batch when it takes it.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import repeat, starmap
from typing import Final

import msgspec

from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.open_record import BATCH, BATCH_BYTES, COMPILED, PutBatch, Room
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.records.outcome import Outcome, ResultHandle
from kpl_core.records.user_record import UserRecord, check_user_record

# How many records the loop takes in one step.
STEP_RECORDS: Final = 250
# To open a batch costs what some puts in C save. So a few puts, and those of large records, have none. And a program
# that puts to hundreds of streams in turn has batches of some of them.
BURST: Final = 8
MOST_BATCHED_BYTES: Final = BATCH_BYTES // BURST
MOST_BATCHES: Final = 16


class QueuedPair(msgspec.Struct, gc=False, eq=False):
    """A put of key and data in the inbox, which the loop puts together with its neighbours of the same stream.

    The garbage collector does not track it. To look through a full inbox took it a sixth of the time of all puts.
    """

    handle: ResultHandle
    size_bytes: int
    stream: str
    partition_key: str
    data: bytes


class QueuedRecord(msgspec.Struct, eq=False):
    """Any other put in the inbox, which the loop makes alone. Without a record it is a reservation."""

    handle: ResultHandle
    size_bytes: int
    stream: str = ""
    record: UserRecord | None = None
    # That of the put, if a hook asks for it.
    context: Context | None = None


class QueuedBatch(msgspec.Struct, eq=False):
    """A batch in the inbox."""

    entrance: "BatchEntrance"
    batch: PutBatch
    # Known when the loop has taken it.
    size_bytes: int = 0


QueuedPut = QueuedPair | QueuedRecord
Queued = QueuedPut | QueuedBatch


class BatchEntrance:
    """The way of a stream's batches into its pipeline, which a batch asks as it would ask that."""

    def __init__(self, pipeline: StreamPipeline) -> None:
        self.pipeline = pipeline
        self.new_outcome: Callable[[], Outcome] = Outcome
        self.fail_put = pipeline.fail_put
        self.attend = pipeline.attend
        # False if the stream takes smaller records since the batch was opened.
        self._are_checked = True

    def put(self, batch: PutBatch, now: float) -> None:
        """Put the records of a batch, in exchange for room in the buffer that was taken for them."""
        pipeline = self.pipeline
        self._are_checked = batch.most <= pipeline.max_record_bytes
        try:
            pipeline.stages.batch.drain()
            # Something else than a put has closed a record, perhaps, such as a new shard map.
            pipeline.attend(now)
        finally:
            batch.drain(now)

    def all_pass(self) -> bool:
        """Return True if no record needs a look at it."""
        return self._are_checked and self.pipeline.all_pass()

    def place(self, key: str, data: bytes, explicit: str | None, flow: str | None, now: float) -> ResultHandle:
        """Put a record that opens or closes an aggregated record, or needs a look at it.

        Raises:
            InvalidUserRecord: it is above the limit that the stream has now.
        """
        if not self._are_checked:
            check_user_record(UserRecord(key, data, explicit), max_record_bytes=self.pipeline.max_record_bytes)
        return self.pipeline.place(key, data, explicit, flow, now)


class Inbox:
    """User records that threads have put, in their order. Threads append without a lock, and the loop takes."""

    def __init__(self, limit: BufferLimit) -> None:
        self._limit = limit
        self.queue: deque[Queued] = deque()
        # The records in it and their bytes, below zero: both count as outstanding, and the loop moves them to the books
        # of the buffer. A put that the loop takes at once is counted too late, and so until the queue is empty again.
        # Threads that put at the same instant may each take the last room, and so exceed it by one record each.
        self.room = Room()
        self.room.free_records = self.room.free_bytes = 0
        # How many the loop has taken.
        self.taken = 0
        # Those that the put method in C fills, by stream.
        self.batches: dict[str, PutBatch] = {}
        self._entrances: dict[str, BatchEntrance] = {}

    @property
    def records(self) -> int:
        """Return how many records are in it."""
        return -self.room.free_records if self.queue else 0

    @property
    def size_bytes(self) -> int:
        """Return the bytes of key and data of these."""
        return -self.room.free_bytes if self.queue else 0

    def append(self, queued: QueuedPut) -> None:
        """Append a put that was made in Python."""
        self.queue.append(queued)
        self.room.free_records -= 1
        self.room.free_bytes -= queued.size_bytes
        # After the append, so that no later put comes before this one.
        _ = self.batches.pop(queued.stream, None)

    def take_back(self, queued: QueuedPut) -> bool:
        """Remove a put. Return False if the loop has taken it."""
        try:
            self.queue.remove(queued)
        except ValueError:
            return False
        self.room.free_records += 1
        self.room.free_bytes += queued.size_bytes
        return True

    def append_batch(self, pipeline: StreamPipeline, handle: type[ResultHandle]) -> PutBatch:
        """Append a batch for the next puts to a stream. It takes records once the caller sets its `limit`."""
        stream, stages = pipeline.stream, pipeline.stages
        entrance = self._entrances.get(stream)
        if entrance is None:
            entrance = self._entrances[stream] = BatchEntrance(pipeline)
        batch = PutBatch(entrance, stages.router, stages.buffer_limit, handle, Outcome(), self.room)
        batch.most, batch.limit = pipeline.max_record_bytes, 0
        self.batches[stream] = batch
        self.queue.append(QueuedBatch(entrance, batch))
        return batch

    def take(self) -> list[Queued]:
        """Take the next records, and count their room in the buffer's books. No thread fills their batches any more."""
        part: list[Queued] = []
        records = 0
        # At the end of the queue `popleft` raises.
        with contextlib.suppress(IndexError):
            for queued in starmap(self.queue.popleft, repeat((), STEP_RECORDS)):
                part.append(queued)
                if COMPILED:
                    records += self._close(queued) if isinstance(queued, QueuedBatch) else 1
                    if records > STEP_RECORDS - BATCH:
                        # The next one may be in a full batch.
                        break
        records = records if COMPILED else len(part)
        size_bytes = sum([queued.size_bytes for queued in part])
        self._limit.release(records=-records, size_bytes=-size_bytes)
        room = self.room
        room.free_records = room.free_records + records if self.queue else 0
        room.free_bytes = room.free_bytes + size_bytes if self.queue else 0
        self.taken += records
        return part

    def _close(self, queued: QueuedBatch) -> int:
        """Let no thread put into a batch any more, and return how many records it has."""
        batch, stream = queued.batch, queued.entrance.pipeline.stream
        if self.batches.get(stream) is batch:
            # A put made in Python may have removed it meanwhile, and another one may have opened the next: that is in
            # the queue too, and is filled no more.
            _ = self.batches.pop(stream, None)
        queued.size_bytes = batch.bytes
        return batch.count
