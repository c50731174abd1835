"""A fibre is cut: 200 events a second for half a minute, sent to a ticket system that accepts 20.

    pip install kpl-integrations
    python examples/policies_alarm_storm.py

Alarms are critical, state changes normal, counters bulk. A part of the bucket is reserved for alarms.
The same storm runs through three limiters. They differ in what happens to work that finds the bucket
empty: it waits, it loses a tier, or a fallback handles it. Refused work keeps its own time and
severity for the dead-letter queue. The clock is a variable, so the storm takes no time.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from kpl_core import BreakerPolicy
from kpl_core.durability.circuit_breaker import CircuitBreaker
from kpl_core.limits import (
    Overflow,
    OverflowLimiter,
    RefusedWork,
    RejectionMonitor,
    TokenBucketLimiter,
    Work,
    capacity_for,
    metric_samples,
    refill_for,
)
from kpl_core.records.user_record import TIERS, Tier

SAFE_RATE = 20.0
STORM_SECONDS = 30
AFTERMATH_SECONDS = 90
# One alarm and two state changes among seventeen counters.
KINDS: tuple[Tier, ...] = ("critical", "normal", "normal", *("bulk",) * 17)
EVENTS_PER_SECOND = 200


@dataclass
class TicketSystem:
    """One limiter, with the work it admitted and when, and the work it refused or diverted."""

    overflow: Overflow
    now: float = 0.0
    waits: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    dead_letters: list[RefusedWork] = field(default_factory=list)
    logged: list[RefusedWork] = field(default_factory=list)
    signals: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Build the limiter with capacity for two seconds of the storm, a third of it reserved for alarms."""
        self.bucket = TokenBucketLimiter(
            capacity_for(EVENTS_PER_SECOND, storm_seconds=2),
            # Not the usual 1.5: the limit of this system is exact.
            refill_for(SAFE_RATE, headroom=1.0),
            critical_share=1 / 3,
            clock_ns=lambda: int(self.now * 1e9),
        )
        options: dict[str, Any] = {"fallback": self.logged.append} if self.overflow == "fallback" else {}
        self.limiter = OverflowLimiter(
            self.bucket,
            overflow=self.overflow,
            on_refused=self.dead_letters.append,
            max_waiting=1_000,
            monitor=RejectionMonitor(on_change=lambda is_raised: self.signals.append((self.now, is_raised))),
            breaker=CircuitBreaker(BreakerPolicy(open_seconds=5.0)),
            clock=lambda: self.now,
            **options,
        )

    def ticket(self, work: Work) -> None:
        """Open a ticket and record how long the event waited."""
        self.waits[work.tier].append(self.now - work.source_timestamp)

    def run_second(self, second: int) -> None:
        """Simulate one second: the storm for half a minute, then single events."""
        count = EVENTS_PER_SECOND if second < STORM_SECONDS else 1
        for number, tier in enumerate(islice(cycle(KINDS), count)):
            self.now = second + number / count
            event = Work(
                payload=f"port {number} down", tier=tier, source_timestamp=self.now, severity=TIERS.index(tier)
            )
            if self.limiter.submit(event) == "admitted":
                self.ticket(event)
            for waiting in self.limiter.release():
                self.ticket(waiting)


def report(system: TicketSystem) -> None:
    """Print the result for each tier."""
    statistics = {verdict: count for verdict, count in system.limiter.statistics().items() if count}
    print(f"\noverflow={system.overflow!r}: {statistics}")
    elsewhere = Counter(refused.work.tier for refused in [*system.dead_letters, *system.logged])
    for tier in TIERS:
        waits = system.waits[tier]
        longest = max(waits, default=0.0)
        print(f"  {tier:9}{len(waits):6,} tickets, longest wait {longest:6.2f} s; {elsewhere[tier]:6,} elsewhere")
    if system.dead_letters:
        letter = system.dead_letters[0]
        print(
            f"  first dead letter: {letter.reason}, {letter.work.payload!r} of second "
            f"{letter.work.source_timestamp:.2f}, severity {letter.work.severity}"
        )
    raised = [f"{'on' if is_raised else 'off'} at {at:.1f} s" for at, is_raised in system.signals]
    print("  backpressure:", ", ".join(raised))


def main() -> None:
    """Run the storm through three limiters."""
    systems = [TicketSystem("queue"), TicketSystem("downgrade"), TicketSystem("fallback")]
    for system in systems:
        for second in range(STORM_SECONDS + AFTERMATH_SECONDS):
            system.run_second(second)
        report(system)
    print("\nmetrics of the last limiter:")
    for sample in metric_samples(systems[-1].bucket, refused_share=0.0):
        print(f"  {sample.name} ({sample.kind}) {sample.value:,.1f}")


if __name__ == "__main__":
    main()
