"""Whose turn it is to call: so many calls a second for all, and in turn among the tenants that wait; pure.

Round robin with one call a turn, as the calls cost the same. Who asks often waits behind its own calls alone: with
N tenants asking, each has at least an Nth of the calls, and what one does not use is the others'.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from kpl_core.pipeline.token_bucket import TokenBucket

__all__ = ["CallTurns", "Turn"]


class Turn:
    """A call that waits, or may go: then `granted` is true, and `on_grant` was called once."""

    __slots__ = ("granted", "on_grant", "tenant")

    def __init__(self, tenant: str, on_grant: Callable[[], object]) -> None:
        self.tenant = tenant
        self.on_grant = on_grant
        self.granted = False


class CallTurns:
    """Grants `per_second` calls, `at_once` after a rest. A tenant may have `most_waiting` calls in line."""

    def __init__(self, *, per_second: float, at_once: float, most_waiting: int, now: float) -> None:
        self._tokens = TokenBucket([(per_second, at_once)], now=now)
        self._most_waiting = most_waiting
        self._lines: OrderedDict[str, deque[Turn]] = OrderedDict()

    def ask(self, tenant: str, on_grant: Callable[[], object], now: float) -> Turn | None:
        """Stand in line, and go at once if nobody else waits; None: the tenant's line is full."""
        line = self._lines.setdefault(tenant, deque())
        if len(line) >= self._most_waiting:
            return None
        turn = Turn(tenant, on_grant)
        line.append(turn)
        self.grant(now)
        return turn

    def grant(self, now: float) -> None:
        """Let go who may at `now`."""
        while self._lines and self._tokens.try_take((1.0,), now):
            tenant, line = self._lines.popitem(last=False)
            turn = line.popleft()
            if line:
                # Behind all others.
                self._lines[tenant] = line
            turn.granted = True
            turn.on_grant()

    def give_up(self, turn: Turn) -> None:
        """Leave the line; nothing happens to a turn that was granted."""
        line = self._lines.get(turn.tenant)
        if turn.granted or line is None:
            return
        line.remove(turn)
        if not line:
            del self._lines[turn.tenant]

    def ready_at(self, now: float) -> float:
        """Return when `grant` will let the next go."""
        return self._tokens.ready_at((1.0,), now)
