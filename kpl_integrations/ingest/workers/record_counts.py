"""What became of the records that a worker acknowledged: counters in memory that outlives its process.

Five counters for each worker number. Only its process writes them, and only while it runs. The supervisor reads them
when that process is dead, so no lock is needed:

    acknowledged   records of the requests that were admitted; counted before any answer to them is written
    stored         Kinesis has stored them
    kept           the spool or the dead letters have them
    reported       they failed, which the metrics, the log, or the answer to a request with ack=delivered say
    stored_later   Kinesis has stored them, and they were counted as kept before, perhaps by an earlier process

Each acknowledged record moves exactly one of the middle three, once: when its result is first known. So

    lost = acknowledged - stored - kept - reported

is what a dead worker had acknowledged and is nowhere. It includes records of requests without an answer yet, and
records that Kinesis has stored whose answer the worker has not read. It is never too low.

A row leaves the files after its record was counted in `stored_later`. So of the records that the next process does not
find in the files, Kinesis has at most so many.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import MutableSequence
from pathlib import Path
from typing import Final, Self

import msgspec

from kpl_core.hooks import Fact, RecordsFinished, RecordsWrittenAhead

_ACKNOWLEDGED: Final = 0
_STORED: Final = 1
_KEPT: Final = 2
_REPORTED: Final = 3
_STORED_LATER: Final = 4
_COUNTERS: Final = 5
_PLACES: Final = {"delivered": _STORED, "spooled": _KEPT, "dead_lettered": _KEPT, "failed": _REPORTED}


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """The counters at one instant, since the first process of a worker number started."""

    acknowledged: int = 0
    stored: int = 0
    kept: int = 0
    reported: int = 0
    stored_later: int = 0

    @property
    def open(self) -> int:
        """The acknowledged records whose result is not known. If the process is dead, they are lost."""
        return self.acknowledged - self.stored - self.kept - self.reported

    def since(self, earlier: "Counts") -> "Counts":
        """Return what was added since `earlier`."""
        return Counts(
            self.acknowledged - earlier.acknowledged,
            self.stored - earlier.stored,
            self.kept - earlier.kept,
            self.reported - earlier.reported,
            self.stored_later - earlier.stored_later,
        )


class RecordCounts:
    """The counters of this process. It is a hook of the producer; the gateway's admission calls `acknowledge`."""

    __slots__ = ("_counters",)

    def __init__(self, counters: MutableSequence[int] | memoryview) -> None:
        self._counters = counters

    @classmethod
    def of_worker(cls, descriptor: int) -> Self:
        """Return the counters in the memory that `CountsMemory` describes, and close the descriptor."""
        memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        return cls(memoryview(memory).cast("Q"))

    def acknowledge(self, records: int) -> None:
        """Count admitted records. Call it before the answer to their request is written."""
        self._counters[_ACKNOWLEDGED] += records

    def __call__(self, fact: Fact) -> None:
        """Count records whose result is first known, and those that Kinesis stores after a file had them."""
        if isinstance(fact, RecordsFinished):
            self._counters[_PLACES[fact.outcome]] += fact.user_records - fact.kept_before
            if fact.outcome == "delivered":
                self._counters[_STORED_LATER] += fact.kept_before
        elif isinstance(fact, RecordsWrittenAhead):
            self._counters[_KEPT] += fact.user_records

    def now(self) -> Counts:
        """Return the counters."""
        return Counts(*self._counters[:_COUNTERS])


class CountsMemory:
    """The supervisor's side: one page of memory for a worker number. Its processes, one after the other, map it.

    The page is allocated whole when this is made. A file with a hole would be allocated at the first write, and a
    full tmpfs would end the worker by SIGBUS then.

    Raises:
        OSError: there is no memory, or no file can be made.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.descriptor = os.memfd_create("kpl-worker-counts", os.MFD_CLOEXEC)
        else:
            self.descriptor, path = tempfile.mkstemp(prefix="kpl-worker-counts-")
            Path(path).unlink()
        try:
            # Written, not only extended: so the system has allocated it.
            left = mmap.PAGESIZE
            while left:
                # A part of it, if there is no room for the rest; the next call raises.
                left -= os.write(self.descriptor, bytes(left))
            self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        except OSError:
            os.close(self.descriptor)
            raise

    def read(self) -> Counts:
        """Return the counters. They are exact while no process of this worker runs."""
        return Counts(*memoryview(self._memory).cast("Q")[:_COUNTERS])

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.descriptor)
