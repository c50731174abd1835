"""The bounded queue between those who log and the one who sends: deques by class of level, one bound for all.

The promise: never more records or bytes than allowed; each record accepted is taken or evicted, once; a
record never makes room for one of a lower class, so ERROR and above stay while anything below is there.

It reads no clock and takes no lock: its owner holds one.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kpl_integrations.logging_handler.counts import EVICTED, FULL
from kpl_integrations.logging_handler.entry import Entry, entry_size

__all__ = ["OVERFLOW_RULES", "LevelQueue", "OverflowRule"]


class OverflowRule(NamedTuple):
    """What gives way when there is no room."""

    # The lowest level of each class but the first; a class may be evicted for a higher one.
    thresholds: tuple[int, ...]
    # Evict records of the newcomer's own class too, else refuse the newcomer.
    evicts_own_class: bool
    # Evict the newest of a class first, else the oldest.
    newest_first: bool


OVERFLOW_RULES: Final[Mapping[str, OverflowRule]] = MappingProxyType(
    {
        "drop_oldest": OverflowRule((logging.ERROR,), evicts_own_class=True, newest_first=False),
        "drop_newest": OverflowRule((logging.ERROR,), evicts_own_class=False, newest_first=True),
        "drop_lowest_level": OverflowRule(
            (logging.INFO, logging.WARNING, logging.ERROR), evicts_own_class=True, newest_first=False
        ),
        # Once the wait is over.
        "block": OverflowRule((logging.ERROR,), evicts_own_class=False, newest_first=True),
        # Where the disk does not take them as fast as they come.
        "spool": OverflowRule((logging.ERROR,), evicts_own_class=True, newest_first=False),
        "dlq": OverflowRule((logging.ERROR,), evicts_own_class=True, newest_first=False),
    }
)


class _LevelClass:
    """The records of one class, in the order they came."""

    __slots__ = ("entries", "rank", "size_bytes")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.entries: deque[Entry] = deque()
        self.size_bytes = 0


class _ClassOfLevel(dict[int, _LevelClass]):
    """Each level's class, found out when first met."""

    def __init__(self, thresholds: tuple[int, ...], classes: list[_LevelClass]) -> None:
        super().__init__()
        self._thresholds = thresholds
        self._classes = classes

    def __missing__(self, level: int) -> _LevelClass:
        found = self[level] = self._classes[sum(level >= threshold for threshold in self._thresholds)]
        return found


class LevelQueue:
    """Room for `max_records` formatted records of `max_bytes` together."""

    __slots__ = (
        "_class_of",
        "_classes",
        "_crowded_below_bytes",
        "_crowded_below_records",
        "_rule",
        "accepted",
        "dropped",
        "free_bytes",
        "free_records",
        "taken",
    )

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
        # By reason: refused at the door (Full), or evicted for a better one.
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(each.entries) for each in self._classes)

    def put(self, entry: Entry, size: int, level: int) -> bool:
        """Accept an entry of `size` bytes (`entry_size`), evicting what the rule gives up; say if it was accepted."""
        try:
            mine = self._class_of[level]
        except TypeError:
            # No number, as in `logging.makeLogRecord` of what came over a wire without one.
            mine = self._classes[0]
        if (self.free_records <= 0 or size > self.free_bytes) and not self._make_room(size, mine):
            self.dropped[FULL] += 1
            return False
        self.free_records -= 1
        self.free_bytes -= size
        mine.entries.append(entry)
        mine.size_bytes += size
        self.accepted += 1
        return True

    def has_room(self, size: int) -> bool:
        """Say whether `put` would evict nothing."""
        return self.free_records > 0 and size <= self.free_bytes

    @property
    def is_crowded(self) -> bool:
        """Say whether it is more than half full."""
        return self.free_records < self._crowded_below_records or self.free_bytes < self._crowded_below_bytes

    def _make_room(self, size: int, newcomer: _LevelClass) -> bool:
        victims = self._classes[: newcomer.rank + self._rule.evicts_own_class]
        # Nobody goes for a newcomer that would not fit all the same.
        if size > self.free_bytes + sum(each.size_bytes for each in victims):
            return False
        if not any(each.entries for each in victims):
            return False
        for each in victims:
            while each.entries and not self.has_room(size):
                evicted = each.entries.pop() if self._rule.newest_first else each.entries.popleft()
                self._release(evicted, each)
                self.dropped[EVICTED] += 1
        return self.has_room(size)

    def _release(self, entry: Entry, level_class: _LevelClass) -> None:
        size = entry_size(entry)
        level_class.size_bytes -= size
        self.free_bytes += size
        self.free_records += 1

    def take(self, count: int) -> list[tuple[bool, Entry]]:
        """Remove and return up to `count` entries, the highest class first; with each, whether it is of the highest."""
        taken: list[tuple[bool, Entry]] = []
        for each in reversed(self._classes):
            is_highest = each.rank == len(self._classes) - 1
            while each.entries and len(taken) < count:
                entry = each.entries.popleft()
                self._release(entry, each)
                taken.append((is_highest, entry))
        self.taken += len(taken)
        return taken
