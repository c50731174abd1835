"""How often the gateway asks Kinesis because a client wants to know something: in total, and shared by the tenants."""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import anyio

from kpl_core.pipeline.token_bucket import TokenBucket

# The longest wait. SDKs wait at least as long for an answer, then retry.
LONGEST_WAIT_SECONDS: Final = 2.0
# The most waiting calls of one tenant.
MOST_WAITING: Final = 4
# The most running calls of describe_calls and of lookup_calls.
MOST_DESCRIBING: Final = 4
MOST_LOOKUPS: Final = 4
# How often a waiting call checks the rate while all running calls are slow.
_POLL_SECONDS: Final = 0.05


class Turn:
    """A waiting call. When it is granted, `granted` is True and `on_grant` has been called once."""

    __slots__ = ("granted", "on_grant", "tenant")

    def __init__(self, tenant: str, on_grant: Callable[[], object]) -> None:
        self.tenant = tenant
        self.on_grant = on_grant
        self.granted = False


class CallTurns:
    """Grant `per_second` calls, with bursts of `at_once`, round robin over the waiting tenants. Pure.

    At most `most_running` granted calls run at a time. The next one is granted when one ends, in the same order.
    With N waiting tenants, each gets at least 1/N of the calls; unused calls go to the others. A tenant may have
    `most_waiting` waiting calls.
    """

    def __init__(self, *, per_second: float, at_once: float, most_waiting: int, most_running: int, now: float) -> None:
        self._free = most_running
        self._tokens = TokenBucket([(per_second, at_once)], now=now)
        self._most_waiting = most_waiting
        self._lines: OrderedDict[str, deque[Turn]] = OrderedDict()

    def ask(self, tenant: str, on_grant: Callable[[], object], now: float) -> Turn | None:
        """Enqueue a call; it is granted at once if possible. Returns None if the tenant's queue is full."""
        line = self._lines.setdefault(tenant, deque())
        if len(line) >= self._most_waiting:
            return None
        turn = Turn(tenant, on_grant)
        line.append(turn)
        self.grant(now)
        return turn

    def grant(self, now: float) -> None:
        """Grant the calls that are allowed at `now`."""
        while self._lines and self._free and self._tokens.try_take((1.0,), now):
            tenant, line = self._lines.popitem(last=False)
            turn = line.popleft()
            if line:
                # Move the tenant behind all others.
                self._lines[tenant] = line
            self._free -= 1
            turn.granted = True
            turn.on_grant()

    def end(self, turn: Turn, now: float) -> None:
        """End a granted call, so that another one can run, or remove a waiting call."""
        if turn.granted:
            self._free += 1
            self.grant(now)
            return
        line = self._lines[turn.tenant]
        line.remove(turn)
        if not line:
            del self._lines[turn.tenant]

    def ready_at(self, now: float) -> float:
        """Return the instant at which `grant` may grant the next call."""
        return max(self._tokens.ready_at((1.0,), now), now if self._free else now + _POLL_SECONDS)


class CallBudget:
    """`CallTurns` for tasks."""

    def __init__(self, *, per_second: float, at_once: float, most_waiting: int, most_running: int) -> None:
        self._new_turns = partial(
            CallTurns, per_second=per_second, at_once=at_once, most_waiting=most_waiting, most_running=most_running
        )
        self._turns: CallTurns | None = None

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[bool]:
        """Wait for a call of this tenant, and make it inside. False if its queue is full, or after 2 s."""
        if self._turns is None:
            self._turns = self._new_turns(now=anyio.current_time())
        turns, granted = self._turns, anyio.Event()
        turn = turns.ask(tenant, granted.set, anyio.current_time())
        if turn is None:
            yield False
            return
        try:
            with anyio.move_on_after(LONGEST_WAIT_SECONDS):
                while not turn.granted:
                    now = anyio.current_time()
                    with anyio.move_on_after(turns.ready_at(now) - now):
                        await granted.wait()
                    turns.grant(anyio.current_time())
            yield turn.granted
        finally:
            turns.end(turn, anyio.current_time())


def describe_calls() -> CallBudget:
    """Return the budget for all calls but ListShards of the gateway's own lookups.

    AWS allows an account 10 DescribeStream a second and 20 DescribeStreamSummary.
    """
    return CallBudget(per_second=8.0, at_once=16.0, most_waiting=MOST_WAITING, most_running=MOST_DESCRIBING)


def lookup_calls() -> CallBudget:
    """Return the budget for looking up streams by ListShards, of which AWS allows 1,000 a second for each stream."""
    return CallBudget(per_second=100.0, at_once=100.0, most_waiting=100, most_running=MOST_LOOKUPS)
