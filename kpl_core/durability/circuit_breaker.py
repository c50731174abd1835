"""A circuit breaker for one shard (or one stream), fed by counts of records.

Kinesis answers HTTP 200 to a request whose every record was throttled, so a breaker that
looks at requests never opens. This one looks at records: each answered request reports how
many of its records succeeded and how many failed. (Nygard, "Release It!", 2007, "Circuit
Breaker"; Azure Architecture Center, "Circuit Breaker pattern".)

    closed ----- failure share reached, volume enough ------> open
    open ------- the break is over -------------------------> half-open
    half-open -- enough probe records answered well --------> closed
    half-open -- too many probe records failed -------------> open, for twice as long
    half-open -- probe records never answered --------------> half-open, new probes

Where we differ: probes are counted in records, not in calls. Critical records keep their
reserved capacity while the breaker is open. Answers to requests that were sent before the
half-open state began do not count.

A failure is an answer that means "not now": throttled, internal failure,
unavailable, timed out. What is the caller's mistake (no rights, no such stream, a malformed
record) is neither success nor failure and must not be reported.
"""

import math
from collections import deque
from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.options.reliability import BreakerPolicy
from kpl_core.records.user_record import Tier

# A window is counted in this many slots: outcomes leave it within a tenth of its length.
_SLOTS: Final = 10


class BreakerState(StrEnum):
    """The state of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerSignal(Enum):
    """What changes the state; see `TRANSITIONS`."""

    FAILURE_SHARE_REACHED = "failure share reached"
    BREAK_OVER = "break over"
    PROBES_SUCCEEDED = "probes succeeded"
    PROBES_FAILED = "probes failed"
    PROBES_UNANSWERED = "probes unanswered"


class Decision(Enum):
    """What to do with a record that is due now."""

    SEND = "send"
    # Send it; its outcome decides whether the breaker closes.
    PROBE = "probe"
    # Send it within the capacity that is reserved for critical records.
    RESERVED = "reserved"
    # Keep it, or spool it, until `next_probe_at`.
    WAIT = "wait"
    # Dead-letter it with the reason `breaker_open`, or answer 503.
    REFUSE = "refuse"


# A signal that is not listed for a state cannot arise in it.
TRANSITIONS: Final[Mapping[tuple[BreakerState, BreakerSignal], BreakerState]] = {
    (BreakerState.CLOSED, BreakerSignal.FAILURE_SHARE_REACHED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerSignal.BREAK_OVER): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerSignal.PROBES_SUCCEEDED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerSignal.PROBES_FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerSignal.PROBES_UNANSWERED): BreakerState.HALF_OPEN,
}

# In the half-open state the answer is PROBE while probes are left, and this row after that.
ADMISSIONS: Final[Mapping[tuple[BreakerState, Tier], Decision]] = {
    (BreakerState.CLOSED, "critical"): Decision.SEND,
    (BreakerState.CLOSED, "normal"): Decision.SEND,
    (BreakerState.CLOSED, "bulk"): Decision.SEND,
    (BreakerState.OPEN, "critical"): Decision.RESERVED,
    (BreakerState.OPEN, "normal"): Decision.WAIT,
    (BreakerState.OPEN, "bulk"): Decision.REFUSE,
    (BreakerState.HALF_OPEN, "critical"): Decision.RESERVED,
    (BreakerState.HALF_OPEN, "normal"): Decision.WAIT,
    (BreakerState.HALF_OPEN, "bulk"): Decision.REFUSE,
}


class BreakerStatistics(NamedTuple):
    """A snapshot: the window's counts, and the probes without an answer."""

    state: BreakerState
    succeeded_records: int
    failed_records: int
    probes_outstanding: int


