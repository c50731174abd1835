"""The circuit breakers of one stream: one for each shard, and one for the stream as a whole.

A shard's breaker counts what the service says of single Kinesis records, so an HTTP 200 full of
throttles counts as failures. The stream's counts whole requests that failed, by their records: no
connection, a 500, a timeout say nothing about a shard. One alone counts for nothing, however many records it
carried: it may be all that was sent in the window. What is the caller's mistake (an error no retry
can cure), what expired here, and what is stored on another shard than predicted counts for neither.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from kpl_core.durability.circuit_breaker import ADMISSIONS, BreakerState, CircuitBreaker, Decision
from kpl_core.options.reliability import BreakerPolicy
from kpl_core.pipeline.sending_pause import FAILURES_IN_A_ROW
from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest, RequestFailure
from kpl_core.records.user_record import Tier

__all__ = ["WHOLE_STREAM", "ShardBreakers"]

# The name of the breaker of the stream as a whole, which is also that of records without a predicted shard.
WHOLE_STREAM: Final = ""
_PASSES: Final = frozenset({Decision.SEND, Decision.PROBE})
# Who waits and may be tried at once is tried a moment later, or the driver would never sleep.
_MOMENT: Final = 0.001


class ShardBreakers:
    """Decides what a Kinesis record may do. `reserved_per_second`: critical ones a shard takes while it is open."""

    def __init__(
        self, policy: BreakerPolicy, *, reserved_per_second: float, is_retryable: Callable[[str], bool]
    ) -> None:
        self._policy = policy
        self._reserved_per_second = reserved_per_second
        self._is_retryable = is_retryable
        self.breakers: dict[str, CircuitBreaker] = {WHOLE_STREAM: CircuitBreaker(policy)}
        self._reserved: dict[str, TokenBucket] = {}
        self._told: dict[str, BreakerState] = {}
        # Requests that failed as a whole since the last answer, and the records of those that do not count yet.
        self._failures = 0
        self._not_counted = 0

    def allows(self, shard_id: str | None, tier: Tier, now: float) -> Decision:
        """Decide about a Kinesis record of this tier: SEND, PROBE, WAIT (see `ready_at`) or REFUSE."""
        decision = Decision.SEND
        names = self._names(shard_id)
        for name in names:
            # Nothing is taken from one of them, a probe or a token, for what the other stops.
            if self._next_at(name, tier, now) > now:
                stopped = ADMISSIONS[self.breakers[name].known_state, tier]
                return Decision.WAIT if stopped is Decision.RESERVED else stopped
        for name in names:
            answer = self.breakers[name].allows(tier, now)
            if answer is Decision.RESERVED:
                answer = Decision.SEND if self._bucket(name, now).try_take([1], now) else Decision.WAIT
            if answer not in _PASSES:
                return answer
            if answer is Decision.PROBE:
                decision = answer
        return decision

    def ready_at(self, shard_id: str | None, tier: Tier, now: float) -> float:
        """Return when a Kinesis record that must wait may be tried again; always after `now`."""
        at = now + _MOMENT
        return max(at, *(self._next_at(name, tier, now) for name in self._names(shard_id)))

    def stopping(self, shard_id: str | None, now: float) -> str:
        """Return whose breaker keeps a Kinesis record of this shard: the shard's, else the whole stream's."""
        if shard_id is not None and shard_id in self.breakers:
            return WHOLE_STREAM if self.breakers[shard_id].state(now) is BreakerState.CLOSED else shard_id
        return WHOLE_STREAM

    def _next_at(self, name: str, tier: Tier, now: float) -> float:
        """Return when this breaker lets a Kinesis record of this tier pass, as a probe or in reserved capacity."""
        breaker = self.breakers[name]
        if breaker.state(now) is BreakerState.CLOSED:
            return now
        probe_at = breaker.next_probe_at(now)
        return min(probe_at, self._bucket(name, now).ready_at([1], now)) if tier == "critical" else probe_at

    def _names(self, shard_id: str | None) -> tuple[str, ...]:
        if shard_id is None or shard_id not in self.breakers:
            return (WHOLE_STREAM,)
        return (shard_id, WHOLE_STREAM)

    def _bucket(self, name: str, now: float) -> TokenBucket:
        bucket = self._reserved.get(name)
        if bucket is None:
            rate = self._reserved_per_second
            bucket = self._reserved[name] = TokenBucket([(rate, max(1.0, rate))], now=now)
        return bucket

    def answered(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> None:
        """Learn from the answer to a request."""
        sent = len(request.records)
        started_at = request.started_at
        whole = self.breakers[WHOLE_STREAM]
        if isinstance(answer, RequestFailure) or len(answer) != sent:
            if not isinstance(answer, RequestFailure) or self._is_retryable(answer.code):
                self._failures += 1
                self._not_counted += sent
                if self._failures >= FAILURES_IN_A_ROW or whole.state(now) is not BreakerState.CLOSED:
                    whole.record_outcomes(succeeded=0, failed=self._not_counted, now=now, started_at=started_at)
                    self._not_counted = 0
            return
        self._failures = self._not_counted = 0
        counts: dict[str, list[int]] = {WHOLE_STREAM: [0, 0]}
        for record, entry in zip(request.records, answer, strict=True):
            count = counts.setdefault(record.predicted_shard or WHOLE_STREAM, [0, 0])
            if entry.error_code or not entry.sequence_number:
                count[1] += self._is_retryable(entry.error_code or "")
            elif record.predicted_shard in {None, entry.shard_id}:
                count[0] += 1
        unpredicted = counts.pop(WHOLE_STREAM)[1]
        # It answered: for the stream as a whole that is a success, whatever it says of single shards.
        whole.record_outcomes(succeeded=sent - unpredicted, failed=unpredicted, now=now, started_at=started_at)
        for name, (succeeded, failed) in counts.items():
            breaker = self.breakers.get(name)
            if breaker is None:
                breaker = self.breakers[name] = CircuitBreaker(self._policy)
            breaker.record_outcomes(succeeded=succeeded, failed=failed, now=now, started_at=started_at)

    def changes(self, now: float) -> Mapping[str, BreakerState]:
        """Return the breakers whose state is another than at the last call, and it."""
        changed = {}
        for name, breaker in self.breakers.items():
            state = breaker.state(now)
            if self._told.get(name, BreakerState.CLOSED) is not state:
                changed[name] = self._told[name] = state
        return changed

    def next_wakeup(self) -> float:
        """Return when the next break is over, `math.inf` if none is open.

        Somebody must look then even if nothing waits: who puts nothing while it is open waits to hear that it may.
        """
        opened = [name for name, state in self._told.items() if state is BreakerState.OPEN]
        return min((self.breakers[name].break_over_at for name in opened), default=math.inf)

    def keep_only(self, shard_ids: set[str]) -> None:
        """Forget the breakers of shards that are gone."""
        for name in [name for name in self.breakers if name != WHOLE_STREAM and name not in shard_ids]:
            del self.breakers[name]
            self._reserved.pop(name, None)
            self._told.pop(name, None)
