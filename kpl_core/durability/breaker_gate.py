"""The gate of circuit breakers: one breaker for each shard of a stream, and one for the stream as a whole.

A shard's breaker counts what the service says about single Kinesis records, so an HTTP 200 full of throttles counts as
failures. The stream's breaker counts whole requests that failed, by their records: no connection, a 500 or a timeout
do not concern one shard. A single failed request is not counted, however many records it carried: it may be all that
was sent in the window. Those that fail in a row are counted together, however far apart they are. Errors that no retry
can fix, records that expired here, and records stored on another shard than predicted count for neither.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from kpl_core.durability.circuit_breaker import ADMISSIONS, BreakerState, CircuitBreaker, Decision
from kpl_core.hooks import BreakerChanged, Fact
from kpl_core.options.config import Config
from kpl_core.options.reliability import BreakerPolicy, TierPolicy
from kpl_core.pipeline.intake.write_ahead import SpoolState
from kpl_core.pipeline.retrier import BackoffQueue
from kpl_core.pipeline.send_queue import FAILURES_IN_A_ROW
from kpl_core.pipeline.stages import Passage
from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import BREAKER_OPEN, INTERNAL, RECORD_COUNT_MISMATCH, Attempt
from kpl_core.records.user_record import Tier

# The name of the breaker of the whole stream. Records without a predicted shard belong to it too.
WHOLE_STREAM: Final = ""
_PASSES: Final = frozenset({Decision.SEND, Decision.PROBE})
# A record that must wait is tried again this much later at the earliest, or the driver would never sleep.
_MOMENT: Final = 0.001


class BreakerGate:
    """The pipeline's gate: passes Kinesis records that the breakers allow, keeps those that must wait.

    While a breaker is open, critical Kinesis records may leave at the rate of `TierPolicy.critical_reserve`. With a
    `spool` that can store, a normal record is refused instead of kept: the spool takes it, and replays it later.
    """

    def __init__(self, stream: str, policy: BreakerPolicy, config: Config, *, spool: SpoolState | None) -> None:
        self._stream = stream
        self._policy = policy
        self._is_retryable = config.is_retryable
        reserve = (TierPolicy() if config.tiers is None else config.tiers).critical_reserve
        self._reserved_per_second = max(1.0, reserve * config.rate_limit_records_per_sec_per_shard)
        self._spool = spool
        # By shard, "" for the whole stream's.
        self.breakers: dict[str, CircuitBreaker] = {WHOLE_STREAM: CircuitBreaker(policy)}
        self._reserved: dict[str, TokenBucket] = {}
        self._reported: dict[str, BreakerState] = {}
        # The code of the last failure that each breaker counted.
        self._last_codes: dict[str, str] = {}
        # True while all breakers are closed and `take_ready` has reported that. Only an answer ends it.
        self._is_quiet = True
        # Requests that failed as a whole since the last answer, and their records.
        self._failures = 0
        self._failed_records = 0
        self._waiting = BackoffQueue()

    @property
    def states(self) -> Mapping[str, str]:
        """Return the state of each circuit breaker by shard, "" for the whole stream's."""
        return {name: breaker.known_state.value for name, breaker in self.breakers.items()}

    def decide(self, record: KinesisRecord, now: float) -> Passage | Attempt:
        """Decide about one record. After KEPT the gate has it; the attempt fails a record that is refused."""
        shard_id, tier = record.predicted_shard, record.tier
        decision = self.allows(shard_id, tier, now)
        spools = tier == "normal" and self._spool is not None and self._spool.can_store
        if decision is Decision.WAIT and not spools:
            self._waiting.add(record, min(self.ready_at(shard_id, tier, now), record.expires_at))
            return Passage.KEPT
        if decision is Decision.WAIT or decision is Decision.REFUSE:
            return self._refusal(shard_id, now)
        return Passage.PROBE if decision is Decision.PROBE else Passage.OPEN

    def _refusal(self, shard_id: str | None, now: float) -> Attempt:
        name = self._stopping(shard_id, now)
        text = f"the circuit breaker of {f'shard {name}' if name else f'stream {self._stream}'} is open"
        return Attempt(False, BREAKER_OPEN, text, now, now)  # noqa: FBT003

    def allows(self, shard_id: str | None, tier: Tier, now: float) -> Decision:
        """Decide about a Kinesis record of this tier: SEND, PROBE, WAIT (see `ready_at`) or REFUSE."""
        if self._is_quiet:
            return Decision.SEND
        decision = Decision.SEND
        names = self._names(shard_id)
        for name in names:
            # Take neither a probe nor a token from one breaker for a record that the other stops.
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
        """Return when a Kinesis record that must wait may be tried again; always later than `now`."""
        at = now + _MOMENT
        return max(at, *(self._next_at(name, tier, now) for name in self._names(shard_id)))

    def _stopping(self, shard_id: str | None, now: float) -> str:
        """Return the name of the breaker that stops a Kinesis record of this shard: its own, else the stream's."""
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
        """Count the answer to a request."""
        sent = len(request.records)
        if isinstance(answer, RequestFailure) or len(answer) != sent:
            if not isinstance(answer, RequestFailure) or self._is_retryable(answer.code):
                code = answer.code if isinstance(answer, RequestFailure) else RECORD_COUNT_MISMATCH
                self._last_codes[WHOLE_STREAM] = code
                self._failures += 1
                self._failed_records += sent
                self._count_failure(sent, request.started_at, now)
            return
        self._failures = self._failed_records = 0
        counts: dict[str, list[int]] = {WHOLE_STREAM: [0, 0]}
        for record, entry in zip(request.records, answer, strict=True):
            name = record.predicted_shard or WHOLE_STREAM
            count = counts.get(name)
            if count is None:
                count = counts[name] = [0, 0]
            if entry.error_code or not entry.sequence_number:
                if self._is_retryable(entry.error_code or ""):
                    count[1] += 1
                    self._last_codes[name] = entry.error_code or INTERNAL
            elif record.predicted_shard in {None, entry.shard_id}:
                count[0] += 1
        # Any answer is a success for the stream as a whole, also if it refuses records of single shards.
        counts[WHOLE_STREAM][0] = sent - counts[WHOLE_STREAM][1]
        for name, count in counts.items():
            self._count(name, count, request.started_at, now)

    def _count_failure(self, sent: int, started_at: float, now: float) -> None:
        """Count a request that failed as a whole, and those before it that are not in the breaker's window."""
        known = self.breakers[WHOLE_STREAM].statistics(now)
        if known.state is not BreakerState.CLOSED:
            self._count(WHOLE_STREAM, [0, sent], started_at, now)
        elif self._failures >= FAILURES_IN_A_ROW:
            # While requests fail, only probes leave: few records each, and further apart than the window is long.
            failed = max(sent, self._failed_records - known.failed_records)
            self._count(WHOLE_STREAM, [0, failed], started_at, now)

    def _count(self, name: str, outcomes: Sequence[int], started_at: float, now: float) -> None:
        """Count the records of one answer that succeeded and failed."""
        breaker = self.breakers.get(name)
        if breaker is None:
            breaker = self.breakers[name] = CircuitBreaker(self._policy)
        succeeded, failed = outcomes
        state = breaker.record_outcomes(succeeded=succeeded, failed=failed, now=now, started_at=started_at)
        self._is_quiet = self._is_quiet and state is BreakerState.CLOSED

    def next_wakeup(self) -> float:
        """Return when `take_ready` will have something to do, `math.inf` for never.

        The end of a break counts even if no record waits: a caller that puts nothing while the breaker is open waits
        for the change.
        """
        if self._is_quiet:
            return self._waiting.next_at
        opened = [name for name, state in self._reported.items() if state is BreakerState.OPEN]
        return min([self._waiting.next_at, *(self.breakers[name].break_over_at for name in opened)])

    def take_ready(self, now: float) -> tuple[list[KinesisRecord], list[Fact]]:
        """Let time pass; remove and return the records that may be decided about again, and the breakers' changes."""
        ready: list[KinesisRecord] = []
        changes: list[Fact] = []
        if not self._is_quiet:
            self._is_quiet = True
            for name, breaker in self.breakers.items():
                state = breaker.state(now)
                self._is_quiet = self._is_quiet and state is BreakerState.CLOSED
                if self._reported.get(name, BreakerState.CLOSED) is not state:
                    self._reported[name] = state
                    code = self._last_codes.get(name, "")
                    changes.append(BreakerChanged(self._stream, name, state.value, code))
                    if state is BreakerState.CLOSED:
                        ready += self._take_waiting_for(name)
        if self._waiting.next_at <= now:
            ready += self._waiting.take_due(now)
        return ready, changes

    def _take_waiting_for(self, name: str) -> list[KinesisRecord]:
        """Remove and return the records that a breaker stopped which is closed now."""
        if name == WHOLE_STREAM:
            return self._waiting.take_except(set())
        shards = (record.predicted_shard for record in self._waiting)
        return self._waiting.take_except({shard for shard in shards if shard is not None and shard != name})

    def take_except(self, stable: set[str], open_shards: set[str]) -> list[KinesisRecord]:
        """Remove and return the records of shards that are not in `stable`; forget the breakers of others than open."""
        for name in [name for name in self.breakers if name != WHOLE_STREAM and name not in open_shards]:
            del self.breakers[name]
            self._reserved.pop(name, None)
            self._reported.pop(name, None)
            self._last_codes.pop(name, None)
        return self._waiting.take_except(stable)

    @property
    def user_record_count(self) -> int:
        """Return how many user records the gate keeps."""
        return self._waiting.user_record_count
