"""The puts that wait for room in a full buffer, in line.

The longest waiting put is served first, large or small. Only the first in the line tries, and each put that leaves
the line, served, refused or cancelled, lets the next one try. As many puts as may find room are called at once and run
in their order, so that a long line does not move by one put for each turn of the loop.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import anyio

from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.records.user_record import Tier


class _Place:
    """One put's place in the line."""

    def __init__(self, line: "OrderedDict[_Place, None]") -> None:
        self._line = line
        self.called = anyio.Event()

    async def wait(self) -> None:
        """Wait until a try is worthwhile; call it again if the try found too little room."""
        while True:
            await self.called.wait()
            self.called = anyio.Event()
            if self.is_first:
                return

    @property
    def is_first(self) -> bool:
        """Return True if no other put of this line has waited longer."""
        return next(iter(self._line)) is self


class CapacityWaiters:
    """Puts that wait for room, in the order in which they came."""

    def __init__(self) -> None:
        # A set in order: many puts may be cancelled at once, from the back too.
        self._line: OrderedDict[_Place, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._line)

    @contextmanager
    def wait_in_line(self) -> Iterator[_Place]:
        """Have a place in the line for the length of a `with` block."""
        place = _Place(self._line)
        self._line[place] = None
        try:
            yield place
        finally:
            del self._line[place]
            self.wake_first()

    def wake_first(self, count: int = 1) -> None:
        """Let the longest waiting puts try: each of the first `count`, when it is its turn."""
        for place in islice(self._line, count):
            place.called.set()

    def wake_all(self) -> None:
        """Let every put try, because the producer closes and none will find room."""
        self.wake_first(len(self._line))


class WaitersByFlow:
    """All lines: one for all puts, or one for each tier and flow that may use room that others may not.

    With tiers, critical puts must not wait behind bulk. With flows, a quiet flow must not wait behind one that has used
    up its share.
    """

    def __init__(self, buffer_limit: BufferLimit, *, by_tier: bool, by_flow: bool) -> None:
        self._buffer_limit = buffer_limit
        self._by_tier = by_tier
        self._by_flow = by_flow
        # Empty unless a put waits. Every put looks at it first.
        self.lines: dict[tuple[Tier, str | None], CapacityWaiters] = {}

    def _key(self, tier: Tier, flow: str | None) -> tuple[Tier, str | None]:
        return (tier if self._by_tier else "normal", flow if self._by_flow else None)

    def has_line(self, tier: Tier, flow: str | None) -> bool:
        """Return True if a put of this tier and flow must wait behind others."""
        return bool(self.lines) and bool(self.lines.get(self._key(tier, flow)))

    @contextmanager
    def wait_in_line(self, tier: Tier, flow: str | None) -> Iterator[_Place]:
        """Have a place in the line of a tier and flow for the length of a `with` block."""
        key = self._key(tier, flow)
        line = self.lines.setdefault(key, CapacityWaiters())
        try:
            with line.wait_in_line() as place:
                yield place
        finally:
            if not line and self.lines.get(key) is line:
                del self.lines[key]

    def wake_first(self) -> bool:
        """Let the longest waiting puts of each line try, where there is room for their tier; return True if one may."""
        may_try = False
        for (tier, _), line in self.lines.items():
            if self._buffer_limit.has_room(size_bytes=1, tier=tier):
                line.wake_first(max(1, self._buffer_limit.free_records))
                may_try = True
        return may_try

    def wake_all(self) -> None:
        """Let every put try, because the producer closes and none will find room."""
        for line in self.lines.values():
            line.wake_all()
