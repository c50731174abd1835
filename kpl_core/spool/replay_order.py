"""Which spooled record may be replayed next; pure.

Records of one key leave in the order they were accepted. With one in flight per key that
holds whatever happens to them afterwards. With more, they are handed over in order, and the
one who sends them keeps it; a key of which one failed waits until all that is in flight for it
has a result, and then starts again from the oldest that failed.
"""

from heapq import heappop, heappush

from kpl_core.spool.ledger import Claimed

__all__ = ["ReplayOrder"]

_Key = tuple[str, str]


class _KeyState:
    """The records of one key: those that wait, by id, and how many are in flight."""

    __slots__ = ("failed", "in_flight", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Claimed] = []
        self.in_flight = 0
        self.failed = False


class ReplayOrder:
    """Holds claimed records from `offer` to `succeeded`."""

    def __init__(self, *, in_flight_per_key: int) -> None:
        self._in_flight_per_key = in_flight_per_key
        self._keys: dict[_Key, _KeyState] = {}
        # (id of its oldest record that waits, key); an entry that is no longer true is skipped.
        self._ready: list[tuple[int, _Key]] = []
        self._in_flight: dict[int, Claimed] = {}
        self._waiting = 0
        self._waiting_bytes = 0

    @property
    def waiting(self) -> int:
        """Records not handed out yet."""
        return self._waiting

    @property
    def waiting_bytes(self) -> int:
        """Key + data of the records not handed out yet."""
        return self._waiting_bytes

    def offer(self, claimed: Claimed) -> None:
        """Take a record of the backlog."""
        key = _key(claimed)
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _KeyState()
        self._wait(state, claimed)
        if state.waiting[0] is claimed:
            self._make_ready(key, state)

    def peek(self) -> Claimed | None:
        """Return the oldest record that may leave now, None if there is none."""
        while self._ready:
            record_id, key = self._ready[0]
            state = self._keys.get(key)
            if state is not None and state.waiting and state.waiting[0].id == record_id and self._may_leave(state):
                return state.waiting[0]
            heappop(self._ready)
        return None

    def take(self) -> Claimed:
        """Hand out the record that `peek` returned."""
        _, key = heappop(self._ready)
        state = self._keys[key]
        claimed = heappop(state.waiting)
        self._waiting -= 1
        self._waiting_bytes -= claimed.record.size_bytes
        state.in_flight += 1
        self._in_flight[claimed.id] = claimed
        self._make_ready(key, state)
        return claimed

    def succeeded(self, record_id: int) -> Claimed:
        """Forget a record that was delivered, or that somebody else keeps now."""
        claimed = self._in_flight.pop(record_id)
        key = _key(claimed)
        state = self._keys[key]
        self._landed(key, state)
        if not state.in_flight and not state.waiting:
            del self._keys[key]
        return claimed

    def failed(self, record_id: int) -> Claimed:
        """Let a record that was not delivered wait again, ahead of the younger ones of its key."""
        claimed = self._in_flight.pop(record_id)
        key = _key(claimed)
        state = self._keys[key]
        state.failed = True
        self._wait(state, claimed)
        self._landed(key, state)
        return claimed

    def _landed(self, key: _Key, state: _KeyState) -> None:
        state.in_flight -= 1
        if not state.in_flight:
            state.failed = False
        self._make_ready(key, state)

    def take_waiting(self) -> list[int]:
        """Forget the records not handed out yet; return their ids."""
        ids = [claimed.id for state in self._keys.values() for claimed in state.waiting]
        for key, state in list(self._keys.items()):
            state.waiting.clear()
            if not state.in_flight:
                del self._keys[key]
        self._ready.clear()
        self._waiting = self._waiting_bytes = 0
        return ids

    def _wait(self, state: _KeyState, claimed: Claimed) -> None:
        heappush(state.waiting, claimed)
        self._waiting += 1
        self._waiting_bytes += claimed.record.size_bytes

    def _make_ready(self, key: _Key, state: _KeyState) -> None:
        if state.waiting and self._may_leave(state):
            heappush(self._ready, (state.waiting[0].id, key))

    def _may_leave(self, state: _KeyState) -> bool:
        return not state.failed and state.in_flight < self._in_flight_per_key


def _key(claimed: Claimed) -> _Key:
    return claimed.record.stream, claimed.record.partition_key
