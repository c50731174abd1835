"""When to leave a whole stream alone: its requests fail one after the other, as requests.

No connection, a 500, no answer in time say nothing about single records, and what is sent meanwhile is
built, signed and written for nothing. So after two such failures in a row one request at a time goes
out as a probe, each after a longer pause (the retrier's backoff: exponential, with full jitter), until
the first answer of any kind ends all that at once. (Nygard, "Release It!", 2007, knows it as the
half-open state of a circuit breaker; unlike `circuit_breaker.py` this machine fails nobody and keeps
nobody's record: they wait where they are, and expire there.)

The next probe does not wait for the answer to the last one: a request that hangs until its timeout must
not put off by that much the discovery that the stream is well again.
"""

import math
from collections.abc import Callable
from typing import Final

__all__ = ["FAILURES_IN_A_ROW", "SendingPause"]

# A single failure says little: a connection that was closed while nobody used it fails its next request.
FAILURES_IN_A_ROW: Final = 2


class SendingPause:
    """Says when the next request may leave. `backoff` draws the seconds to wait before the n-th probe, from 1 on."""

    __slots__ = ("_backoff", "_failures", "_is_lifted", "_probes", "ready_at")

    def __init__(self, backoff: Callable[[int], float]) -> None:
        self._backoff = backoff
        self._failures = 0
        self._probes = 0
        self._is_lifted = False
        # The instant from which a request may leave; in the past unless requests fail.
        self.ready_at = -math.inf

    @property
    def is_failing(self) -> bool:
        """Say whether only probes may leave."""
        return self._failures >= FAILURES_IN_A_ROW and not self._is_lifted

    def sent(self, now: float) -> None:
        """Note that a request left; a probe if requests fail, and then the next pause begins."""
        if self.is_failing:
            self._probes += 1
            self.ready_at = now + self._backoff(self._probes + 1)

    def ended(self, now: float, *, failed: bool) -> None:
        """Note how a request ended: `failed` as a whole, in a way that another attempt may cure, or answered."""
        if not failed:
            # Whatever was said of its records, somebody is there: everything may leave.
            self._failures = self._probes = 0
            self.ready_at = -math.inf
            return
        self._failures += 1
        if self._failures == FAILURES_IN_A_ROW and self.is_failing:
            self.ready_at = now + self._backoff(1)

    def probe_from(self, now: float) -> None:
        """Let the next probe leave from `now` on, because somebody else knows that it is time for one."""
        self.ready_at = min(self.ready_at, now)

    def lift(self) -> None:
        """Pause no more: there is no later."""
        self._is_lifted = True
        self.ready_at = -math.inf