class CircuitBreaker:
    """Decides about records of a tier; the caller makes one instance per shard or stream.

    Not thread-safe. `now` never goes back; an earlier instant counts as the latest one seen.
    """

    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self._policy = BreakerPolicy() if policy is None else policy
        self._state = BreakerState.CLOSED
        self._latest = -math.inf
        # Open: when the break began. Half-open: when the present probes were granted.
        self._since = -math.inf
        # When the half-open state began.
        self._half_open_at = -math.inf
        self._backoff = ExponentialBackoff(
            base_seconds=self._policy.open_seconds, cap_seconds=self._policy.max_open_seconds
        )
        self._breaks_in_a_row = 0
        self._break_seconds = self._policy.open_seconds
        self._probes_granted = 0
        # Closed: [slot number, succeeded, failed], oldest first, beside their sums.
        # Half-open: no slots, only the sums over the probes answered.
        self._slots: deque[list[int]] = deque()
        # The number of the present slot.
        self._slot = 0
        self._succeeded = 0
        self._failed = 0

    @property
    def known_state(self) -> BreakerState:
        """The state as of the latest call, for other threads; changes nothing."""
        return self._state

    @property
    def is_recovering(self) -> bool:
        """True if it is half-open and records have succeeded since; as of the latest call, as `known_state`."""
        return self._state is BreakerState.HALF_OPEN and self._succeeded > 0

    def state(self, now: float) -> BreakerState:
        """Return the state at `now`."""
        self._advance(now)
        return self._state

    def allows(self, tier: Tier, now: float, record_count: int = 1) -> Decision:
        """Decide about `record_count` records of one tier that are sent together.

        After PROBE they are sent, and their outcomes must be reported. Unanswered probes are
        given up after `probe_timeout_seconds`. The last probe granted may exceed
        `probe_records` by `record_count - 1`.
        """
        self._advance(now)
        if self._state is BreakerState.HALF_OPEN and self._probes_granted < self._policy.probe_records:
            answered = self._succeeded + self._failed
            if self._probes_granted <= answered:
                # No probe is unanswered (answers to critical records in reserved capacity count
                # too), so the time limit of the probes begins here.
                self._probes_granted = answered
                self._since = self._latest
            self._probes_granted += record_count
            return Decision.PROBE
        return ADMISSIONS[self._state, tier]

    def record_outcomes(
        self, *, succeeded: int, failed: int, now: float, started_at: float | None = None
    ) -> BreakerState:
        """Count the outcomes of the records of one request; return the new state.

        Args:
            succeeded: records the service stored.
            failed: records that it throttled or failed (not those with a mistake of the caller).
            now: when the answer arrived.
            started_at: when the request was sent; None: after the half-open state began.
        """
        self._advance(now)
        if self._state is BreakerState.CLOSED:
            self._count(succeeded, failed)
            if self._failed:
                total = self._succeeded + self._failed
                if total >= self._policy.minimum_records and self._failed >= self._policy.failure_share * total:
                    self._signal(BreakerSignal.FAILURE_SHARE_REACHED)
        elif self._state is BreakerState.HALF_OPEN and (started_at is None or started_at >= self._half_open_at):
            self._count_probes(succeeded, failed)
        return self._state

    def next_probe_at(self, now: float) -> float:
        """Return the time from which a waiting record may be sent, `now` at the earliest."""
        self._advance(now)
        if self._state is BreakerState.OPEN:
            return self._since + self._break_seconds
        if self._state is BreakerState.HALF_OPEN and self._probes_granted >= self._policy.probe_records:
            return self._since + self._policy.probe_timeout_seconds
        return self._latest

    @property
    def break_over_at(self) -> float:
        """Return when it becomes half-open by itself, `math.inf` if it is not open."""
        return self._since + self._break_seconds if self._state is BreakerState.OPEN else math.inf

    def statistics(self, now: float) -> BreakerStatistics:
        """Return a snapshot at `now`."""
        self._advance(now)
        outstanding = 0
        if self._state is BreakerState.HALF_OPEN:
            outstanding = max(0, self._probes_granted - self._succeeded - self._failed)
        return BreakerStatistics(self._state, self._succeeded, self._failed, outstanding)

    def __repr__(self) -> str:
        """Show the state as of the latest instant seen."""
        return f"CircuitBreaker({self._state}, succeeded={self._succeeded}, failed={self._failed})"

    def _advance(self, now: float) -> None:
        """Let time pass: slots leave the window, breaks end, unanswered probes are given up."""
        if now < self._latest:
            now = self._latest
        else:
            self._latest = now
        if self._state is BreakerState.CLOSED:
            self._slot = math.floor(now * _SLOTS / self._policy.window_seconds)
            while self._slots and self._slots[0][0] <= self._slot - _SLOTS:
                _, succeeded, failed = self._slots.popleft()
                self._succeeded -= succeeded
                self._failed -= failed
        elif self._state is BreakerState.OPEN:
            if now >= self._since + self._break_seconds:
                self._signal(BreakerSignal.BREAK_OVER)
        elif (
            self._probes_granted > self._succeeded + self._failed
            and now >= self._since + self._policy.probe_timeout_seconds
        ):
            self._signal(BreakerSignal.PROBES_UNANSWERED)

    def _count(self, succeeded: int, failed: int) -> None:
        if not self._slots or self._slots[-1][0] != self._slot:
            self._slots.append([self._slot, 0, 0])
        newest = self._slots[-1]
        newest[1] += succeeded
        newest[2] += failed
        self._succeeded += succeeded
        self._failed += failed

    def _count_probes(self, succeeded: int, failed: int) -> None:
        self._succeeded += succeeded
        self._failed += failed
        answered = self._succeeded + self._failed
        if self._failed >= self._policy.failure_share * max(answered, self._policy.probe_records):
            # The share is reached even if all other probes succeed.
            self._signal(BreakerSignal.PROBES_FAILED)
        elif answered >= self._policy.probe_records:
            self._signal(BreakerSignal.PROBES_SUCCEEDED)

    def _signal(self, signal: BreakerSignal) -> None:
        before = self._state
        self._state = TRANSITIONS[before, signal]
        self._since = self._latest
        if signal is BreakerSignal.PROBES_UNANSWERED:
            # The answers so far still count, and those that come late; new probes replace the lost ones.
            self._probes_granted = self._succeeded + self._failed
            return
        self._slots.clear()
        self._succeeded = self._failed = self._probes_granted = 0
        if self._state is BreakerState.HALF_OPEN:
            self._half_open_at = self._latest
        if self._state is BreakerState.OPEN:
            self._breaks_in_a_row = self._breaks_in_a_row + 1 if before is BreakerState.HALF_OPEN else 1
            self._break_seconds = self._backoff.longest_seconds(self._breaks_in_a_row)
