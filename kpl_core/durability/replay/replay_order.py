"""Which spooled record may be replayed next; pure.

Records of one partition key leave in the order in which they were accepted. With one record in flight per key this
always holds. More may be in flight if they share one result: either all of them are delivered or none.
Otherwise records are only handed over in order, and the producer keeps it. If a record of a key fails, the key waits
until all its records in flight have a result, then starts again from the oldest that failed.
"""

from heapq import heappop, heappush

from kpl_core.durability.spool.claims import Claimed

_Key = tuple[str, str]


class _KeyState:
    """One partition key: its waiting records by id, the number in flight, and the last one handed out."""

    __slots__ = ("failed", "in_flight", "is_apart", "last", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Claimed] = []
        self.in_flight = 0
        self.failed = False
        self.last: int | None = None
        # The next record would not share the result of the last one.
        self.is_apart = True


class ReplayOrder:
    """Orders claimed records from `offer` to `succeeded`."""

    def __init__(self, *, in_flight_per_key: int, may_share: bool = False) -> None:
        self._in_flight_per_key = in_flight_per_key
        # With True the caller says whether the next record of the key shares the result of the last (`cannot_join`).
        self._may_share = may_share
        self._keys: dict[_Key, _KeyState] = {}
        # (id of the oldest waiting record, key); outdated entries are skipped.
        self._ready: list[tuple[int, _Key]] = []
        self._in_flight: dict[int, Claimed] = {}
        # Records that were not handed out yet, and the bytes of their keys and data.
        self.waiting = self.waiting_bytes = 0

    def offer(self, claimed: Claimed) -> None:
        """Add a record of the backlog."""
        key = _key(claimed)
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _KeyState()
        self._wait(state, claimed)
        if state.waiting[0] is claimed:
            self._make_ready(key, state)

    def peek(self) -> Claimed | None:
        """Return the oldest record that may be sent now, None if there is none; see `must_join`."""
        while self._ready:
            record_id, key = self._ready[0]
            state = self._keys.get(key)
            if state is not None and state.waiting and state.waiting[0].id == record_id and self._may_leave(state):
                return state.waiting[0]
            heappop(self._ready)
        return None

    def must_join(self, claimed: Claimed) -> int | None:
        """Return the id of the record in flight that the one from `peek` must travel with, None if it may travel alone.

        If it cannot travel with that record, call `cannot_join`.
        """
        state = self._keys[_key(claimed)]
        return state.last if state.in_flight >= self._in_flight_per_key else None

    def cannot_join(self) -> None:
        """Make the record from `peek` wait until enough records of its key have a result."""
        _, key = heappop(self._ready)
        self._keys[key].is_apart = True

    def take(self) -> Claimed:
        """Hand out the record from `peek`."""
        _, key = heappop(self._ready)
        state = self._keys[key]
        claimed = heappop(state.waiting)
        self.waiting -= 1
        self.waiting_bytes -= claimed.record.size_bytes
        state.in_flight += 1
        state.last, state.is_apart = claimed.id, not self._may_share
        self._in_flight[claimed.id] = claimed
        self._make_ready(key, state)
        return claimed

    def is_in_flight(self, record_id: int) -> bool:
        """Return True if this record was handed out and has no result yet."""
        return record_id in self._in_flight

    def succeeded(self, record_id: int) -> Claimed:
        """Remove a record that was delivered, or that is stored elsewhere now."""
        claimed = self._in_flight.pop(record_id)
        key = _key(claimed)
        state = self._keys[key]
        self._result_arrived(key, state)
        if not state.in_flight and not state.waiting:
            del self._keys[key]
        return claimed

    def failed(self, record_id: int) -> Claimed:
        """Return a record that was not delivered to the waiting ones, before the younger ones of its key."""
        claimed = self._in_flight.pop(record_id)
        key = _key(claimed)
        state = self._keys[key]
        state.failed = True
        self._wait(state, claimed)
        self._result_arrived(key, state)
        return claimed

    def _result_arrived(self, key: _Key, state: _KeyState) -> None:
        state.in_flight -= 1
        # The records still in flight no longer travel with this one.
        state.is_apart = True
        if not state.in_flight:
            state.failed = False
        self._make_ready(key, state)

    def take_waiting(self) -> list[int]:
        """Remove the records not handed out yet; return their ids."""
        ids = [claimed.id for state in self._keys.values() for claimed in state.waiting]
        for key, state in list(self._keys.items()):
            state.waiting.clear()
            if not state.in_flight:
                del self._keys[key]
        self._ready.clear()
        self.waiting = self.waiting_bytes = 0
        return ids

    def _wait(self, state: _KeyState, claimed: Claimed) -> None:
        heappush(state.waiting, claimed)
        self.waiting += 1
        self.waiting_bytes += claimed.record.size_bytes

    def _make_ready(self, key: _Key, state: _KeyState) -> None:
        if state.waiting and self._may_leave(state):
            heappush(self._ready, (state.waiting[0].id, key))

    def _may_leave(self, state: _KeyState) -> bool:
        return not state.failed and (state.in_flight < self._in_flight_per_key or not state.is_apart)


def _key(claimed: Claimed) -> _Key:
    return claimed.record.stream, claimed.record.partition_key
