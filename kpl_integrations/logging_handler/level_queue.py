"""The bounded queue between the threads that log and the sender: a deque for each class of level, one bound for all.

It never holds more records or bytes than allowed. Each accepted record is taken or evicted, exactly once. No record
is evicted for one of a lower class, so ERROR and above stay while anything below them is queued.

It reads no clock and takes no lock: its owner holds one. A signal handler may raise wherever a function is called. So
`put` changes the counts between two calls, and the entries after them.
"""

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from kpl_integrations.logging_handler.entry import Encoded, Entry, entry_size
from kpl_integrations.logging_handler.formatter import LargeLine

# Why a record did not arrive, beside the error codes of the producer (Expired, Shutdown, Unknown, ...).
FULL: Final = "Full"
EVICTED: Final = "Evicted"
CLOSED: Final = "Closed"
FORMAT_ERROR: Final = "FormatError"
SENDER_FAILED: Final = "SenderFailed"
SHUTDOWN: Final = "Shutdown"


class LogCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of log records since the handler was made, in this process.

    `emitted = delivered + kept + dropped + buffered`, always. A record that was split counts once, and as dropped
    if one of its pieces was. The handler's own notices are not counted. `Unknown` among the reasons means sent and
    never answered, so it may be stored. `kept` is in the spool or among the dead letters.
    """

    emitted: int
    delivered: int
    kept: int = 0
    dropped: Mapping[str, int]
    buffered: int

    @property
    def dropped_total(self) -> int:
        """Return how many records were dropped, for any reason."""
        return sum(self.dropped.values())


class OverflowRule(NamedTuple):
    """Which records are evicted or refused when the queue is full."""

    # The lowest level of each class except the first; a class may be evicted for a higher one.
    thresholds: tuple[int, ...]
    # Evict records of the new record's own class too; otherwise refuse the new record.
    evicts_own_class: bool
    # Evict the newest record of a class first, otherwise the oldest.
    newest_first: bool


OVERFLOW_RULES: Final[Mapping[str, OverflowRule]] = MappingProxyType(
    {
        "drop_oldest": OverflowRule((logging.ERROR,), evicts_own_class=True, newest_first=False),
        "drop_newest": OverflowRule((logging.ERROR,), evicts_own_class=False, newest_first=True),
        "drop_lowest_level": OverflowRule(
            (logging.INFO, logging.WARNING, logging.ERROR), evicts_own_class=True, newest_first=False
        ),
        # After the wait.
        "block": OverflowRule((logging.ERROR,), evicts_own_class=False, newest_first=True),
        # When the disk is slower than the log.
        "spool": OverflowRule((logging.ERROR,), evicts_own_class=True, newest_first=False),
        "dlq": OverflowRule((logging.ERROR,), evicts_own_class=True, newest_first=False),
    }
)


class _LevelClass:
    """The records of one class, in the order of arrival; `left` have left at the front."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.entries: deque[Entry] = deque()
        self.left = 0
        self.size_bytes = 0


class _ClassOfLevel(dict[int, _LevelClass]):
    """Maps each level to its class, on first use."""

    def __init__(self, thresholds: tuple[int, ...], classes: list[_LevelClass]) -> None:
        super().__init__()
        self._thresholds = thresholds
        self._classes = classes

    def __missing__(self, level: int) -> _LevelClass:
        found = self[level] = self._classes[sum(level >= threshold for threshold in self._thresholds)]
        return found


class LevelQueue:
    """A queue of at most `max_records` formatted records and `max_bytes` together."""

    def __init__(self, *, max_records: int, max_bytes: int, rule: OverflowRule) -> None:
        self._rule = rule
        self._classes = [_LevelClass(rank) for rank in range(len(rule.thresholds) + 1)]
        self._class_of = _ClassOfLevel(rule.thresholds, self._classes)
        self.free_records = max_records
        self.free_bytes = max_bytes
        self._crowded_below_records = max_records // 2
        self._crowded_below_bytes = max_bytes // 2
        self.accepted = 0
        self.taken = 0
        # How many never entered the queue.
        self.refused = 0
        # By reason: refused, or evicted for another record.
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(each.entries) for each in self._classes)

    def put(self, entry: Entry, size: int, level: int) -> bool:
        """Accept an entry of `size` bytes (`entry_size`), evicting others by the rule; return False if refused."""
        try:
            mine = self._class_of[level]
        except TypeError:
            # The level is not a number, as in a record that `logging.makeLogRecord` made without one.
            mine = self._classes[0]
        if (self.free_records <= 0 or size > self.free_bytes) and not self._make_room(size, mine):
            self.refuse(FULL)
            return False
        self.free_records -= 1
        self.free_bytes -= size
        mine.size_bytes += size
        self.accepted += 1
        mine.entries.append(entry)
        return True

    def refuse(self, reason: str) -> None:
        """Count a record that never entered the queue."""
        self.dropped[reason] += 1
        self.refused += 1

    def has_room(self, size: int) -> bool:
        """Return True if `put` would evict nothing."""
        return self.free_records > 0 and size <= self.free_bytes

    @property
    def is_crowded(self) -> bool:
        """Return True if it is more than half full."""
        return self.free_records < self._crowded_below_records or self.free_bytes < self._crowded_below_bytes

    def watch_drained(self) -> Callable[[], bool]:
        """Return a function that returns True once every entry that is queued now has been taken or evicted."""
        ends = [(each, each.left + len(each.entries)) for each in self._classes]
        return lambda: all(each.left >= end or not each.entries for each, end in ends)

    def _make_room(self, size: int, own_class: _LevelClass) -> bool:
        victims = self._classes[: own_class.rank + self._rule.evicts_own_class]
        # Nothing is evicted for a record that would not fit even then.
        if size > self.free_bytes + sum(each.size_bytes for each in victims):
            return False
        if not any(each.entries for each in victims):
            return False
        newest_first = self._rule.newest_first
        for each in victims:
            while each.entries and not self.has_room(size):
                freed = entry_size(each.entries[-newest_first])
                remove = each.entries.pop if newest_first else each.entries.popleft
                self.dropped[EVICTED] += 1
                each.left += not newest_first
                each.size_bytes -= freed
                self.free_bytes += freed
                self.free_records += 1
                remove()
        return self.has_room(size)

    def take(self, count: int, max_bytes: float = math.inf) -> list[tuple[bool, Entry]]:
        """Remove and return up to `count` entries, the highest class first, each with True if it is of the highest.

        It stops after the entry that reaches `max_bytes`.
        """
        taken: list[tuple[bool, Entry]] = []
        stop_at = self.free_bytes + max_bytes
        for each in reversed(self._classes):
            is_highest = each.rank == len(self._classes) - 1
            before = len(taken)
            while each.entries and len(taken) < count and self.free_bytes < stop_at:
                entry = each.entries.popleft()
                size = entry_size(entry)
                each.size_bytes -= size
                self.free_bytes += size
                self.free_records += 1
                taken.append((is_highest, entry))
            each.left += len(taken) - before
        self.taken += len(taken)
        return taken


class SenderQueue(NamedTuple):
    """A level queue with its lock; `room` is the condition of that lock, notified when the queue has room."""

    records: LevelQueue
    lock: "threading.RLock"
    room: threading.Condition
    # Encodes an entry that the caller left to the sender.
    encode_large: Callable[[LargeLine], Encoded]
